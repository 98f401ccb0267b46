"""Sandboxes that are ready before they are asked for."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import NamedTuple, Self, Unpack

import msgspec

from skerry.errors import InvalidSpec, SkerryError, WrongState
from skerry.lifecycle import run_to_end
from skerry.manager import AsyncSandboxManager
from skerry.pool_plan import Boot, Drop, Look, PoolState, Warm, plan, retry_at
from skerry.records import Cause, Record
from skerry.sandbox import AsyncSandbox
from skerry.spec import SandboxId, Spec, SpecOptions
from skerry.warm import Binding, Gone, discard, is_warm, key_of, release, take, warm_filter, warm_spec

_now = time.monotonic


class PoolStats(msgspec.Struct, frozen=True, kw_only=True):
    """A pool as it is now, and what it has done since it was opened."""

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
    (`skerry.warm.claim`, `skerry run --pool`), and they end with this program. At the end of the `async with` no more
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
        **options: Unpack[SpecOptions],
    ) -> None:
        """`max_boots` is how many boot at once; one that waited for `max_age_s` is replaced by a fresh one."""
        for field, value in (("size", size), ("max_boots", max_boots), ("max_age_s", max_age_s)):
            if value <= 0:
                raise InvalidSpec(f"{field}: {value} must be more than 0", field=field)
        self._manager = manager
        self.spec = manager._complete(spec, options)
        self.key = key_of(self.spec)
        self._goal = PoolState(size=size, max_boots=max_boots, max_age_s=max_age_s)
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

        An `ephemeral` one ends with this program.
        """
        if self._keeper is None or self._closing:
            raise WrongState("the pool is not open: acquire within its `async with`")
        spec = self.spec.but(**bind)
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
                case Gone.UNHEALTHY:
                    self._broken.append(item)
                case Gone.TAKEN:
                    self._claimed += 1
        return None

    # keeping it full: one task, which owns every boot and every removal

    async def _keep(self) -> None:
        async with asyncio.TaskGroup() as group:
            while not self._is_empty():
                self._changed.clear()
                await self._forget_claimed()
                look_at = self._act(group)
                await self._wait_for_change(look_at)

    def _is_empty(self) -> bool:
        in_work = self._booting or self._dropping or self._handing
        return self._closing and not (in_work or self._ready or self._broken)

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

    async def _wait_for_change(self, look_at: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, look_at - _now())):
                await self._changed.wait()
        except TimeoutError:
            return

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
        look_at = now = _now()
        dropped, self._broken = [(item, Cause.AGENT_LOST) for item in self._broken], []
        for step in plan(self._state(), now):
            match step:
                case Boot(count):
                    for _ in range(count):
                        self._booting += 1
                        group.create_task(self._boot())
                case Drop(id):
                    dropped.append((self._ready.pop(id), Cause.USER))
                case Look(at):
                    look_at = at
        for item, cause in dropped:
            self._dropping += 1
            self._discards += not self._closing
            group.create_task(self._drop(item, cause))
        return look_at

    async def _boot(self) -> None:
        try:
            item = await self._make()
        except Exception as error:  # whatever a provider raises, the pool goes on
            self._note_failure(error)
            self._failures += 1
            self._failures_in_a_row += 1
            self._failed_at = _now()
        else:
            self._ready[item.record.id] = item
            self._failures_in_a_row = 0
        finally:
            self._booting -= 1
            self._note_change()

    async def _make(self) -> _Item:
        sandbox = await self._manager.create(warm_spec(self.spec, self._goal.max_age_s), ephemeral=True)
        try:
            await sandbox.ping()  # opens the stream, so that the first call finds it open
            return _Item(await self._manager.store.get(sandbox.id), _now())
        except BaseException:
            await run_to_end(sandbox.destroy())
            raise

    async def _drop(self, item: _Item, cause: Cause) -> None:
        try:
            await discard(self._manager, item.record, cause)
        except Exception as error:  # its end is written down, or it ends with us: reconcile goes on with it
            self._note_failure(error)
        finally:
            self._dropping -= 1
            self._note_change()

    async def _forget_claimed(self) -> None:
        """See whether others have taken from us; nothing happened in the registry if its last event is still that."""
        known = list(self._ready)
        try:
            last_event = await self._manager.store.last_event()
            if last_event == self._last_event:
                return
            warm = {record.id for record in await self._manager.list(warm_filter(self.key)) if is_warm(record)}
        except SkerryError as error:
            self._note_failure(error)
            return
        self._last_event = last_event
        for id in known:
            if id not in warm and self._ready.pop(id, None) is not None:
                self._claimed += 1
                self._note_change()
                await release(self._manager, id)

    def _note_failure(self, error: Exception) -> None:
        self._last_error = str(error) or type(error).__name__
