"""Incus: a phase of containers to ready agents, beside as many that are launched by plain requests at once."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
from figure import Figure, not_run, ratio

from skerry.config import load
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec, Phase
from skerry.manager import AsyncSandboxManager
from skerry.spec import Spec
from tests.engines.daemons import NotStartable
from tests.engines.incusd import IMAGE, Incusd, running_incus

from .engine_work import WARM_UP, Sides, timed
from .fleet import timed as timed_async
from .settings import Settings

_COUNT = 10


async def incus(settings: Settings) -> list[Figure]:
    try:
        with running_incus() as daemon, tempfile.TemporaryDirectory(prefix="skerry-bench-") as folder:
            sides = await _launches(daemon, folder, settings.rounds(8))
    except NotStartable as error:
        return [not_run("incus", "all", str(error))]
    what = f"up of a phase of {_COUNT}"
    return [ratio("incus", what, sides.ours, sides.raw, against=f"{_COUNT} API launches at once", at_most=1.5)]


async def _launches(daemon: Incusd, folder: str, rounds: int) -> Sides:
    """Ours until every agent has answered, theirs until every start is answered."""
    own = {"incus": {"host": daemon.address, "cache_dir": f"{folder}/cache"}}
    config = msgspec.structs.replace(load({"state_dir": folder}), providers=own)
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


def _launch(daemon: Incusd, name: str) -> None:
    daemon.ask("POST", "/1.0/instances", {"name": name, "source": {"type": "image", "alias": IMAGE}, "start": True})


def _remove(daemon: Incusd, name: str) -> None:
    daemon.ask("PUT", f"/1.0/instances/{name}/state", {"action": "stop", "force": True, "timeout": 10})
    daemon.ask("DELETE", f"/1.0/instances/{name}")
