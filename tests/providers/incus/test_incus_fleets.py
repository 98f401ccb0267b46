"""Fleets of real system containers: on one daemon, and on a cluster whose members go and come."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest
from engines.incus_world import World
from engines.incusd import IMAGE, Incusd
from manager.world import config_of

from skerry.fleet.fleet import AsyncFleet, load_fleet
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.states import State
from skerry.providers.incus import Incus
from skerry.testing.conformance.base import eventually

pytestmark = pytest.mark.timeout(180)

FILE = f"""
name: crew
provider: incus
image: {IMAGE}
defaults: {{data: false, memory: 64M}}
phases:
  - name: store
    setup: [echo seed > ready]
  - name: workers
    count: 5
    wait_for: [store]
    on_failure: continue
    labels: {{tier: back}}
"""
WORKERS = [f"agent-workers-{index:03d}" for index in range(1, 6)]


async def test_a_fleet_of_system_containers(incus: Incus, incus_daemon: Incusd, cache: Path, tmp_path: Path) -> None:
    mine = {"host": incus_daemon.address, "cache_dir": str(cache)}
    config = config_of(tmp_path, provider="incus", providers={"incus": mine})
    async with AsyncSandboxManager(config, reconcile=False) as manager:
        fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
        assert (await fleet.up()).ok
        status = await fleet.status()
        assert sorted(status) == ["agent-store-001", *WORKERS]
        assert all(each.state is State.READY and each.agent is not None for each in status.values())
        said = await fleet.exec("tier=back", "echo $SKERRY_INDEX")
        assert {name: each.result.text for name, each in said.items() if each.result} == {
            name: f"{index}\n" for index, name in enumerate(WORKERS, start=1)
        }
        assert (await fleet.scale(workers=2)).ok
        assert len(await fleet.status()) == 3
        await fleet.down()
        assert await fleet.status() == {}
    assert not await incus.discover()


@pytest.mark.parametrize("fault", ["kill", "cut_off"])
async def test_a_member_of_the_cluster_that_goes_in_the_middle_of_a_start(world: World, fault: str) -> None:
    async with world.manager() as manager:
        fleet = AsyncFleet(manager, load_fleet("fleet.yaml", FILE))
        starting = asyncio.create_task(fleet.up())

        async def has_begun() -> bool:
            return bool(world.places())

        await eventually(has_begun, "the first is made")
        await asyncio.to_thread(getattr(world.cluster, fault), "n3")
        await starting  # whatever came up: it ended, by its deadlines
        await world.seen("n3", online=False)
        report = await fleet.up()
        assert report.ok, report
        places = world.places()
        there = {each.id: places[each.id] for each in (await fleet.status()).values() if each.agent is not None}
        assert len(there) == 6
        assert set(Counter(there.values())) <= {"n1", "n2"}
        await world.revive()
        await manager.reconcile()
        assert (await fleet.up()).ok
        await fleet.down()
        await manager.reconcile()
    assert world.places() == {}
