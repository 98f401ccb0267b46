"""A fleet as one: brought up, seen and commanded, beside what its boxes cost without it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeVar

import limit
import msgspec

from skerry.config import Config, load
from skerry.fleet.broadcast import MemberOutcome
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec, Phase
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, ms, p50, ratio
from skerry.model.spec import Spec
from skerry.sandbox.sandbox import AsyncSandbox

from .settings import Settings

T = TypeVar("T")
_FEW = 20
_WARM_UP = 2
"""The first rounds open streams, and agents import what they need."""


class Up(NamedTuple):
    fleet: AsyncFleet
    provider: str
    members: list[AsyncSandbox]
    took_s: float


async def fleet(settings: Settings) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
        config = msgspec.structs.replace(load({"state_dir": folder}), max_sandboxes=0)
        figures = []
        async with _running(config, "local", 50) as up:
            figures += [_start(up), await _status(up, settings.rounds(160), at_most=10)]
            figures += await _broadcast(up, settings.rounds(80))
        if not settings.quick:
            async with _running(config, "local", 1000) as up:
                figures.append(await _status(up, settings.rounds(40), at_most=300))
        async with _running(config, "mock", 1000) as up:
            figures.append(await _status(up, settings.rounds(24), at_most=100))
        return figures


@asynccontextmanager
async def _running(config: Config, provider: str, count: int) -> AsyncIterator[Up]:
    """A fleet of so many, a few of them in a phase of their own, for as long as this lasts."""
    spec = Spec(provider=provider)
    phases = (Phase(name="few", count=_FEW, spec=spec), Phase(name="rest", count=count - _FEW, spec=spec))
    async with AsyncSandboxManager(config) as manager:
        fleet = AsyncFleet(manager, FleetSpec(name="bench", phases=phases, max_per_phase=count))
        try:
            took, report = await timed(fleet.up())
            assert report.ok, report
            names = [name for phase in phases for name in phase.members()]
            yield Up(fleet, provider, [await fleet.member(name) for name in names], took)
        finally:
            await fleet.down(volumes=True)


def _start(up: Up) -> Figure:
    count = len(up.members)
    with limit.bare_box() as box:
        bare = sum(box.once() for _ in range(count))
    return ratio("fleet", f"up of {count} {up.provider}", [up.took_s], [bare], against=f"{count} bwrap true in a row")


async def _status(up: Up, rounds: int, at_most: float) -> Figure:
    count = len(up.members)
    ours, pings = [], []
    for _ in range(rounds + _WARM_UP):
        pings.append((await timed(asyncio.gather(*(member.ping() for member in up.members))))[0])
        took, statuses = await timed(up.fleet.status())
        ours.append(took)
        assert all(status.agent is not None for status in statuses.values())
    bare = f"{ms(p50(pings[_WARM_UP:]))} {count} pings at once"
    return _in_all(f"status of {count} {up.provider}", ours[_WARM_UP:], bare, at_most)


async def _broadcast(up: Up, rounds: int) -> list[Figure]:
    """Beside as many bare processes in a row; and what each command takes of it, beside one alone."""
    count, argv = len(up.members), ["echo", "hello"]
    everyone, few, alone, bare = [], [], [], []
    with limit.bare_process() as process:
        for _ in range(rounds + _WARM_UP):
            bare.append(sum(process.once() for _ in range(count)))
            alone.append((await timed(up.members[0].exec(argv)))[0])
            few.append(await _echo(up.fleet.exec_on_phase("few", argv), _FEW))
            everyone.append(await _echo(up.fleet.exec_on_all(argv), count))
    bare, alone, few, everyone = (each[_WARM_UP:] for each in (bare, alone, few, everyone))
    spawns = f"{ms(p50(bare))} {count} spawns in C, in a row"
    each = [took / count for took in everyone]
    return [
        _in_all(f"echo to {_FEW} {up.provider}", few, f"{ms(p50(bare) * _FEW / count)} {_FEW} spawns in C, in a row"),
        _in_all(f"echo to {count} {up.provider}", everyone, spawns, at_most=40),
        ratio("fleet", f"echo to {count}, for each of them", each, alone, against="one exec alone"),
    ]


async def _echo(told: Awaitable[dict[str, MemberOutcome]], count: int) -> float:
    took, outcomes = await timed(told)
    assert sum(outcome.ok for outcome in outcomes.values()) == count, outcomes
    return took


def _in_all(what: str, seconds: list[float], bare: str, at_most: float | None = None) -> Figure:
    took = p50(seconds)
    return Figure(case="fleet", what=what, measured=ms(took), limit=bare, value=took * 1e3, unit=" ms", at_most=at_most)


async def timed(work: Awaitable[T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = await work
    return time.perf_counter() - start, result
