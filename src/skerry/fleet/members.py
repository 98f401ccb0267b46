"""One member of a fleet: kept if it answers, else made to the end or not at all; removed with others, best effort."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import msgspec

from skerry.aio import backoff, run_to_end
from skerry.clock import Moment
from skerry.errors import AgentError, Conflict, CreateFailed, LimitReached, NotFound, PortTaken, SkerryError, WrongState
from skerry.fleet import aside
from skerry.fleet.aside import Predecessor
from skerry.fleet.model import FLEET_LABEL, INDEX_LABEL, SETUP_LABEL, Command, FleetSpec, Healthcheck, Phase
from skerry.fleet.plan import Change, Kind, diff, member_of
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter, Record
from skerry.model.results import ExecResult
from skerry.model.spec import SandboxId, new_id
from skerry.model.states import State
from skerry.sandbox import service
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Changes

_ANSWER_S = 10.0  # for the agent of an existing member, before it counts as broken
_SETUP_S = 1800.0  # for one setup command in a phase that has no timeout
_OTHERS_S = 1800.0  # for another program to make a member
_POLL_S = (0.01, 0.25)
_TRIES = 20
_TAIL = 2000
_REMOVALS = 32
_REMOVE_S = 120.0
"""How long a box may take to go; its end is written down before, so that the next reconcile goes on with it."""
_log = logging.getLogger("skerry.fleet")

in_work: set[SandboxId] = set()
"""Members that this process makes, until their phase is decided, whichever of its fleets does."""


class EndedByOthers(Exception):
    """Another program destroyed a member while we made it."""


class Ready(msgspec.Struct, frozen=True):
    id: SandboxId
    is_new: bool
    """It was made now, and is on trial until its phase is decided."""
    predecessor: Predecessor | None = None
    """The member in whose place it is, until then."""


class Turn(msgspec.Struct):
    """One member's turn to be worked on, within bounds of its phase and of the fleet.

    Members of a phase take their names in the order of their indexes: of two programs that start one phase at once one
    has its first member then, and the other waits without any. Else each could wait for the other."""

    _after: Turn | None
    _bounds: Sequence[asyncio.Semaphore]
    _on_begin: Callable[[], None]
    _began: float | None = None
    _left: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Hold a slot of each bound; not to be held while waiting for others."""
        async with AsyncExitStack() as stack:
            for bound in self._bounds:
                await stack.enter_async_context(bound)
            if self._began is None:
                self._began = time.monotonic()
                self._on_begin()
            yield

    async def wait_for_name(self) -> None:
        """Wait until all members before have their names, or need none any more."""
        before = self._after
        while before is not None:
            await before._left.wait()
            before = before._after
        self._after = None

    def leave(self) -> None:
        """Let the next members take their names."""
        self._left.set()

    def worked_s(self) -> float:
        return 0.0 if self._began is None else time.monotonic() - self._began


