"""A pool: one task keeps it full as the plan says, and callers take the oldest."""

from __future__ import annotations

import asyncio
import logging
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Self, Unpack

import msgspec

from skerry.aio import run_to_end
from skerry.errors import InvalidSpec, SkerryError, WrongState
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Record
from skerry.model.spec import SandboxId, Spec, SpecOptions
from skerry.pool.claim import Binding, Miss, discard, is_warm, key_of, release, take, warm_filter, warm_spec
from skerry.sandbox.sandbox import AsyncSandbox

_log = logging.getLogger("skerry.pool")
_now = time.monotonic
WATCH_S = 0.5  # how often a pool looks whether another program has claimed a sandbox of its
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 60.0


class Warm(NamedTuple):
    """A sandbox that waits to be handed out."""

    id: SandboxId
    since: float


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a plan. Times are of one monotonic clock."""

    size: int
    max_boots: int
    max_age_s: float
    ready: tuple[Warm, ...] = ()
    """The oldest first."""
    booting: int = 0
    failures: int = 0
    """Boots that failed since the last that did not."""
    failed_at: float = 0.0
    closing: bool = False


class PoolPlan(NamedTuple):
    """The next steps of a pool; it plans again at `look_at`, whatever happens before."""

    drops: list[SandboxId]
    boots: int
    look_at: float


def plan(state: PoolState, now: float) -> PoolPlan:
    """Decide, without touching anything, which to drop, how many to boot, and when to look again."""
    if state.closing:
        return PoolPlan([each.id for each in state.ready], 0, now + WATCH_S)
    fresh = [each for each in state.ready if now - each.since < state.max_age_s]
    kept = fresh[max(0, len(fresh) - state.size) :]
    at_once = 1 if state.failures else state.max_boots  # one boot is enough to see whether they work again
    boots = 0 if now < retry_at(state) else min(state.size - len(kept) - state.booting, at_once - state.booting)
    look_at = min([now + WATCH_S, *(each.since + state.max_age_s for each in kept)])
    return PoolPlan([each.id for each in state.ready if each not in kept], max(0, boots), look_at)


def retry_at(state: PoolState) -> float:
    """Time of the next boot: after each failure twice as long a wait as after the one before it, up to a bound."""
    if not state.failures:
        return 0.0
    return state.failed_at + min(_LAST_RETRY_S, _FIRST_RETRY_S * 2.0 ** min(state.failures - 1, 16))


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """State of a pool, and counts since it was opened."""

    key: str
    """What boxes of this pool have in common; the value of the label `skerry.pool`."""
    size: int
    ready: int
    booting: int
    hits: int
    misses: int
    """Acquires that found nothing warm and had to boot."""
    discards: int
    """Warm ones that were too old, or did not answer when they were wanted."""
    claimed: int
    """Warm ones that another program took, or somebody destroyed."""
    failures: int
    """Boots that failed."""
    retry_in_s: float
    """After failures: how long until the next boot."""
    age_p50_s: float
    age_max_s: float
    last_error: str


class _Item(NamedTuple):
    record: Record
    since: float


class AsyncSandboxPool:
    """Keeps `size` sandboxes of one spec ready, and hands each out once, the oldest first.

        async with AsyncSandboxPool(manager, size=4, memory="512M") as pool:
            sandbox = await pool.acquire(name="job-1", env={"TOKEN": "..."}, lifetime="1h")

    What is handed out is the caller's and outlives the pool. Where nothing is warm, a sandbox is booted on the spot.
    Those that wait are in the registry with the label `skerry.pool`, so that other programs can claim them
    (`skerry.pool.claim`, `skerry run --pool`), and they end with this program. At the end of the `async with` no more
    are handed out, boots are waited for, and what is left is destroyed.
    """

    def __init__(
        self,
        manager: AsyncSandboxManager,
        spec: Spec | None = None,
        *,
        size: int = 4,
        max_boots: int = 2,
        max_age_s: float = 3600.0,
        interpreters: Sequence[str] = (),
        **options: Unpack[SpecOptions],
    ) -> None:
        """`max_boots` is how many boot at once; one that waited for `max_age_s` is replaced by a fresh one. Each
        has an interpreter of these languages ready, which remembers nothing yet."""
        for field, value in (("size", size), ("max_boots", max_boots), ("max_age_s", max_age_s)):
            if value <= 0:
                raise InvalidSpec(f"{field}: {value} must be more than 0", field=field)
        self._manager = manager
        self.spec = manager.complete(spec, options)
        self.key = key_of(self.spec)
        self._goal = PoolState(size=size, max_boots=max_boots, max_age_s=max_age_s)
        self._interpreters = tuple(interpreters)
        self._ready: dict[SandboxId, _Item] = {}
        self._broken: list[_Item] = []
        self._booting = self._dropping = self._handing = 0
        self._failures_in_a_row = 0
        self._failed_at = 0.0
        self._hits = self._misses = self._discards = self._claimed = self._failures = 0
        self._last_error = ""
        self._last_event = -1
        self._closing = False
        self._changed = asyncio.Event()
        self._full = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._keeper is not None:
            raise WrongState("this pool was already opened; make another")
        self._keeper = asyncio.create_task(self._keep(), name="skerry-pool")
        return self

    async def __aexit__(self, *_: object) -> None:
        await run_to_end(self._close())

    async def acquire(self, *, ephemeral: bool = False, **bind: Unpack[Binding]) -> AsyncSandbox:
        """A sandbox at once if one is warm, else a new one. What is given replaces what the pool's spec says.

        An `ephemeral` one ends with this program. Raises InvalidSpec for rules where the pool's boxes have none.
        """
        if self._keeper is None or self._closing:
            raise WrongState("the pool is not open: acquire within its `async with`")
        spec = self.spec.but(**bind)
        if spec.network != self.spec.network:
            reason = "the boxes of this pool have no gate; make the pool with network='rules'"
            raise InvalidSpec(f"allow: {reason}", field="allow")
        self._handing += 1
        try:
            sandbox = await self._take_oldest(spec, ephemeral)
        finally:
            self._handing -= 1
            self._note_change()
        if sandbox is not None:
            self._hits += 1
            return sandbox
        self._misses += 1
        return await self._manager.create(spec, ephemeral=ephemeral)

    async def wait_for_full(self, timeout_s: float | None = None) -> None:
        """Wait until as many are warm as there should be."""
        async with asyncio.timeout(timeout_s):
            await self._full.wait()

    def stats(self) -> PoolStats:
        now = _now()
        ages = [now - item.since for item in self._ready.values()]
        return PoolStats(
            key=self.key,
            size=self._goal.size,
            ready=len(self._ready),
            booting=self._booting,
            hits=self._hits,
            misses=self._misses,
            discards=self._discards,
            claimed=self._claimed,
            failures=self._failures,
            retry_in_s=max(0.0, retry_at(self._state()) - now) if self._failures_in_a_row else 0.0,
            age_p50_s=statistics.median(ages) if ages else 0.0,
            age_max_s=max(ages, default=0.0),
            last_error=self._last_error,
        )

    async def _take_oldest(self, spec: Spec, ephemeral: bool) -> AsyncSandbox | None:
        while self._ready:
            id = next(iter(self._ready))
            item = self._ready.pop(id)
            self._full.clear()
            try:
                taken = await take(self._manager, item.record, spec, ephemeral=ephemeral)
            except BaseException:
                self._ready = {id: item, **self._ready}
                raise
            match taken:
                case AsyncSandbox():
                    return taken
                case Miss.UNHEALTHY:
                    self._broken.append(item)
                case Miss.TAKEN:
                    self._claimed += 1
        return None

    # keeping it full: one task, which owns every boot and every removal

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._closing or self._ready or self._broken or self._booting or self._dropping or self._handing:
                self._changed.clear()
                await self._forget_claimed()
                look_at = self._act(group)
                with suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, look_at - _now())):
                        await self._changed.wait()

    async def _close(self) -> None:
        self._closing = True
        self._changed.set()
        if self._keeper is not None:
            await self._keeper

    def _note_change(self) -> None:
        self._changed.set()
        if len(self._ready) >= self._goal.size:
            self._full.set()
        else:
            self._full.clear()

    def _state(self) -> PoolState:
        return msgspec.structs.replace(
            self._goal,
            ready=tuple(Warm(id, item.since) for id, item in self._ready.items()),
            booting=self._booting,
            failures=self._failures_in_a_row,
            failed_at=self._failed_at,
            closing=self._closing,
        )

    def _act(self, group: asyncio.TaskGroup) -> float:
        """Begin what the plan says; when to look again."""
        drops, boots, look_at = plan(self._state(), _now())
        for _ in range(boots):
            self._booting += 1
            group.create_task(self._boot())
        dropped = [(item, Cause.AGENT_LOST) for item in self._broken]
        dropped += [(self._ready.pop(id), Cause.USER) for id in drops]
        self._broken = []
        for item, cause in dropped:
            self._dropping += 1
            self._discards += not self._closing
            group.create_task(self._drop(item, cause))
        return look_at

    async def _boot(self) -> None:
        try:
            sandbox = await self._manager.create(warm_spec(self.spec, self._goal.max_age_s), ephemeral=True)
            try:
                await sandbox.ping()  # opens the stream, so that the first call finds it open
                for language in self._interpreters:
                    await sandbox.interpreter(language)
                item = _Item(await self._manager.store.get(sandbox.id), _now())
            except BaseException:
                await run_to_end(sandbox.destroy())
                raise
        except Exception as error:  # whatever a provider raises, the pool goes on
            self._note_failure("a boot failed", error)
            self._failures += 1
            self._failures_in_a_row += 1
            self._failed_at = _now()
        else:
            self._ready[sandbox.id] = item
            self._failures_in_a_row = 0
        finally:
            self._booting -= 1
            self._note_change()

    async def _drop(self, item: _Item, cause: Cause) -> None:
        try:
            await discard(self._manager, item.record, cause)
        except Exception as error:  # its end is written down, or it ends with us: reconcile goes on with it
            self._note_failure(f"sandbox {item.record.id} could not be destroyed", error)
        finally:
            self._dropping -= 1
            self._note_change()

    async def _forget_claimed(self) -> None:
        """Forget those that other programs have taken; nothing to do while the registry's last event is the same."""
        known = list(self._ready)
        try:
            last_event = await self._manager.store.last_event()
            if last_event == self._last_event:
                return
            warm = {record.id for record in await self._manager.list(warm_filter(self.key)) if is_warm(record)}
        except SkerryError as error:
            self._note_failure("the registry cannot be read", error)
            return
        self._last_event = last_event
        for id in known:
            if id not in warm and self._ready.pop(id, None) is not None:
                self._claimed += 1
                self._note_change()
                _log.debug("pool %s: sandbox %s was taken by another program", self.key, id)
                await release(self._manager, id)

    def _note_failure(self, what: str, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
        _log.warning("pool %s: %s: %s", self.key, what, self._last_error)
