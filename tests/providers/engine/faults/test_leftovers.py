"""What programs that died have left in the engine is found and removed, and what others are at is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from skerry.errors import CreateFailed, NotFound
from skerry.providers.docker import Docker
from skerry.providers.engine.scratch import scratch
from skerry.spec import Spec, new_id

from .victim import Order, Victims
from .world import World

pytestmark = pytest.mark.timeout(120)


def docker_of(world: World, cache: Path) -> Docker:
    state = world.folder / "docker"
    return Docker(Docker.Config(host=world.daemon.address, cache_dir=str(cache), state_dir=str(state)))


async def test_a_scratch_container_is_left_to_its_maker_for_as_long_as_that_may_need_it(
    world: World, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = docker_of(world, cache)
    async with scratch(docker._engine, world.image) as name:
        await docker.discover()
        assert name in await world.containers()
        monkeypatch.setattr("skerry.providers.engine.scratch.ABANDONED_S", -1)
        await docker.discover()
        assert await world.containers() == {}


async def test_a_runtime_that_was_half_filled_is_filled_again(world: World, victims: Victims, cache: Path) -> None:
    """Whatever step of the first create on a daemon is its maker's last, the next create works."""
    for request in range(4, 10):
        await world.remove_runtime()
        arguments = {"image": world.image, "ephemeral": True}
        assert await victims.kill(Order(world.config(), "create", arguments, "request", request))
        await world.reconciled()
        async with world.manager() as manager:
            sandbox = await manager.create(image=world.image)
            assert (await sandbox.exec(["true"])).ok
            await manager.destroy(sandbox.id, volumes=True)


@pytest.mark.parametrize("left", ["nothing", "the mark"])
async def test_a_program_that_knows_of_a_runtime_which_is_gone_makes_it_again(world: World, left: str) -> None:
    async with world.manager() as manager:
        await manager.destroy((await manager.create(image=world.image)).id, volumes=True)
        await world.remove_runtime(but_the_mark=left == "the mark")
        with pytest.raises(CreateFailed):
            await manager.create(image=world.image)
        made = await manager.create(image=world.image)
        assert (await made.exec(["true"])).ok
    async with world.manager() as another:
        assert (await (await another.create(image=world.image)).exec(["true"])).ok


async def test_the_folders_of_snapshots_that_were_cut_short_are_removed(
    world: World, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = docker_of(world, cache)
    left = cache / ".snapshot-left"
    left.mkdir()
    (left / "home").mkdir()
    with docker._snapshots._aside() as used:
        await docker.snapshots()
        assert left.exists()  # it may be one that was made just now
        monkeypatch.setattr("skerry.providers.engine.scratch.ABANDONED_S", -1)
        await docker.snapshots()
        assert used.exists()
    assert not left.exists()


async def test_two_programs_remove_what_is_left_of_one_box(world: World, cache: Path) -> None:
    docker, id = docker_of(world, cache), new_id()
    await docker.create(id, Spec(provider="docker", image=world.image))
    await world.ask("DELETE", f"/containers/skerry-{id}", {"force": "1"})
    await asyncio.gather(*(asyncio.to_thread(docker._homes.remove, id) for _ in range(8)))
    assert id not in os.listdir("/run/skerry/mounts")
    assert await docker.discover() == {}
    with pytest.raises(NotFound):
        await docker.dial(id)