class Members:
    """Maker of a fleet's members. They are `ephemeral` and labelled as pending at first: if this program dies before
    their phase is decided, the next reconcile removes them."""

    def __init__(self, manager: AsyncSandboxManager, fleet: FleetSpec) -> None:
        self.manager = manager
        self.fleet = fleet
        self.slots = asyncio.Semaphore(fleet.max_parallel)

    async def ensure(self, phase: Phase, change: Change, holder: Record | None, turn: Turn) -> Ready:
        """Keep the holder of the member's name if it is as it should be, else make a new one. Raises EndedByOthers, and
        Conflict if the name is not this fleet's. If it comes to nothing, what it was to replace is as it was."""
        old: Predecessor | None = None
        try:
            for _ in range(_TRIES):
                if holder is not None and _is_on_trial(holder):
                    holder = await self._wait_for_other(holder)
                if holder is not None:
                    change = self._judge(phase, change.index, holder)  # the plan may be older than the holder
                    async with turn.work():
                        if change.kind in (Kind.KEEP, Kind.START) and await self._wake(phase, change, holder):
                            if old is not None:
                                await aside.give_up(self.manager, old.record.id)
                            return Ready(holder.id, is_new=False)
                        old = await self._clear_name(change, holder) or old
                await turn.wait_for_name()
                async with turn.work():
                    try:
                        return Ready(await self._make(phase, change.index, turn), is_new=True, predecessor=old)
                    except (Conflict, LimitReached) as error:
                        by_name = None if isinstance(error, PortTaken | LimitReached) else error
                        holder = None if by_name is None else await self._holder(phase, change.index, by_name)
                        if holder is None and old is not None:  # there is no room for both, or one disk or port
                            await aside.give_up(self.manager, old.record.id)
                            old = None
                        elif by_name is None:
                            raise
            raise Conflict(f"{change.name} is changed all the time by other programs; try again")
        except BaseException:
            await run_to_end(self.restore(phase, old))
            raise

    async def _clear_name(self, change: Change, holder: Record) -> Predecessor | None:
        """Put a member aside whose successor is to be made, if its phase was changed; destroy one that is broken."""
        _log.info("fleet %s: %s is replaced (%s): %s", self.fleet.name, change.name, holder.id, change.why)
        if change.kind is Kind.REPLACE and aside.can_be_kept(self.manager, holder):
            return await aside.put_aside(self.manager, holder)
        await self.manager.destroy(holder.id)
        return None

    async def restore(self, phase: Phase, old: Predecessor | None) -> None:
        """Have a member again as it was before its successor, which came to nothing. Quiet if there was none."""
        if old is not None:
            index = int(old.record.spec.labels[INDEX_LABEL])
            env = phase.member_spec(self.fleet.name, index).env if old.is_stopped else None
            await aside.restore(self.manager, old.record.id, env)

    async def _wait_for_other(self, record: Record) -> Record | None:
        """Wait while another program makes it; the record then, or None if nothing came of it."""
        for delay_s in backoff(*_POLL_S, _OTHERS_S):
            try:
                record = await self.manager.store.get(record.id)
            except NotFound:
                return None
            if not record.is_live or not is_in_work(record, self.manager.store.now()):
                return record if record.is_live else None
            await asyncio.sleep(delay_s)
        why = f"process {record.owner.pid} has been making it for {_OTHERS_S:g} s"
        raise WrongState(f"{record.member_name} is not ready: {why}; end that, or destroy sandbox {record.id}")

    def _judge(self, phase: Phase, index: int, holder: Record) -> Change:
        member = member_of(holder)
        changes = diff(self.fleet, [] if member is None else [member]).of(phase.name)
        return next(change for change in changes if change.index == index and change.kind is not Kind.DESTROY)

    async def _wake(self, phase: Phase, change: Change, record: Record) -> bool:
        """Whether it answers; it is told its environment anew, since its peers may be others by now."""
        env = phase.member_spec(self.fleet.name, change.index).env
        try:
            async with asyncio.timeout(_ANSWER_S):
                if record.state in (State.PAUSED, State.ASLEEP):
                    await self.manager.resume(record.id)
                elif record.state is State.STOPPED:
                    await self.manager.start(record.id, env)
                await self.manager.handles.of(await self.manager.store.get(record.id)).set_env(env)
        except (AgentError, NotFound, WrongState, TimeoutError) as error:
            _log.debug("%s: sandbox %s does not answer: %s", change.name, record.id, error)
            return False
        return True

    async def _make(self, phase: Phase, index: int, turn: Turn) -> SandboxId:
        id = new_id()
        in_work.add(id)
        try:
            spec = self.manager.config.complete(phase.member_spec(self.fleet.name, index))
            record = await self.manager.handles.make(id, spec, ephemeral=True, on_known=turn.leave)
            try:
                await _prepare(self.manager.handles.of(record), phase)
            except BaseException as error:
                for why in (await run_to_end(destroy_many({str(id): id}, self.discard))).values():
                    error.add_note(f"and it could not be removed: {why}")
                raise
        except BaseException as error:
            in_work.discard(id)
            if isinstance(error, Exception) and await self._was_ended_by_others(id):
                raise EndedByOthers(f"somebody destroyed it while it was made: {error}") from error
            raise
        return id

    async def _was_ended_by_others(self, id: SandboxId) -> bool:
        with suppress(SkerryError):  # it came to nothing, or nobody can tell
            return (await self.manager.store.get(id)).cause is Cause.USER
        return False

    async def _holder(self, phase: Phase, index: int, conflict: Conflict) -> Record | None:
        """The record that took the member's name meanwhile. Raises `conflict` if that is none of this fleet."""
        name = phase.sandbox_name(self.fleet.name, index)
        for record in await self.manager.list(Filter(project=self.fleet.project, name=name)):
            if record.spec.labels.get(FLEET_LABEL) != self.fleet.name:
                raise conflict
            return record
        return None

    async def settle(self, record: Record) -> bool:
        """Make a new member outlive this program; False if it is gone."""
        try:
            record = await self.manager.store.update(record, _without_trial)
            return record.is_live and not record.doomed
        finally:
            in_work.discard(record.id)

    async def discard(self, id: SandboxId) -> None:
        """Remove a new member of a phase that failed."""
        try:
            await self.manager.destroy(id, cause=Cause.CREATION_FAILED)
        finally:
            in_work.discard(id)


