"""One phase on its way to be ready: whole or not at all, unless it is told to go on with what came up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from skerry.fleet.events import (
    MemberCreating,
    MemberDestroyed,
    MemberFailed,
    MemberReady,
    PhaseFailed,
    PhaseReady,
    PhaseStarted,
    Teller,
)
from skerry.fleet.member import EndedByOthers, MemberMaker, Place, Ready, Row
from skerry.fleet.model import OnFailure, Phase
from skerry.fleet.plan import Change, Kind
from skerry.fleet.removing import remove
from skerry.fleet.report import PhaseReport, PhaseState
from skerry.lifecycle import run_to_end
from skerry.manager import AsyncSandboxManager
from skerry.records import Filter, Record

_now = time.monotonic


class Attempt:
    """What is new is on trial until the phase is decided: then all of it outlives this program, or none."""

    def __init__(
        self, manager: AsyncSandboxManager, maker: MemberMaker, phase: Phase, slots: asyncio.Semaphore, teller: Teller
    ) -> None:
        self._manager = manager
        self._maker = maker
        self._phase = phase
        self._slots = slots
        self._own_slots = asyncio.Semaphore(phase.max_parallel or phase.count or 1)
        self._teller = teller
        self._tasks: list[asyncio.Task[None]] = []
        self._ready: dict[str, Ready] = {}
        self._errors: dict[str, str] = {}
        self._ended_by_others = False

    async def run(
        self, changes: Sequence[Change], records: Mapping[str, Record], timeout_s: float | None
    ) -> PhaseReport:
        began = _now()
        self._teller.tell(PhaseStarted(phase=self._phase.name, total=self._phase.count))
        try:
            is_late = await self._bring_up(changes, records, timeout_s)
            came_up = tuple(sorted(self._ready))
            if self._stays(is_late):
                await run_to_end(self._settle())
        except BaseException:
            await run_to_end(self._take_back())
            raise
        state = self._state(is_late)
        if not self._stays(is_late):
            await run_to_end(self._take_back())
        report = PhaseReport(
            state=state,
            total=self._phase.count,
            ready=len(self._ready),
            came_up=came_up,
            duration_s=_now() - began,
            errors=dict(sorted(self._errors.items())),
        )
        tell_end(self._teller, self._phase, report)
        return report

    async def _bring_up(
        self, changes: Sequence[Change], records: Mapping[str, Record], timeout_s: float | None
    ) -> bool:
        """Until each member is ready or has failed; True if the time was over before."""
        row = Row(len(changes))
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
                for at, change in enumerate(changes):
                    self._tasks.append(group.create_task(self._member(change, records.get(change.name), row, at)))
        except TimeoutError:
            for change in changes:
                if change.name not in self._ready:
                    self._errors.setdefault(change.name, f"it was not ready within {timeout_s:g} s")
            return True
        return False

    async def _member(self, change: Change, holder: Record | None, row: Row, at: int) -> None:
        began: float | None = None

        @asynccontextmanager
        async def room() -> AsyncIterator[None]:
            nonlocal began
            async with self._own_slots, self._slots:
                if began is None:
                    began = _now()
                    if change.kind is not Kind.KEEP:
                        self._teller.tell(MemberCreating(phase=change.phase, member=change.name))
                yield

        try:
            ready = await self._maker.ensure(self._phase, change, holder, Place(row, at, room))
        except Exception as error:  # whatever a provider raises is this member's failure
            self._note_failure(change.name, error)
            if self._phase.on_failure is OnFailure.FAIL_FAST or self._ended_by_others:
                self._give_up()
            return
        finally:
            row.past(at)
        self._ready[change.name] = ready
        duration_s, kept = _now() - (began or _now()), not ready.is_new
        self._teller.tell(
            MemberReady(phase=change.phase, member=change.name, id=ready.id, duration_s=duration_s, kept=kept)
        )

    def _give_up(self) -> None:
        """Not by an error through the group: a group that has one to tell keeps a cancellation of ours to itself."""
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

    def _note_failure(self, name: str, error: Exception) -> None:
        self._ended_by_others |= isinstance(error, EndedByOthers)
        self._errors[name] = "; ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        self._teller.tell(MemberFailed(phase=self._phase.name, member=name, error=self._errors[name]))

    def _state(self, is_late: bool) -> PhaseState:
        if self._ended_by_others:
            return PhaseState.STOPPED
        if is_late:
            return PhaseState.TIMED_OUT
        if self._errors:
            goes_on = self._ready and self._phase.on_failure is OnFailure.CONTINUE
            return PhaseState.PARTIAL if goes_on else PhaseState.FAILED
        return PhaseState.READY if self._phase.count else PhaseState.EMPTY

    def _stays(self, is_late: bool) -> bool:
        """Whether what came up is kept."""
        if self._ended_by_others:
            return False
        return self._phase.on_failure is OnFailure.CONTINUE or not (is_late or self._errors)

    async def _settle(self) -> None:
        """Make what is new outlive this program. Who is gone by now was destroyed by somebody else."""
        new = {ready.id: name for name, ready in self._ready.items() if ready.is_new}
        if not new:
            return
        found = await self._manager.list(Filter(project=self._phase.spec.project))
        on_trial = [record for record in found if record.id in new]
        settled = await asyncio.gather(*map(self._maker.settle, on_trial), return_exceptions=True)
        for record, outcome in zip(on_trial, settled, strict=True):
            if isinstance(outcome, BaseException):
                raise outcome
            if outcome:
                del new[record.id]
        for name in new.values():
            del self._ready[name]
            self._note_failure(name, EndedByOthers("somebody destroyed it while its phase started"))

    async def _take_back(self) -> None:
        """Remove what is new of a phase that is not to be; what was there before stays."""
        new = {name: ready.id for name, ready in self._ready.items() if ready.is_new}
        failed = await remove(new, self._maker.discard)
        for name in new:
            del self._ready[name]
            if name in failed:
                self._errors[name] = f"it could not be removed: {failed[name]}"
            else:
                why = "its phase did not get ready"
                self._teller.tell(MemberDestroyed(phase=self._phase.name, member=name, why=why))


def tell_end(teller: Teller, phase: Phase, report: PhaseReport) -> None:
    ready, total, duration_s = report.ready, report.total, report.duration_s
    if report.ok:
        teller.tell(PhaseReady(phase=phase.name, ready=ready, total=total, duration_s=duration_s))
    else:
        error = next(iter(report.errors.values()), "")
        teller.tell(
            PhaseFailed(
                phase=phase.name, state=report.state, ready=ready, total=total, duration_s=duration_s, error=error
            )
        )
