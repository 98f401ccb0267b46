"""Starting phases: each when all that it waits for is ready, and what is no longer asked for goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

from skerry.errors import SkerryError
from skerry.fleet.attempt import Attempt, tell_end
from skerry.fleet.events import MemberDestroyed, Teller
from skerry.fleet.member import MemberMaker
from skerry.fleet.model import FleetSpec, OnFailure, Phase
from skerry.fleet.plan import Change, Kind, Member, diff
from skerry.fleet.removing import remove
from skerry.fleet.report import PhaseReport, PhaseState, Report
from skerry.fleet.roster import Roster
from skerry.manager import AsyncSandboxManager

_now = time.monotonic


class Start:
    """One start of some phases, from its first look to its report."""

    def __init__(
        self,
        manager: AsyncSandboxManager,
        spec: FleetSpec,
        phases: Collection[str],
        roster: Roster,
        locks: Mapping[str, asyncio.Lock],
        teller: Teller,
    ) -> None:
        self._manager = manager
        self._spec = spec
        self._phases = [phase for phase in spec.phases if phase.name in phases]
        self._roster = roster
        self._locks = locks
        self._teller = teller
        self._maker = MemberMaker(manager, spec)
        self._slots = asyncio.Semaphore(spec.max_parallel)
        self._tasks: dict[str, asyncio.Task[PhaseReport]] = {}
        self._stopped: set[str] = set()
        self._is_stopped_whole = False
        self._ends_at: float | None = None
        self._destroyed: list[str] = []
        self._errors: dict[str, str] = {}

    def stop(self, phases: Collection[str] | None = None) -> None:
        """Give these phases up, or all; what they have made so far goes."""
        self._is_stopped_whole |= phases is None
        for phase in self._phases:
            if (phases is None or phase.name in phases) and phase.name not in self._stopped:
                self._stopped.add(phase.name)
                task = self._tasks.get(phase.name)
                if task is not None and task is not asyncio.current_task():
                    task.cancel()

    async def run(self, *, is_whole: bool = False) -> Report:
        """Start them; `is_whole` is for a start of all phases, after which there are members of no others."""
        began = _now()
        if self._spec.timeout_s is not None:
            self._ends_at = began + self._spec.timeout_s
        async with asyncio.TaskGroup() as group:
            for phase in self._phases:
                self._tasks[phase.name] = group.create_task(self._guarded(phase))
            if is_whole and not self._is_stopped_whole:
                group.create_task(self._remove_gone_phases())
        return Report(
            fleet=self._spec.name,
            phases={name: task.result() for name, task in self._tasks.items()},
            duration_s=_now() - began,
            destroyed=tuple(self._destroyed),
            errors=self._errors,
        )

    async def _guarded(self, phase: Phase) -> PhaseReport:
        """Also a phase that somebody stops, or whose registry fails, has a report."""
        began = _now()
        try:
            if phase.name not in self._stopped:
                return await self._when_due(phase, began)
        except asyncio.CancelledError:
            if phase.name not in self._stopped:
                raise
        except SkerryError as error:
            return self._report(phase, began, PhaseState.FAILED, str(error))
        return self._report(phase, began, PhaseState.STOPPED, "it was stopped while it started")

    async def _when_due(self, phase: Phase, began: float) -> PhaseReport:
        try:
            async with asyncio.timeout(self._left()):
                if missing := await self._wait_for(phase):
                    return self._report(phase, began, PhaseState.SKIPPED, missing)
                await self._locks[phase.name].acquire()
        except TimeoutError:
            why = f"the fleet's {self._spec.timeout_s:g} s were over before its turn"
            return self._report(phase, began, PhaseState.SKIPPED, why)
        try:
            return await self._begin(phase, began)
        finally:
            self._locks[phase.name].release()

    async def _wait_for(self, phase: Phase) -> str:
        """Until all that it waits for is ready; if that will not be, why."""
        for name in phase.wait_for:
            if name in self._tasks:
                await asyncio.wait([self._tasks[name]])
                report = self._tasks[name].result()
                goes_on = self._spec.phase(name).on_failure is OnFailure.CONTINUE and report.ready > 0
                if not (report.ok or goes_on):
                    return f"it waits for {name}, which is {report.state}"
        return ""

    async def _begin(self, phase: Phase, began: float) -> PhaseReport:
        members = await self._roster.members()
        if missing := self._lost_since(phase, members):
            self.stop()
            return self._report(phase, began, PhaseState.STOPPED, missing)
        changes = diff(self._spec, members).of(phase.name)
        await self._remove([change for change in changes if change.kind is Kind.DESTROY])
        attempt = Attempt(self._manager, self._maker, phase, self._slots, self._teller)
        wanted = [change for change in changes if change.kind is not Kind.DESTROY]
        limits = [each for each in (phase.timeout_s, self._left()) if each is not None]
        report = await attempt.run(wanted, await self._roster.records(), min(limits, default=None))
        if report.state is PhaseState.STOPPED:
            self.stop()  # somebody else ends this fleet: what we made would be in the way
        return report

    def _lost_since(self, phase: Phase, members: Sequence[Member]) -> str:
        """Whether what it waits for is still there: another program may have ended the fleet meanwhile."""
        for name in phase.wait_for:
            if name in self._tasks:
                there = sum(member.phase == name and not member.doomed for member in members)
                if there < self._tasks[name].result().ready:
                    return f"it waits for {name}, and somebody destroyed members of that"
        return ""

    async def _remove_gone_phases(self) -> None:
        known = {phase.name for phase in self._spec.phases}
        changes = diff(self._spec, await self._roster.members()).changes
        for name in sorted({change.phase for change in changes} - known):
            async with self._locks[name]:
                await self._remove([change for change in changes if change.phase == name])

    async def _remove(self, changes: Sequence[Change]) -> None:
        ids = {change.name: change.id for change in changes if change.id is not None}
        failed = await remove(ids, self._manager.destroy)
        self._errors |= failed
        for change in changes:
            if change.name not in failed:
                self._destroyed.append(change.name)
                self._teller.tell(MemberDestroyed(phase=change.phase, member=change.name, why=change.why))

    def _left(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - _now())

    def _report(self, phase: Phase, began: float, state: PhaseState, why: str) -> PhaseReport:
        """Of a phase that was not begun, or of which nothing is left."""
        report = PhaseReport(state=state, total=phase.count, duration_s=_now() - began, errors={phase.name: why})
        tell_end(self._teller, phase, report)
        return report
