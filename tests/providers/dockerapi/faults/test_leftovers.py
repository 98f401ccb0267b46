"""What programs that died have left in the engine is found and removed, and what others are at is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from skerry.errors import CreateFailed, NotFound
from skerry.model.spec import Spec, new_id
from skerry.providers.docker import Docker
from skerry.providers.dockerapi.containers import scratch

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
        monkeypatch.setattr("skerry.providers.dockerapi.containers.ABANDONED_S", -1)
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


async def test_runtimes_of_older_versions_go_once_no_box_uses_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version has its own volume, and a mark that it is whole. The newest stays, and so does one that is used."""
    monkeypatch.setattr("skerry.providers.shared.volume_plan.OLD_S", -1.0)
    labels = {"skerry": "docker", "skerry.volume": "runtime"}

    async def add(name: str) -> set[str]:
        volume, mark = f"skerry-runtime-{name}-1", f"skerry-runtime-{name}-whole"
        await world.ask("POST", "/volumes/create", json_body={"Name": volume, "Labels": labels})
        told = {**labels, "skerry.whole": volume}
        await world.ask("POST", "/volumes/create", json_body={"Name": mark, "Labels": told})
        return {volume, mark}

    async def made_at(name: str) -> str:
        return str((await world.ask("GET", f"/volumes/skerry-runtime-{name}-1"))["CreatedAt"])

    async with world.manager() as manager:
        sandbox = await manager.create(image=world.image)
        found = (await world.ask("GET", "/volumes"))["Volumes"]
        marks = {whole: each["Name"] for each in found if (whole := (each["Labels"] or {}).get("skerry.whole"))}
        own = {*marks, *marks.values()}  # beside it may be what a create left that was killed while it filled one
        older, newer = await add("older"), await add("newer")
        while await made_at("newer") == await made_at("older"):  # Docker tells whole seconds
            await world.ask("DELETE", "/volumes/skerry-runtime-newer-1")
            await add("newer")
        await manager.reconcile()
        assert not older & await world.volumes()
        assert own | newer <= await world.volumes()
        await manager.destroy(sandbox.id, volumes=True)
        await manager.reconcile()
        assert not own & await world.volumes()
        assert newer <= await world.volumes()
    for name in newer:
        await world.ask("DELETE", f"/volumes/{name}")


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
        monkeypatch.setattr("skerry.providers.dockerapi.containers.ABANDONED_S", -1)
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
