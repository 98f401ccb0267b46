"""Machines of Firecracker that sleep and branch, on its stand-ins. They keep no process: their agents are new ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from providers.firecracker.fc_world import running_in
from vm.firecracker.installing import StandIns

from skerry.errors import Conflict, InvalidSpec, Unsupported
from skerry.providers.base import BoxState
from skerry.providers.firecracker import Firecracker
from skerry.providers.machine.boxes import MachineBox
from skerry.sandbox.sandbox import AsyncSandbox

Make = Callable[..., Awaitable[AsyncSandbox]]


async def test_a_box_sleeps_without_a_process_and_wakes(
    make: Make, provider: Firecracker, world_folder: Path, stand_ins: StandIns
) -> None:
    sandbox = await make(data=True)
    await sandbox.files.write("kept", "work")
    await sandbox.close()
    for _ in range(2):
        await provider.sleep(sandbox.id)
        assert running_in(world_folder) == set()
        assert (await provider.discover())[sandbox.id].state is BoxState.ASLEEP
        memory = MachineBox(world_folder / "state", sandbox.id).asleep / "memory"
        assert memory.stat().st_blocks * 512 < memory.stat().st_size, "what is zero takes no room"
        before = len(stand_ins.requests())
        await provider.resume(sandbox.id)
        asked = stand_ins.requests()[before:]
        assert asked.index("PUT /snapshot/load") < asked.index("PATCH /vm"), "it is let go once it is whole"
        assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING
        assert await sandbox.files.read_text("kept") == "work"
        await sandbox.close()


async def test_a_box_that_booted_sleeps_is_stopped_and_started(make: Make, provider: Firecracker) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "work")
    await sandbox.close()
    await provider.sleep(sandbox.id)
    await provider.stop(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
    await provider.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "work"


async def test_boxes_go_on_from_the_memory_of_another(make: Make, provider: Firecracker) -> None:
    source = await make()
    await source.files.write("kept", "work")
    taken = await provider.snapshot_memory(source.id, "running")
    assert taken.memory
    assert await source.files.read_text("kept") == "work"
    forks = await asyncio.gather(*(make(snapshot="running") for _ in range(3)))
    for fork in forks:
        assert await fork.files.read_text("kept") == "work"
        await fork.files.write("mine", fork.id)
    assert [await each.files.read_text("mine") for each in forks] == [each.id for each in forks]
    with pytest.raises(InvalidSpec, match="memory"):
        await make(snapshot="running", memory="1G")
    for fork in forks:
        await fork.destroy()
    await provider.remove_snapshot("running")


async def test_a_damaged_memory_wakes_nothing(make: Make, provider: Firecracker, world_folder: Path) -> None:
    sandbox = await make()
    await sandbox.close()
    await provider.sleep(sandbox.id)
    memory = MachineBox(world_folder / "state", sandbox.id).asleep / "memory"
    whole = memory.read_bytes()
    memory.chmod(0o600)
    with open(memory, "r+b") as file:
        file.write(b"damage")
    with pytest.raises(Conflict, match="cannot wake"):
        await provider.resume(sandbox.id)
    assert running_in(world_folder) == set()
    assert (await provider.discover())[sandbox.id].state is BoxState.ASLEEP
    memory.write_bytes(whole)
    memory.chmod(0o444)
    await provider.resume(sandbox.id)
    await sandbox.ping()


async def test_a_version_that_loses_what_goes_on_saves_none(
    make: Make, provider: Firecracker, stand_ins: StandIns
) -> None:
    stand_ins.be("1.16.1")
    sandbox = await make()
    await sandbox.close()
    with pytest.raises(Unsupported, match=r"1\.16\.1"):
        await provider.sleep(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING
    await sandbox.ping()
