"""Incus: a phase of containers to ready agents, beside as many that are launched by plain requests at once, and the
figures that the design's documents ask for: 10 containers up, the status of 50, a broadcast to 20."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from skerry.config import Config, load
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec, Phase
from skerry.manager.manager import AsyncSandboxManager
from skerry.measure.figures import Figure, ms, not_run, p50, ratio
from skerry.model.spec import Spec
from tests.engines.daemons import NotStartable
from tests.engines.incusd import IMAGE, Incusd, running_incus

from .engine_work import WARM_UP, Sides, timed
from .fleet import timed as timed_async
from .settings import Settings

_COUNT = 10
_FEW, _MANY = 20, 50


async def incus(settings: Settings) -> list[Figure]:
    try:
        with running_incus() as daemon, tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
            own = {"incus": {"host": daemon.address, "cache_dir": f"{folder}/cache"}}
            config = msgspec.structs.replace(load({"state_dir": folder}), providers=own)
            sides = await _launches(daemon, config, settings.rounds(8))
            told = await _many(config, settings.rounds(16))
    except NotStartable as error:
        return [not_run("incus", "all", str(error))]
    what = f"up of a phase of {_COUNT}"
    return [
        ratio("incus", what, sides.ours, sides.raw, against=f"{_COUNT} API launches at once", at_most=1.5),
        _worst(what, sides.ours, at_most=30),
        *told,
    ]


async def _launches(daemon: Incusd, config: Config, rounds: int) -> Sides:
    """Ours until every agent has answered, theirs until every start is answered."""
    phase = Phase(name="workers", count=_COUNT, spec=Spec(provider="incus", image=IMAGE))
    raw_names = [f"raw-{number}" for number in range(_COUNT)]
    sides = Sides([], [])
    async with AsyncSandboxManager(config) as manager:
        fleet = AsyncFleet(manager, FleetSpec(name="bench", phases=(phase,)))
        with ThreadPoolExecutor(_COUNT) as threads:
            for _ in range(rounds + WARM_UP):
                sides.raw.append(timed(lambda: list(threads.map(partial(_launch, daemon), raw_names)))[0])
                list(threads.map(partial(_remove, daemon), raw_names))
                try:
                    took, report = await timed_async(fleet.up())
                    assert report.ok, report
                finally:
                    await fleet.down(volumes=True)
                sides.ours.append(took)
    return Sides(sides.ours[WARM_UP:], sides.raw[WARM_UP:])


async def _many(config: Config, rounds: int) -> list[Figure]:
    """The first of each is the slowest, as it opens the streams: it counts too."""
    spec = Spec(provider="incus", image=IMAGE, data=False)
    phases = (Phase(name="few", count=_FEW, spec=spec), Phase(name="rest", count=_MANY - _FEW, spec=spec))
    statuses, broadcasts = [], []
    async with AsyncSandboxManager(config) as manager:
        fleet = AsyncFleet(manager, FleetSpec(name="bench-many", phases=phases))
        try:
            up, report = await timed_async(fleet.up())
            assert report.ok, report
            for _ in range(rounds):
                took, found = await timed_async(fleet.status())
                assert [each.agent is not None for each in found.values()] == [True] * _MANY
                statuses.append(took)
                took, outcomes = await timed_async(fleet.exec_on_phase("few", ["true"]))
                assert [each.ok for each in outcomes.values()] == [True] * _FEW
                broadcasts.append(took)
        finally:
            await fleet.down(volumes=True)
    return [
        _worst(f"up of {_MANY}", [up]),
        _worst(f"status of {_MANY}", statuses, at_most=5),
        _worst(f"true on {_FEW}", broadcasts, at_most=2),
    ]


def _worst(what: str, seconds: list[float], at_most: float | None = None) -> Figure:
    worst, usual = max(seconds), f"{ms(p50(seconds))} the median"
    what = f"{what}, the slowest"
    return Figure(case="incus", what=what, measured=ms(worst), limit=usual, value=worst, unit=" s", at_most=at_most)


def _launch(daemon: Incusd, name: str) -> None:
    daemon.ask("POST", "/1.0/instances", {"name": name, "source": {"type": "image", "alias": IMAGE}, "start": True})


def _remove(daemon: Incusd, name: str) -> None:
    daemon.ask("PUT", f"/1.0/instances/{name}/state", {"action": "stop", "force": True, "timeout": 10})
    daemon.ask("DELETE", f"/1.0/instances/{name}")
