"""What others do to containers with the engine's own tools: the registry follows; what is not ours is left alone."""

from __future__ import annotations

import asyncio

import pytest

from skerry.model.records import Cause
from skerry.model.spec import new_id
from skerry.model.states import State

from .world import DATA, World

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("deeds", "state"),
    [
        (["stop"], State.STOPPED),
        (["kill"], State.STOPPED),
        (["pause"], State.PAUSED),
        (["pause", "unpause"], State.READY),
        (["restart"], State.READY),
        (["stop", "start"], State.READY),
        (["rename?name=mine"], State.READY),
        (["stop", "rename?name=mine"], State.STOPPED),
    ],
)
async def test_the_registry_follows_what_is_done_by_hand(world: World, deeds: list[str], state: State) -> None:
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        container = (await world.ask("GET", f"/containers/skerry-{id}/json"))["Id"]
        for deed in deeds:
            await world.ask("POST", f"/containers/{container}/{deed}")
        assert (await world.reconciled())[id].state is state
        if state is State.STOPPED:
            await manager.start(id)
        elif state is State.PAUSED:
            await manager.resume(id)
        assert (await world.reconciled())[id].state is State.READY
        await manager.destroy(id, volumes=True)
        assert (await world.reconciled())[id].state is State.DESTROYED


async def test_of_a_container_that_was_removed_by_hand_the_data_is_left(world: World) -> None:
    async with world.manager() as manager:
        first = await world.make(manager, name="mine")
        await world.ask("DELETE", f"/containers/skerry-{first.id}", {"force": "1", "v": "1"})
        record = (await world.reconciled())[first.id]
        assert (record.state, record.cause) == (State.LOST, Cause.BOX_DIED)
        await manager.destroy(first.id)
        second = await manager.create(image=world.image, name="mine")
        assert await second.files.read(DATA) == first.id.encode()
        await manager.destroy(second.id, volumes=True)
    assert await world.data_of() == set()


async def test_the_data_of_a_name_goes_with_the_last_who_had_it_also_without_its_box(world: World) -> None:
    async with world.manager() as manager:
        await manager.destroy((await world.make(manager, name="mine")).id)
        second = await manager.create(image=world.image, name="mine")
        other = await manager.create(image=world.image, name="mine", project="other")
        await world.ask("DELETE", f"/containers/skerry-{second.id}", {"force": "1", "v": "1"})
        await manager.destroy(second.id, volumes=True)
        left = await manager.volumes("data")
        assert [volume.sandbox for volume in left] == [other.id]
        await manager.destroy(other.id, volumes=True)


async def test_a_data_volume_that_was_removed_by_hand_does_not_keep_a_sandbox_from_ending(world: World) -> None:
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        await world.ask("DELETE", f"/containers/skerry-{id}", {"force": "1"})
        await world.ask("DELETE", f"/volumes/skerry-data-{id}")
        await manager.destroy(id, volumes=True)
    assert (await world.reconciled())[id].state is State.DESTROYED


async def test_what_is_not_ours_is_left_alone(world: World) -> None:
    other = new_id()
    labels = {"skerry": "docker", "skerry.sandbox": other, "skerry.instance": "another"}
    async with world.manager() as manager:
        id = (await world.make(manager)).id
        await manager.snapshot(id, "kept")
        foreign = {"plain": {}, f"skerry-{other}": labels, "skerry-scratch-mine": {"skerry.scratch": "podman"}}
        for name, more in foreign.items():
            wanted = {"Image": world.image, "Cmd": ["true"], "Labels": more}
            await world.ask("POST", "/containers/create", {"name": name}, json_body=wanted)
        # It inherits the labels of the box that the image was made from.
        made = {"Image": "skerry-snapshot:kept", "Entrypoint": ["/bin/true"]}
        await world.ask("POST", "/containers/create", {"name": "heir"}, json_body=made)
        data = {**labels, "skerry.volume": "data"}
        for name, more in {"plain": {}, f"skerry-data-{other}": data, "skerry-data-none": {}}.items():
            await world.ask("POST", "/volumes/create", json_body={"Name": name, "Labels": more})
        images, volumes = await world.images(), await world.volumes()
        await manager.reconcile()
        await manager.destroy_all(volumes=True)
        await manager.reconcile()
        assert await world.containers() == dict.fromkeys([*foreign, "heir"], "created")
        assert await world.volumes() == volumes - {f"skerry-data-{id}"}
        assert await world.images() == images
        await world.ask("DELETE", "/containers/heir")
        await manager.remove_snapshot("kept")


async def test_many_programs_destroy_one_sandbox_at_the_same_time(world: World) -> None:
    async with world.manager() as first, world.manager() as second, world.manager() as third:
        id = (await world.make(first)).id
        await asyncio.gather(*(manager.destroy(id, volumes=True) for manager in (first, second, third)))
    assert (await world.reconciled())[id].state is State.DESTROYED
