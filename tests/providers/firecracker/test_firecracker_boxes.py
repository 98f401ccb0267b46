"""Boxes from their making to their end, on stand-ins for Firecracker behind which real agents answer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from providers.firecracker import fc_victim
from providers.firecracker.fc_world import provider_on, running_in
from vm.firecracker.installing import StandIns

from skerry.errors import CreateFailed, ProviderUnavailable, SkerryError, Unsupported
from skerry.host import uids
from skerry.providers.base import BoxState
from skerry.providers.firecracker import Firecracker
from skerry.sandbox import AsyncSandbox
from skerry.spec import Network, Spec, new_id
from skerry.testing.conformance.base import eventually
from skerry.vm.folder import VmFolder

Make = Callable[..., Awaitable[AsyncSandbox]]


@pytest.fixture
async def make(provider: Firecracker) -> AsyncIterator[Make]:
    made: list[AsyncSandbox] = []

    async def one(**options: object) -> AsyncSandbox:
        spec = Spec.of(**{"provider": "firecracker", "data": False, **options})  # type: ignore[arg-type]
        made.append(await AsyncSandbox.create(spec, provider))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy(volumes=True)


def _machine(world_folder: Path, sandbox: AsyncSandbox) -> VmFolder:
    return VmFolder(world_folder / "state" / sandbox.id / "vm")


async def test_a_box_is_a_machine_whose_agent_runs_commands(make: Make, provider: Firecracker) -> None:
    sandbox = await make(env={"GREETING": "hello"})
    assert (await sandbox.exec("echo $GREETING")).text == "hello\n"
    assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING


async def test_boxes_are_clones_of_one_machine_that_was_booted_once(make: Make, stand_ins: StandIns) -> None:
    first = await make()
    second = await make()
    await first.files.write("mine", "first")
    await second.files.write("mine", "second")
    assert await first.files.read_text("mine") == "first"
    asked = stand_ins.requests()
    assert asked.count("PUT /snapshot/create") == 1
    assert asked.count("PUT /snapshot/load") == 2


async def test_nothing_is_left_of_a_destroyed_box(make: Make, provider: Firecracker, world_folder: Path) -> None:
    sandbox = await make()
    assert running_in(world_folder)
    await provider.destroy(sandbox.id)
    await provider.destroy(sandbox.id)
    assert running_in(world_folder) == set()
    assert not (world_folder / "state" / sandbox.id).exists()


async def test_a_stopped_box_has_its_files_when_it_is_started(make: Make, provider: Firecracker) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "over the stop")
    await provider.stop(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
    await provider.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "over the stop"


async def test_a_paused_box_goes_on_where_it_was(make: Make, provider: Firecracker) -> None:
    sandbox = await make()
    await provider.pause(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.PAUSED
    await provider.resume(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING
    assert (await sandbox.exec("echo on")).text == "on\n"


async def test_a_box_made_of_a_snapshot_has_its_files(make: Make, provider: Firecracker) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "then")
    await provider.snapshot(sandbox.id, "before")
    await sandbox.files.write("kept", "now")
    twin = await make(snapshot="before")
    assert await twin.files.read_text("kept") == "then"
    assert await sandbox.files.read_text("kept") == "now"
    await twin.destroy()
    await provider.remove_snapshot("before")


async def test_a_second_agent_ends_with_its_stream(make: Make) -> None:
    sandbox = await make()
    assert (await sandbox.exec("echo other", user="nobody")).text == "other\n"


@pytest.mark.parametrize("party", ["vmm", "warden"])
async def test_a_box_whose_processes_are_killed_is_stopped_and_gone_after_a_destroy(
    make: Make, provider: Firecracker, world_folder: Path, party: str
) -> None:
    sandbox = await make()
    vm = _machine(world_folder, sandbox).read()
    assert vm is not None
    process = getattr(vm, party)
    os.kill(process.pid, signal.SIGKILL)

    async def is_stopped() -> bool:
        return (await provider.discover())[sandbox.id].state is BoxState.STOPPED

    await eventually(is_stopped, "the box is stopped: its disk is there, and it can be started again")
    with pytest.raises(SkerryError):
        await sandbox.exec("true")
    await provider.destroy(sandbox.id)
    assert running_in(world_folder) == set()


async def test_a_template_that_cannot_be_restored_is_made_anew(
    make: Make, provider: Firecracker, world_folder: Path, stand_ins: StandIns
) -> None:
    await make()
    for state in (world_folder / "cache/vm/templates").glob("*/state"):
        times = state.stat()
        state.chmod(0o600)
        state.write_bytes(b"x" * times.st_size)
        state.chmod(0o444)
        os.utime(state, ns=(times.st_atime_ns, times.st_mtime_ns))
    sandbox = await make()
    assert (await sandbox.exec("echo again")).text == "again\n"
    assert stand_ins.requests().count("PUT /snapshot/create") == 2


async def test_a_box_that_does_not_come_up_says_why_and_leaves_nothing(
    provider: Firecracker, world_folder: Path, stand_ins: StandIns
) -> None:
    await provider.check()
    stand_ins.die_at("PUT /vsock")
    with pytest.raises(CreateFailed, match="ended while it answered PUT /vsock"):
        await AsyncSandbox.create(Spec(provider="firecracker", data=False), provider)
    assert running_in(world_folder) == set()


@pytest.mark.parametrize("point", fc_victim.POINTS)
async def test_a_maker_that_is_killed_leaves_what_destroy_removes(
    provider: Firecracker, world_folder: Path, point: str
) -> None:
    id = new_id()
    command = [sys.executable, fc_victim.__file__, str(world_folder), id, point]
    done = await asyncio.to_thread(subprocess.run, command, timeout=50, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    status = (await provider.discover()).get(id)
    assert status is None or status.state is not BoxState.RUNNING
    await provider.destroy(id, volumes=True)
    assert running_in(world_folder) == set()
    assert id not in await provider.discover()


async def test_a_network_is_refused_with_what_to_do_instead(provider: Firecracker) -> None:
    with pytest.raises(Unsupported, match="provider qemu"):
        await provider.enforcement(Spec(provider="firecracker", network=Network.BRIDGE))


async def test_doctor_is_told_of_the_jail(provider: Firecracker, world_folder: Path) -> None:
    told = await provider.describe()
    assert told["hypervisor"].by == "firecracker 1.17.0, kvm"
    if uids.are_available():
        assert told["jail"].by == str(world_folder / "bin/jailer")
        without = await provider_on(world_folder, jailed=False).describe()
        assert without["jail"].why_not == "there is no jailer"
    else:
        assert told["jail"].why_not


async def test_a_host_without_firecracker_is_unavailable(world_folder: Path) -> None:
    found = Firecracker(Firecracker.Config(program=str(world_folder / "none"), cache_dir=str(world_folder)))
    with pytest.raises(ProviderUnavailable, match="none"):
        await found.check()
