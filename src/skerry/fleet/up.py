"""The start of a fleet, read from top to bottom: all phases, one phase when it is due, one member of it.

A phase starts when all that it waits for is ready, and gets ready as a whole or not at all, unless it is to go on with
what came up. `members.py` has what is done with a single member.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial

import msgspec

from skerry.aio import run_to_end
from skerry.errors import InvalidFleet, InvalidSpec, NotFound, Problem, SkerryError, Unsupported
from skerry.fleet import aside, events
from skerry.fleet.events import Notifier, PhaseReport, PhaseState, Report
from skerry.fleet.members import EndedByOthers, Members, Ready, Turn, destroy_many
from skerry.fleet.model import ASIDE_LABEL, PHASE_LABEL, OnFailure, Phase
from skerry.fleet.plan import Change, Kind, Member, diff
from skerry.fleet.status import Roster, by_phase
from skerry.manager.providers import refuse_unknown, refuse_without_image
from skerry.manager.workspace import for_box
from skerry.model.records import Filter, Record

_log = logging.getLogger("skerry.fleet")
_now = time.monotonic


class Start(msgspec.Struct, eq=False):
    """One start of some phases, from its first look to its report."""

    _members: Members
    _phases: Sequence[Phase]
    _roster: Roster
    _locks: Mapping[str, asyncio.Lock]
    _notifier: Notifier
    _tasks: dict[str, asyncio.Task[PhaseReport]] = {}
    _begun: set[str] = set()
    _stopped: set[str] = set()
    _is_stopped_whole: bool = False
    _ends_at: float | None = None
    _destroyed: list[str] = []
    _errors: dict[str, str] = {}

    def stop(self, phases: Collection[str] | None = None) -> None:
        """Give these phases up, or all, and remove what they have made so far."""
        self._is_stopped_whole |= phases is None
        for phase in self._phases:
            if (phases is None or phase.name in phases) and phase.name not in self._stopped:
                self._stopped.add(phase.name)
                # One that has not begun sees that it is stopped; cancelled before that, it would have no report.
                if phase.name in self._begun and self._tasks[phase.name] is not asyncio.current_task():
                    self._tasks[phase.name].cancel()

    async def run(self, *, is_whole: bool = False) -> Report:
        """Start them. `is_whole` is for a start of all phases: members of any others are removed. Raises InvalidFleet
        before the first phase starts if a provider is missing or does not know a field."""
        spec = self._members.fleet
        self._refuse_unsupported()
        await self._repair_hosts()
        began = _now()
        if spec.timeout_s is not None:
            self._ends_at = began + spec.timeout_s
        async with asyncio.TaskGroup() as group:
            for phase in self._phases:
                self._tasks[phase.name] = group.create_task(self._start_phase(phase))
            if is_whole and not self._is_stopped_whole:
                group.create_task(self._remove_gone_phases())
        return Report(
            fleet=spec.name,
            phases={name: task.result() for name, task in self._tasks.items()},
            duration_s=_now() - began,
            destroyed=tuple(self._destroyed),
            errors=self._errors,
        )

    def _refuse_unsupported(self) -> None:
        wrong = []
        for phase in self._phases:
            try:
                provider = self._members.manager.provider(phase.spec.provider)
                refuse_unknown(provider, for_box(phase.spec))
                refuse_without_image(provider, phase.spec)
            except (NotFound, Unsupported, InvalidSpec) as error:
                wrong.append(Problem(0, 0, f"phase {phase.name!r}: {error}"))
        if wrong:
            raise InvalidFleet(wrong)

    async def _repair_hosts(self) -> None:
        """Tell the registry of boxes that died unseen, before anything is decided by it."""
        names = {phase.name for phase in self._phases}
        records = (await self._roster.records()).values()
        for provider in {record.spec.provider for record in records if record.spec.labels[PHASE_LABEL] in names}:
            try:
                await self._members.manager.repair.provider(provider)
            except SkerryError as error:  # what cannot be known now is seen when the members are asked
                _log.debug("fleet %s: %s could not be reconciled: %s", self._members.fleet.name, provider, error)

    async def _start_phase(self, phase: Phase) -> PhaseReport:
        """Report on a phase also if it is stopped, or if the registry fails."""
        began = _now()
        self._begun.add(phase.name)
        try:
            if phase.name not in self._stopped:
                return await self._start_when_due(phase, began)
        except asyncio.CancelledError:
            if phase.name not in self._stopped:
                raise
        except SkerryError as error:
            return self._report(phase, began, PhaseState.FAILED, str(error))
        return self._report(phase, began, PhaseState.STOPPED, "it was stopped while it started")

    async def _start_when_due(self, phase: Phase, began: float) -> PhaseReport:
        try:
            async with asyncio.timeout(self._left()):
                if missing := await self._wait_for_others(phase):
                    return self._report(phase, began, PhaseState.SKIPPED, missing)
                await self._locks[phase.name].acquire()
        except TimeoutError:
            why = f"the fleet's {self._members.fleet.timeout_s:g} s were over before its turn"
            return self._report(phase, began, PhaseState.SKIPPED, why)
        try:
            return await self._start_now(phase, began)
        finally:
            self._locks[phase.name].release()

    async def _wait_for_others(self, phase: Phase) -> str:
        """Wait until all that it waits for is ready; the reason, if that will not be."""
        for name in phase.wait_for:
            if name in self._tasks:
                await asyncio.wait([self._tasks[name]])
                report = self._tasks[name].result()
                goes_on = self._members.fleet.phase(name).on_failure is OnFailure.CONTINUE and report.ready > 0
                if not (report.ok or goes_on):
                    return f"it waits for {name}, which is {report.state}"
        return ""

    async def _start_now(self, phase: Phase, began: float) -> PhaseReport:
        for record in by_phase(await self._roster.records(), phase.name):
            if ASIDE_LABEL in record.spec.labels:
                await aside.recover(self._members.manager, record)
        members = await self._roster.members()
        if missing := self._lost_since(phase, members):
            self.stop()
            return self._report(phase, began, PhaseState.STOPPED, missing)
        changes = diff(self._members.fleet, members).of(phase.name)
        await self._remove([change for change in changes if change.kind is Kind.DESTROY])
        attempt = _PhaseAttempt(self._members, phase, self._notifier)
        wanted = [change for change in changes if change.kind is not Kind.DESTROY]
        limits = [each for each in (phase.timeout_s, self._left()) if each is not None]
        report = await attempt.run(wanted, await self._roster.records(), min(limits, default=None))
        if report.state is PhaseState.STOPPED:
            self.stop()  # somebody else ends this fleet: what we made would be in the way
        return report

    def _lost_since(self, phase: Phase, members: Sequence[Member]) -> str:
        """The reason, if another program has ended what the phase waits for meanwhile."""
        for name in phase.wait_for:
            if name in self._tasks:
                there = sum(member.phase == name and not (member.doomed or member.is_aside) for member in members)
                if there < self._tasks[name].result().ready:
                    return f"it waits for {name}, and somebody destroyed members of that"
        return ""

    async def _remove_gone_phases(self) -> None:
        known = {phase.name for phase in self._members.fleet.phases}
        changes = diff(self._members.fleet, await self._roster.members()).changes
        for name in sorted({change.phase for change in changes} - known):
            async with self._locks[name]:
                await self._remove([change for change in changes if change.phase == name])

    async def _remove(self, changes: Sequence[Change]) -> None:
        ids = {change.name: change.id for change in changes if change.id is not None}
        failed = await destroy_many(ids, self._members.manager.destroy)
        self._errors |= failed
        for change in changes:
            if change.name not in failed:
                self._destroyed.append(change.name)
                self._notifier.notify(events.MemberDestroyed(phase=change.phase, member=change.name, why=change.why))

    def _left(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - _now())

    def _report(self, phase: Phase, began: float, state: PhaseState, why: str) -> PhaseReport:
        """Report on a phase that was not begun, or of which nothing is left."""
        report = PhaseReport(state=state, total=phase.count, duration_s=_now() - began, errors={phase.name: why})
        _notify_end(self._notifier, phase, report)
        return report


class _PhaseAttempt(msgspec.Struct):
    """One phase on its way to be ready. Its new members are on trial until it is decided: then all of them outlive this
    program, or none."""

    _members: Members
    _phase: Phase
    _notifier: Notifier
    _tasks: list[asyncio.Task[None]] = []
    _ready: dict[str, Ready] = {}
    _errors: dict[str, str] = {}
    _is_late: bool = False
    _ended_by_others: bool = False

    async def run(
        self, changes: Sequence[Change], records: Mapping[str, Record], timeout_s: float | None
    ) -> PhaseReport:
        began = _now()
        self._notifier.notify(events.PhaseStarted(phase=self._phase.name, total=self._phase.count))
        try:
            await self._bring_up(changes, records, timeout_s)
            came_up = tuple(sorted(self._ready))
            if self._stays():
                await run_to_end(self._settle())
        except BaseException:
            await run_to_end(self._take_back())
            raise
        state = self._state()
        if not self._stays():
            await run_to_end(self._take_back())
        report = PhaseReport(
            state=state,
            total=self._phase.count,
            ready=len(self._ready),
            came_up=came_up,
            duration_s=_now() - began,
            errors=dict(sorted(self._errors.items())),
        )
        _notify_end(self._notifier, self._phase, report)
        return report

    async def _bring_up(
        self, changes: Sequence[Change], records: Mapping[str, Record], timeout_s: float | None
    ) -> None:
        """Wait until each member is ready or has failed, or the time is over."""
        turn: Turn | None = None
        slots = (asyncio.Semaphore(self._phase.max_parallel or self._phase.count or 1), self._members.slots)
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for change in changes:
                    turn = Turn(turn, slots, partial(self._notify_begin, change))
                    self._tasks.append(group.create_task(self._start_member(change, records.get(change.name), turn)))
        except TimeoutError:
            self._is_late = True
            for change in changes:
                if change.name not in self._ready:
                    self._errors.setdefault(change.name, f"it was not ready within {timeout_s:g} s")

    async def _start_member(self, change: Change, holder: Record | None, turn: Turn) -> None:
        try:
            ready = await self._members.ensure(self._phase, change, holder, turn)
        except Exception as error:  # whatever a provider raises is this member's failure
            self._note_failure(change.name, error)
            if self._phase.on_failure is OnFailure.FAIL_FAST or self._ended_by_others:
                self._give_up()
            return
        finally:
            turn.leave()
        self._ready[change.name] = ready
        kept, duration_s = not ready.is_new, turn.worked_s()
        self._notifier.notify(
            events.MemberReady(phase=change.phase, member=change.name, id=ready.id, duration_s=duration_s, kept=kept)
        )

    def _notify_begin(self, change: Change) -> None:
        if change.kind is not Kind.KEEP:
            self._notifier.notify(events.MemberCreating(phase=change.phase, member=change.name))

    def _note_failure(self, name: str, error: Exception) -> None:
        self._ended_by_others |= isinstance(error, EndedByOthers)
        self._errors[name] = "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        self._notifier.notify(events.MemberFailed(phase=self._phase.name, member=name, error=self._errors[name]))

    def _give_up(self) -> None:
        """Cancel the others. An error through the group would do too, but a group that has one to tell keeps a
        cancellation of ours to itself."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _stays(self) -> bool:
        """Whether what came up is kept."""
        if self._ended_by_others:
            return False
        return self._phase.on_failure is OnFailure.CONTINUE or not (self._is_late or self._errors)

    def _state(self) -> PhaseState:
        if self._ended_by_others:
            return PhaseState.STOPPED
        if self._is_late:
            return PhaseState.TIMED_OUT
        if self._errors:
            goes_on = self._ready and self._phase.on_failure is OnFailure.CONTINUE
            return PhaseState.PARTIAL if goes_on else PhaseState.FAILED
        return PhaseState.READY if self._phase.count else PhaseState.EMPTY

    async def _settle(self) -> None:
        """Make the new members outlive this program. Those that are gone by now were destroyed by others."""
        new = {ready.id: name for name, ready in self._ready.items() if ready.is_new}
        if not new:
            return
        olds = {name: ready.predecessor.record.id for name, ready in self._ready.items() if ready.predecessor}
        found = await self._members.manager.list(Filter(project=self._phase.spec.project))
        on_trial = [record for record in found if record.id in new]
        settled = await asyncio.gather(*map(self._members.settle, on_trial), return_exceptions=True)
        for record, outcome in zip(on_trial, settled, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome:
                del new[record.id]
        await destroy_many(olds, partial(aside.give_up, self._members.manager))
        for name in new.values():
            del self._ready[name]
            self._note_failure(name, EndedByOthers("somebody destroyed it while its phase started"))

    async def _take_back(self) -> None:
        """Remove the new members of a phase that failed; older ones stay."""
        new = {name: ready.id for name, ready in self._ready.items() if ready.is_new}
        failed = await destroy_many(new, self._members.discard)
        for name in new:
            await self._members.restore(self._phase, self._ready.pop(name).predecessor)
            if name in failed:
                self._errors[name] = f"it could not be removed: {failed[name]}"
            else:
                why = "its phase did not get ready"
                self._notifier.notify(events.MemberDestroyed(phase=self._phase.name, member=name, why=why))


def _notify_end(notifier: Notifier, phase: Phase, report: PhaseReport) -> None:
    ready, total, duration_s = report.ready, report.total, report.duration_s
    event: events.FleetEvent = events.PhaseReady(phase=phase.name, ready=ready, total=total, duration_s=duration_s)
    if not report.ok:
        told = {"state": report.state, "error": next(iter(report.errors.values()), "")}
        event = events.PhaseFailed(phase=phase.name, ready=ready, total=total, duration_s=duration_s, **told)
    notifier.notify(event)
