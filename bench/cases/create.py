"""From nothing to the first answered ping, and back: forked from a zygote, as most boxes are, and without one."""

from __future__ import annotations

import time
from typing import NamedTuple

import limit

from skerry import providers
from skerry.measure.figures import Figure, ms, p50, ratio
from skerry.measure.limits import Spawner
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings
from .witness import warm_up

_BARE = "bwrap true"


class _Times(NamedTuple):
    ready: list[float]
    cycle: list[float]
    end: list[float]
    bare: list[float]


async def create(settings: Settings) -> list[Figure]:
    count = settings.rounds(80)
    forked, plain = providers.load("local"), providers.load("local", {"zygote": "off"})
    try:
        with limit.bare_box() as box:
            await warm_up(forked)
            quick, slow = await _times(forked, box, count), await _times(plain, box, count)
    finally:
        await forked.aclose()
        await plain.aclose()
    return [
        ratio("create", "create to first ping", quick.ready, quick.bare, against=_BARE, at_most=1.2),
        ratio("create", "create, echo, destroy", quick.cycle, quick.bare, against=_BARE, at_most=2),
        Figure(case="create", what="destroy", measured=ms(p50(quick.end)), value=p50(quick.end) * 1e3, unit=" ms"),
        ratio("create", "without a zygote, to first ping", slow.ready, slow.bare, against=_BARE, at_most=3),
    ]


async def _times(provider: Provider, box: Spawner, count: int) -> _Times:
    times = _Times([], [], [], [])
    for _ in range(count):
        times.bare.append(box.once())
        start = time.perf_counter()
        sandbox = await AsyncSandbox.create(Spec(), provider)
        try:
            await sandbox.ping()
        finally:
            ready = time.perf_counter()
            await sandbox.destroy()
        times.ready.append(ready - start)
        times.end.append(time.perf_counter() - ready)
    for _ in range(count):
        start = time.perf_counter()
        sandbox = await AsyncSandbox.create(Spec(), provider)
        try:
            await sandbox.exec(["echo", "here"])
        finally:
            await sandbox.destroy()
        times.cycle.append(time.perf_counter() - start)
    return times
