"""Many short boxes: a hundred at once, and as many as go one after the other."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import ExitStack

import limit

from skerry import providers
from skerry.measure.figures import Figure, ms, p50, ratio
from skerry.measure.limits import Spawner
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings
from .witness import leftovers, warm_up

_AT_ONCE = 100
_WORKERS = 4


async def burst(settings: Settings) -> list[Figure]:
    provider = providers.load("local")
    try:
        await warm_up(provider)
        ones = [await _timed(provider, 1) for _ in range(settings.rounds(40))]
        all_at_once, bare = [], []
        for _ in range(settings.rounds(8)):
            all_at_once.append(await _timed(provider, _AT_ONCE))
            bare.append(await _bare_at_once())
        duration_s = 8 if settings.quick else 60
        ids: set[str] = set()
        end = time.monotonic() + duration_s
        await asyncio.gather(*(_cycle(provider, end, ids) for _ in range(_WORKERS)))
        left = sum(leftovers(ids).values())
    finally:
        await provider.aclose()
    took, one = p50(all_at_once), p50(ones)
    what = f"{_AT_ONCE} at once, all answered"
    return [
        Figure(
            case="burst", what=what, measured=ms(took), limit=f"{ms(one)} one", value=took / one, unit="x", at_most=25
        ),
        ratio("burst", what, all_at_once, bare, against=f"{_AT_ONCE} bwrap true"),
        Figure(
            case="burst",
            what=f"create, exec, destroy, {_WORKERS} at a time, for {duration_s} s",
            measured=f"{len(ids)}",
            value=len(ids) / duration_s,
            unit="/s",
            at_least=120,
        ),
        Figure(case="burst", what="left behind", measured=f"{left}", value=left, at_most=0),
    ]


async def _timed(provider: Provider, count: int) -> float:
    """Seconds until all of them have answered."""
    start = time.perf_counter()
    sandboxes = await asyncio.gather(*(_answered(provider) for _ in range(count)))
    took = time.perf_counter() - start
    await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))
    return took


async def _bare_at_once() -> float:
    """Seconds that as many bare boxes take, which come and go, with one after the other on each processor."""
    with ExitStack() as stack:
        spawners = [stack.enter_context(limit.bare_box()) for _ in range(os.cpu_count() or 1)]
        start = time.perf_counter()
        await asyncio.gather(*(asyncio.to_thread(_some, each, _AT_ONCE // len(spawners)) for each in spawners))
        return time.perf_counter() - start


def _some(spawner: Spawner, count: int) -> None:
    for _ in range(count):
        spawner.once()


async def _answered(provider: Provider) -> AsyncSandbox:
    sandbox = await AsyncSandbox.create(Spec(), provider)
    await sandbox.ping()
    return sandbox


async def _cycle(provider: Provider, end: float, ids: set[str]) -> None:
    while time.monotonic() < end:
        sandbox = await AsyncSandbox.create(Spec(), provider)
        done = await sandbox.exec(["true"])
        await sandbox.destroy()
        if done.exit_code != 0:
            raise RuntimeError(f"sandbox {sandbox.id}: {done}")
        ids.add(sandbox.id)
