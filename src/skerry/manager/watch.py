"""Watch sandboxes: wait for a state, tell what happened and why, and follow what others do to boxes by hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec

from skerry import aio
from skerry.clock import Moment
from skerry.errors import NotFound, SkerryError, WrongState
from skerry.manager import identity
from skerry.manager.decide import FOLLOWED
from skerry.manager.providers import Providers, require_capability
from skerry.manager.repair import Repair
from skerry.model.records import Cause, Event, Record
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import BoxChange, CanWatch, Capability
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store
from skerry.units import format_duration

_POLL_S = (0.01, 0.25)
"""First and longest wait between two looks at the registry."""
_LOOK_S = 2.0
"""Seconds between two looks for sandboxes of another provider."""
_BACKOFF_S = (0.1, 30.0)
"""First and longest wait until a provider that went away is tried again."""
_log = logging.getLogger("skerry.manager")


class Watcher:
    """The registry over time."""

    def __init__(self, store: Store, providers: Providers, repair: Repair) -> None:
        self._store = store
        self._providers = providers
        self._repair = repair

    async def until(self, id: SandboxId, states: set[State] | None = None) -> Record:
        """Wait until it is in one of `states`, or else has ended. Raises WrongState or NotFound if it never will be."""
        for wait_s in aio.backoff(*_POLL_S):
            record = await self._store.get(id)
            is_remade = record.remaker is not None and record.is_live and record.state is not State.LOST
            if record.state in (states or {State.DESTROYED, State.LOST}) and not is_remade:
                return record
            if states and record.state is State.LOST:
                why = record.detail or f"{record.cause}. Destroy it to go on"
                raise WrongState(f"sandbox {record.id} is {record.state}: {why}")
            if not record.is_live:
                raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}. {record.detail}")
            await self._repair.sandbox(record)
            await asyncio.sleep(wait_s)
        raise AssertionError("a backoff without a timeout has no end")

    async def events(self, after: int, id: SandboxId | None, *, follow: bool) -> AsyncGenerator[Event, None]:
        """Events after a place in the order, and with `follow` all that will come."""
        following = asyncio.create_task(self.follow()) if follow else None
        try:
            waits = aio.backoff(*_POLL_S)
            while True:
                events = await self._store.events(after=after, sandbox=id)
                for event in events:
                    after = event.seq
                    yield event
                if events:
                    waits = aio.backoff(*_POLL_S)
                elif following is not None:
                    if following.done():
                        following.result()  # it never ends by itself, so this tells why
                    await asyncio.sleep(next(waits))
                else:
                    return
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait([following])

    async def follow(self) -> None:
        """Until it is cancelled: write down what others do to boxes when it happens, where the provider tells."""
        watched: set[str] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                try:
                    names = {record.spec.provider for record in await self._store.list()}
                except SkerryError as error:
                    _log.debug("the registry is asked again later: %s", error)
                    names = set()
                for name in names - watched:
                    watched.add(name)
                    group.create_task(self._follow_provider(name))
                await asyncio.sleep(_LOOK_S)

    async def _follow_provider(self, name: str) -> None:
        """Follow one provider. All that happened while it was away is told when it is back, with every box."""
        try:
            host: CanWatch = require_capability(self._providers.get(name), Capability.WATCH)
        except SkerryError as error:
            _log.debug("provider %s is not watched: %s", name, error)
            return
        waits = aio.backoff(*_BACKOFF_S)
        while True:
            changes = host.watch()
            try:
                async for change in changes:
                    waits = aio.backoff(*_BACKOFF_S)
                    await self._follow_box(name, change)
            except (SkerryError, OSError) as error:
                _log.debug("the watch of provider %s broke: retry: %s", name, error)
            finally:
                close = getattr(changes, "aclose", None)
                if close is not None:
                    await close()
            await asyncio.sleep(next(waits))

    async def _follow_box(self, name: str, change: BoxChange) -> None:
        try:
            record = await self._store.get(change.id)
            state = None if change.status is None else FOLLOWED.get(change.status.state)
            if record.is_live and record.spec.provider == name and record.state is not state:
                await self._repair.sandbox(record)
        except NotFound:
            return  # a box of another installation
        except SkerryError as error:
            _log.debug("a change of sandbox %s is seen again by the next reconcile: %s", change.id, error)


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Reasons, in words, for the end of a sandbox that will come or has come."""

    id: SandboxId
    state: State
    cause: Cause | None
    detail: str
    reachable: bool
    ends_at: float | None
    idle_s: float | None
    running: int
    """Processes that were started in it and run: while there are any, it is not idle."""
    why: list[str]


async def explain(record: Record, sandbox: AsyncSandbox, now: Moment) -> Explanation:
    running, reachable = 0, False
    if record.state is State.READY:
        try:
            running = sum(each.running for each in await sandbox.processes.list())
            reachable = True
        except SkerryError as error:
            _log.debug("the agent of sandbox %s does not answer: %s", record.id, error)
    return Explanation(
        id=record.id,
        state=record.state,
        cause=record.cause,
        detail=record.detail,
        reachable=reachable,
        ends_at=record.ends_at if record.is_live else None,
        idle_s=record.spec.idle_s or None,
        running=running,
        why=_reasons(record, running, reachable, now),
    )


def _reasons(record: Record, running: int, reachable: bool, now: Moment) -> list[str]:
    if not record.is_live:
        return [f"it ended: {record.cause or 'destroyed'}"]
    reasons = []
    if record.state is State.LOST:
        reasons.append(f"it is lost: {record.cause}; it is adopted if its box comes back")
    if record.doomed:
        reasons.append("it is being destroyed")
    if record.state is State.READY and not reachable:
        reasons.append("its agent does not answer; reconcile will tell what became of it")
    left_s = record.left_s(now)
    if left_s is not None:
        reasons.append(f"its lifetime ends in {format_duration(left_s)}")
    elif record.ends_at is not None:
        reasons.append("its lifetime ends by the clock of the machine that made it")
    if record.spec.idle_s and running:
        reasons.append(f"it is not idle: {running} of its processes run")
    elif record.spec.idle_s:
        reasons.append(f"it ends after {format_duration(record.spec.idle_s)} without a call or a running process")
    if record.spec.sleep_after_s and record.state is State.READY:
        reasons.append(f"it sleeps after {format_duration(record.spec.sleep_after_s)} of the same, and a call wakes it")
    if record.ephemeral:
        who = f"process {record.owner.pid}"
        gone = identity.is_alive(record.owner) is False
        reasons.append(f"it ends with {who}" if not gone else f"{who} is gone: reconcile will end it")
    return reasons or ["nothing ends it but you"]