async def destroy_many(ids: Mapping[str, SandboxId], destroy: Callable[[SandboxId], Awaitable[None]]) -> dict[str, str]:
    """Destroy members in parallel; the reasons, by name, of those that failed."""
    slots = asyncio.Semaphore(_REMOVALS)
    failed: dict[str, str] = {}

    async def one(name: str, id: SandboxId) -> None:
        try:
            async with slots, asyncio.timeout(_REMOVE_S):
                await destroy(id)
        except TimeoutError:
            failed[name] = f"sandbox {id} did not go within {_REMOVE_S:g} s: it goes with the next reconcile"
        except Exception as error:  # whatever a provider raises, the others go
            failed[name] = str(error) or type(error).__name__
        if name in failed:
            _log.warning("%s: sandbox %s could not be destroyed: %s", name, id, failed[name])

    async with asyncio.TaskGroup() as group:
        for name, id in ids.items():
            group.create_task(one(name, id))
    return failed


def is_in_work(record: Record, now: Moment) -> bool:
    """Whether a living program makes it right now, as far as can be known."""
    if not _is_on_trial(record) or record.doomed:
        return False
    if record.owner == identity.this_process():
        return record.id in in_work
    alive = identity.is_alive(record.owner)
    age_s = record.age_s(now)
    return bool(alive) or (alive is None and (age_s is None or age_s < _OTHERS_S))


def _is_on_trial(record: Record) -> bool:
    return record.ephemeral or record.state is State.CREATING


async def _without_trial(record: Record) -> Changes | None:
    if record.doomed or not record.is_live:
        return None
    labels = {key: value for key, value in record.spec.labels.items() if key != SETUP_LABEL}
    return {"spec": msgspec.structs.replace(record.spec, labels=labels), "ephemeral": False}


async def _prepare(sandbox: AsyncSandbox, phase: Phase) -> None:
    """Turn a box into a member: an agent that answers, files, setup, its command, health. Raises CreateFailed."""
    await sandbox.ping()
    for file in phase.files:
        await sandbox.files.write(file.path, file.content, mode=file.mode)
    for number, command in enumerate(phase.setup, start=1):
        result = await sandbox.exec(command, timeout_s=phase.timeout_s or _SETUP_S)
        if not result.ok:
            raise _failed(f"setup command {number} of {len(phase.setup)}", command, result)
    await service.begin(await sandbox.connection.connect(), sandbox.spec)
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
        _log.debug("sandbox %s: its healthcheck ended with %d, %d failures", sandbox.id, result.exit_code, failures)
        await asyncio.sleep(check.interval_s)


def _failed(what: str, command: Command, result: ExecResult) -> CreateFailed:
    words = command if isinstance(command, str) else " ".join(command)
    short = words if len(words) <= 80 else f"{words[:77]}..."
    took = f"took longer than it may ({result.duration_s:.1f} s)"
    how = took if result.timed_out else f"ended with {result.exit_code}"
    tail = (result.error_text.strip() or result.text.strip())[-_TAIL:]
    return CreateFailed(f"{what} {how}: {short}", log=tail)
