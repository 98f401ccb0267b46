"""A manager that is killed at every step of what it does to containers; another one then finds all that is left."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from skerry.model.spec import new_id
from skerry.model.states import State

from .victim import Order, Victims
from .world import WORK, World

pytestmark = pytest.mark.timeout(240)

POINTS = [("request", False), ("tool", False), ("tool", True), ("registry", False), ("registry", True)]


class Killer:
    def __init__(self, world: World, victims: Victims, verb: str) -> None:
        self._world, self._victims, self._verb = world, victims, verb
        self.kills = 0

    async def kill(self, arguments: dict[str, Any], point: str, occurrence: int, after: bool) -> bool:
        """Whether there was such a step."""
        order = Order(self._world.config(), self._verb, arguments, point, occurrence, after)
        died = await self._victims.kill(order)
        self.kills += died
        return died


async def test_a_create_that_is_killed_leaves_nothing(world: World, victims: Victims) -> None:
    killer = Killer(world, victims, "create")
    for point, after in POINTS:
        for occurrence in itertools.count(1):
            id = new_id()
            died = await killer.kill({"id": id, "image": world.image}, point, occurrence, after)
            records = await world.reconciled()
            was_told = not died or (point, after) == ("registry", True)
            assert id not in records or records[id].state is (State.READY if was_told else State.DESTROYED)
            if not died:
                break
    assert killer.kills > 10


async def test_a_destroy_that_is_killed_is_gone_on_with(world: World, victims: Victims) -> None:
    killer = Killer(world, victims, "destroy")
    async with world.manager() as manager:
        for point, after in POINTS:
            for occurrence in itertools.count(1):
                id = (await world.make(manager)).id
                died = await killer.kill({"reference": id, "volumes": True, "grace_s": 0}, point, occurrence, after)
                state = (await world.reconciled())[id].state
                was_begun = (point, occurrence, after) != ("registry", 1, False)
                assert state is (State.DESTROYED if was_begun else State.READY)
                if not died:
                    break
    assert killer.kills > 5


async def test_a_stop_and_a_start_that_are_killed_lose_nothing(world: World, victims: Victims) -> None:
    stopper, starter = Killer(world, victims, "stop"), Killer(world, victims, "start")
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        for point, after in POINTS:
            for occurrence in itertools.count(1):
                died = await stopper.kill({"reference": id}, point, occurrence, after)
                state = (await world.reconciled())[id].state
                assert state in (State.READY, State.STOPPED)
                if state is State.READY:
                    await manager.stop(id)
                died |= await starter.kill({"reference": id}, point, occurrence, after)
                state = (await world.reconciled())[id].state
                assert state in (State.READY, State.STOPPED)
                if state is State.STOPPED:
                    await manager.start(id)
                if not died:
                    break
        assert (await world.reconciled())[id].state is State.READY
    assert min(stopper.kills, starter.kills) > 4


async def test_a_snapshot_that_is_killed_is_there_or_not(world: World, victims: Victims) -> None:
    killer = Killer(world, victims, "snapshot")
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        for occurrence in itertools.count(1):
            died = await killer.kill({"reference": id, "name": "kept"}, "request", occurrence, False)
            assert (await world.reconciled())[id].state is State.READY
            if await manager.snapshots():
                copy = await manager.create(snapshot="kept")
                assert await copy.files.read(WORK) == id.encode()
                await manager.destroy(copy.id, volumes=True)
                await manager.remove_snapshot("kept")
            assert await world.images() == {f"{world.image}:latest"}
            if not died:
                break
    assert killer.kills > 5


async def test_a_fork_that_is_killed_is_whole_or_leaves_nothing(world: World, victims: Victims) -> None:
    killer = Killer(world, victims, "fork")
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        for occurrence in itertools.count(1, 3):
            died = await killer.kill({"reference": id}, "request", occurrence, False)
            records = await world.reconciled()
            forks = [record.id for record in records.values() if record.is_live and record.id != id]
            assert died or len(forks) == 1
            for fork in forks:
                assert await manager.read_file(fork, WORK) == id.encode()
                await manager.destroy(fork, volumes=True)
            assert await world.images() == {f"{world.image}:latest"}
            if not died:
                break
    assert killer.kills > 5


async def test_a_restore_that_is_killed_can_be_asked_for_again(world: World, victims: Victims) -> None:
    killer = Killer(world, victims, "restore")
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        await manager.snapshot(id, "kept")
        for occurrence in itertools.count(1, 3):
            died = await killer.kill({"reference": id, "snapshot": "kept"}, "request", occurrence, False)
            state = (await world.reconciled())[id].state
            assert state in (State.READY, State.LOST)
            if state is State.LOST:
                await manager.restore(id, "kept")
                assert (await world.reconciled())[id].state is State.READY
            if not died:
                break
    assert killer.kills > 3
