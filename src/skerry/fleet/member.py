"""One member: made to the end or not at all, kept if it answers, and left alone while another program makes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial

import msgspec

from skerry import owners
from skerry.errors import AgentError, Conflict, CreateFailed, NotFound, SkerryError, WrongState
from skerry.fleet.model import FLEET_LABEL, SETUP_LABEL, Command, FleetSpec, Healthcheck, Phase
from skerry.fleet.plan import Change, Kind, diff, member_of
from skerry.fleet.removing import remove
from skerry.lifecycle import State, run_to_end
from skerry.manager import AsyncSandboxManager
from skerry.records import Cause, Filter, Record
from skerry.results import ExecResult
from skerry.sandbox import AsyncSandbox
from skerry.spec import SandboxId, new_id

_ANSWER_S = 10.0
"""How long the agent of a member that is there already may take before it counts as broken."""
_SETUP_S = 1800.0
"""How long one setup command may take in a phase that has no timeout."""
_OTHERS_S = 1800.0
"""How long another program may take to make a member."""
_POLL_S = (0.01, 0.25)
_TRIES = 20
_TAIL = 2000

in_work: set[SandboxId] = set()
"""Members that this process makes, until their phase is decided, whichever of its fleets does."""


class EndedByOthers(Exception):
    """Somebody destroyed a member while we made it."""


class Ready(msgspec.Struct, frozen=True):
    id: SandboxId
    is_new: bool
    """It was made now, and is on trial until its phase is decided."""


class Row:
    """Members of a phase take their names in the order of their indexes: of two programs that start one phase at once
    one has its first member then, for which the other waits with empty hands. Else each could have what the other
    waits for."""

    def __init__(self, count: int) -> None:
        self._due = [asyncio.Event() for _ in range(count + 1)]
        self._past: set[int] = set()
        self._first = 0
        self._due[0].set()

    async def due(self, at: int) -> None:
        """Until all before have their names, or need none any more."""
        await self._due[at].wait()

    def past(self, at: int) -> None:
        self._past.add(at)
        while self._first in self._past:
            self._first += 1
            self._due[self._first].set()


class Place(msgspec.Struct, frozen=True):
    """Where in the row a member is."""

    row: Row
    at: int
    room: Callable[[], AbstractAsyncContextManager[None]]
    """What it takes while it is worked on, but not while it waits."""


class MemberMaker:
    """Members are made `ephemeral`, with the label that their setup is pending: if this program dies before their phase
    is decided, the next reconcile removes them."""

    def __init__(self, manager: AsyncSandboxManager, fleet: FleetSpec) -> None:
        self._manager = manager
        self._fleet = fleet

    async def ensure(self, phase: Phase, change: Change, holder: Record | None, place: Place) -> Ready:
        """The member as it should be: the one that is there, or a new one. `holder` is who has its name now."""
        for _ in range(_TRIES):
            if holder is not None and _is_on_trial(holder):
                holder = await self._wait_for_other(holder)
            if holder is not None:
                # The plan may be older than whoever has the name now.
                change = self._judge(phase, change.index, holder)
                async with place.room():
                    is_fit = change.kind in (Kind.KEEP, Kind.START)
                    if is_fit and await self._wake(phase, change, holder):
                        return Ready(holder.id, is_new=False)
                    await self._manager.destroy(holder.id)
            await place.row.due(place.at)
            async with place.room():
                try:
                    return await self._make(phase, change.index, place)
                except Conflict as conflict:
                    holder = await self._holder(change.name, conflict)
        raise Conflict(f"{change.name} is changed all the time by other programs; try again")

    def _judge(self, phase: Phase, index: int, holder: Record) -> Change:
        member = member_of(holder)
        changes = diff(self._fleet, [] if member is None else [member]).of(phase.name)
        return next(change for change in changes if change.index == index and change.kind is not Kind.DESTROY)

    async def _holder(self, name: str, conflict: Conflict) -> Record | None:
        """Who took the name meanwhile; raises if that is none of this fleet."""
        for record in await self._manager.list(Filter(project=self._fleet.project, name=name)):
            if record.spec.labels.get(FLEET_LABEL) != self._fleet.name:
                raise conflict
            return record
        return None

    async def _wait_for_other(self, record: Record) -> Record | None:
        """What became of one that was being made when it was last seen; it may be decided by now."""
        wait, longest = _POLL_S
        end = time.monotonic() + _OTHERS_S
        while True:
            try:
                record = await self._manager.store.get(record.id)
            except NotFound:
                return None
            if not record.is_live or not is_in_work(record):
                return record if record.is_live else None
            if time.monotonic() > end:
                why = f"process {record.owner.pid} has been making it for {_OTHERS_S:g} s"
                raise WrongState(f"{record.name} is not ready: {why}; end that, or destroy sandbox {record.id}")
            await asyncio.sleep(wait)
            wait = min(wait * 2, longest)

    async def _wake(self, phase: Phase, change: Change, record: Record) -> bool:
        """Whether one that is there answers; it is told its environment anew, since its peers may be others by now."""
        env = phase.member_spec(self._fleet.name, change.index).env
        try:
            async with asyncio.timeout(_ANSWER_S):
                if record.state is State.PAUSED:
                    await self._manager.resume(record.id)
                elif record.state is State.STOPPED:
                    await self._manager.start(record.id, env)
                await self._manager._handle(await self._manager.store.get(record.id)).set_env(env)
        except (AgentError, NotFound, WrongState, TimeoutError):
            return False
        return True

    async def _make(self, phase: Phase, index: int, place: Place) -> Ready:
        id = new_id()
        in_work.add(id)
        try:
            spec = phase.member_spec(self._fleet.name, index)
            # Let the next in the row go on as soon as the registry has this one.
            on_known = partial(place.row.past, place.at)
            whole = self._manager._complete(spec, {})
            sandbox = await self._manager._create(id, whole, ephemeral=True, on_known=on_known)
            try:
                await _prepare(sandbox, phase)
            except BaseException as error:
                await run_to_end(self._take_back(id, error))
                raise
        except Exception as error:
            if await self._was_ended_by_others(id):
                raise EndedByOthers(f"somebody destroyed it while it was made: {error}") from error
            raise
        except BaseException:
            in_work.discard(id)
            raise
        return Ready(id, is_new=True)

    async def _was_ended_by_others(self, id: SandboxId) -> bool:
        in_work.discard(id)
        try:
            record = await self._manager.store.get(id)
        except SkerryError:
            return False  # it came to nothing, or nobody can tell
        return record.cause is Cause.USER

    async def _take_back(self, id: SandboxId, error: BaseException) -> None:
        for why in (await remove({str(id): id}, self.discard)).values():
            error.add_note(f"and it could not be removed: {why}")

    async def discard(self, id: SandboxId) -> None:
        """Remove one that was made for a phase that failed."""
        try:
            await self._manager.destroy(id, cause=Cause.CREATION_FAILED)
        finally:
            in_work.discard(id)

    async def settle(self, record: Record) -> bool:
        """From here on it is a member like any other, and outlives this program; False if it is gone."""
        try:
            for _ in range(_TRIES):
                if record.doomed or not record.is_live:
                    return False
                labels = {key: value for key, value in record.spec.labels.items() if key != SETUP_LABEL}
                spec = msgspec.structs.replace(record.spec, labels=labels)
                try:
                    await self._manager.store.change(record, spec=spec, ephemeral=False)
                    return True
                except Conflict:
                    record = await self._manager.store.get(record.id)
            raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")
        finally:
            in_work.discard(record.id)


def _is_on_trial(record: Record) -> bool:
    return record.ephemeral or record.state is State.CREATING


def is_in_work(record: Record) -> bool:
    """Whether some program that lives makes it right now, as far as can be known."""
    if not _is_on_trial(record) or record.doomed:
        return False
    if record.owner == owners.this_process():
        return record.id in in_work
    alive = owners.is_alive(record.owner)
    return bool(alive) or (alive is None and time.time() - record.updated_at < _OTHERS_S)


async def _prepare(sandbox: AsyncSandbox, phase: Phase) -> None:
    """What makes a box a member: an agent that answers, files, setup, health."""
    await sandbox.ping()
    for file in phase.files:
        await sandbox.files.write(file.path, file.content, mode=file.mode)
    for number, command in enumerate(phase.setup, start=1):
        result = await sandbox.exec(command, timeout_s=phase.timeout_s or _SETUP_S)
        if not result.ok:
            raise _failed(f"setup command {number} of {len(phase.setup)}", command, result)
    if phase.healthcheck is not None:
        await _await_health(sandbox, phase.healthcheck)


async def _await_health(sandbox: AsyncSandbox, check: Healthcheck) -> None:
    patience_ends = time.monotonic() + check.start_period_s
    failures = 0
    while True:
        result = await sandbox.exec(check.command, timeout_s=check.timeout_s)
        if result.ok:
            return
        failures += time.monotonic() >= patience_ends
        if failures >= check.retries:
            raise _failed(f"the healthcheck, {failures} times in a row,", check.command, result)
        await asyncio.sleep(check.interval_s)


def _failed(what: str, command: Command, result: ExecResult) -> CreateFailed:
    words = command if isinstance(command, str) else " ".join(command)
    short = words if len(words) <= 80 else f"{words[:77]}..."
    how = (
        f"took longer than it may ({result.duration_s:.1f} s)" if result.timed_out else f"ended with {result.exit_code}"
    )
    tail = (result.error_text.strip() or result.text.strip())[-_TAIL:]
    return CreateFailed(f"{what} {how}: {short}", log=tail)
