"""Machines from their start to their end, with a stand-in for Firecracker behind which a real agent answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from skerry.agent.client import AgentClient
from skerry.errors import AgentUnreachable, Conflict, CreateFailed, InvalidSpec, ProviderError
from skerry.host import cgroup, scope, uids
from skerry.net import dial
from skerry.vm.base import AGENT_PORT, Drive, Machine, MachineLimits
from skerry.vm.firecracker import FirecrackerHypervisor
from skerry.vm.folder import OLDER_CONSOLE
from vm.firecracker.installing import StandIns
from vm.firecracker.world import MIB, PATIENCE_S, World, control, prepared, reseed, shell

needs_root = pytest.mark.skipif(not uids.are_available(), reason="only root has jails")


async def test_a_machine_boots_and_its_agent_answers(world: World) -> None:
    folder = await world.booted()
    client = await prepared(folder)
    assert await shell(client, "echo hello") == "hello\n"
    client.close()
    assert folder.is_running()


async def test_a_machine_runs_as_a_user_of_its_own(world: World) -> None:
    if not uids.are_available():
        pytest.skip("only root has uids to give")
    folder = await world.booted()
    vm = folder.read()
    assert vm is not None
    assert vm.vmm is not None
    status = Path(f"/proc/{vm.vmm.pid}/status").read_text()
    assert f"Uid:\t{vm.uid}\t{vm.uid}\t{vm.uid}\t{vm.uid}\n" in status
    assert ("\nNSpid:\t" + f"{vm.vmm.pid}\t1\n" in status) == world.jailed


async def test_nothing_is_left_of_a_killed_machine_but_its_disk_and_its_console(world: World) -> None:
    folder = await world.booted()
    vm = folder.read()
    assert vm is not None
    assert vm.vmm is not None
    await world.hypervisor.kill(folder)
    await world.hypervisor.kill(folder)
    assert not vm.vmm.is_alive()
    left = {path.name for path in folder.path.iterdir()}
    assert {"disk.raw", "console.log"} <= left
    assert not left & {"v.sock", "v.sock_1024", "api.sock", "jail", "kernel", "initrd", "drive-disk", "drive-root"}


async def test_a_paused_machine_answers_nothing_until_it_is_resumed(world: World) -> None:
    folder = await world.booted()
    client = await prepared(folder)
    await world.hypervisor.pause(folder)
    await world.hypervisor.pause(folder)
    assert await world.hypervisor.is_paused(folder)
    with pytest.raises(AgentUnreachable):
        await folder.dial(AGENT_PORT, 0.2)
    await world.hypervisor.resume(folder)
    assert not await world.hypervisor.is_paused(folder)
    assert await shell(client, "echo on") == "on\n"
    client.close()


@pytest.mark.parametrize("version", ["1.15.1", "1.16.0", "1.16.1", "1.17.0-dev"])
async def test_a_resumed_machine_answers_whatever_version_runs_it(world: World, version: str) -> None:
    """Those of 1.16 never answer on vsock again once their API has paused and resumed them."""
    world.stand_ins.be(version)
    folder = await world.booted()
    for _ in range(2):
        await world.hypervisor.pause(folder)
        await world.hypervisor.pause(folder)
        assert await world.hypervisor.is_paused(folder)
        await world.hypervisor.resume(folder)
        await world.hypervisor.resume(folder)
        assert not await world.hypervisor.is_paused(folder)
    client = await prepared(folder)
    assert await shell(client, "echo on") == "on\n"
    client.close()
    assert ("PATCH /vm" in world.stand_ins.requests()) == (not version.startswith("1.16."))


async def test_a_machine_that_was_stopped_by_a_signal_is_killed_like_others(world: World) -> None:
    world.stand_ins.be("1.16.1")
    folder = await world.booted()
    await world.hypervisor.pause(folder)
    await world.hypervisor.kill(folder)
    assert not folder.is_running()
    with pytest.raises(ProviderError, match="has ended"):
        await world.hypervisor.resume(folder)


async def test_a_running_machine_is_reached_after_another_version_was_installed(world: World) -> None:
    folder = await world.booted()
    renamed = world.stand_ins.firecracker.rename(world.stand_ins.firecracker.with_name("firecracker-new"))
    world.stand_ins.firecracker.symlink_to(renamed)
    await world.hypervisor.pause(folder)
    assert await world.hypervisor.is_paused(folder)


async def test_clones_of_a_saved_machine_run_side_by_side(world: World) -> None:
    saved = await world.template()
    clones = []
    for number in range(3):
        folder, machine = await world.machine()
        await world.hypervisor.restore(folder, machine, saved, None)
        client = await prepared(folder)
        await shell(client, f"echo {number} > mine")
        clones.append(client)
    assert [await shell(client, "cat mine") for client in clones] == ["0\n", "1\n", "2\n"]
    for client in clones:
        client.close()


async def test_a_clone_can_be_saved_and_leaves_what_it_was_made_of_alone(world: World) -> None:
    saved = await world.template()
    before = {path.name: path.stat() for path in saved.iterdir()}
    folder, machine = await world.machine()
    await world.hypervisor.restore(folder, machine, saved, None)
    client = await prepared(folder)
    await shell(client, "echo kept > file")
    client.close()
    again = world.folder / "again"
    again.mkdir()
    await world.hypervisor.save(folder, again)
    for path in saved.iterdir():
        now, then = path.stat(), before.pop(path.name)
        assert (now.st_ino, now.st_size, now.st_mtime_ns) == (then.st_ino, then.st_size, then.st_mtime_ns)
    assert not before
    assert not folder.is_running()
    assert {path.name for path in again.iterdir()} == {"memory", "state", "firecracker.json"}


async def test_a_clone_is_told_of_a_drive_that_has_grown(world: World) -> None:
    saved = await world.template()
    folder, machine = await world.machine(size=4 * MIB)
    await world.hypervisor.restore(folder, machine, saved, None)
    assert folder.file("disk.raw").stat().st_size == 4 * MIB
    asked = (world.stand_ins.requests())[-1]
    assert asked == "PATCH /drives/disk"


@pytest.mark.parametrize("what", ["state", "memory", "firecracker.json"])
async def test_what_was_damaged_is_a_conflict_and_nothing_is_started(world: World, what: str) -> None:
    saved = await world.template()
    (saved / what).chmod(0o600)
    (saved / what).write_bytes(b"no")
    folder, machine = await world.machine()
    with pytest.raises(Conflict):
        await world.hypervisor.restore(folder, machine, saved, None)
    assert not folder.is_running()


async def test_another_machine_than_the_saved_one_is_a_conflict(world: World) -> None:
    saved = await world.template()
    folder, machine = await world.machine(memory_mib=512)
    with pytest.raises(Conflict, match="another size"):
        await world.hypervisor.restore(folder, machine, saved, None)


async def test_a_restore_that_firecracker_refuses_is_a_conflict_with_its_words(world: World) -> None:
    saved = await world.template()
    world.stand_ins.refuse_restores()
    folder, machine = await world.machine()
    with pytest.raises(Conflict, match="Failed to restore"):
        await world.hypervisor.restore(folder, machine, saved, None)
    assert await folder.wait(PATIENCE_S)
    assert not folder.is_running(), "it ends after a restore that failed"


@pytest.mark.parametrize("request_", ["PUT /machine-config", "PUT /drives/disk", "PUT /actions"])
async def test_a_process_that_dies_as_it_answers_is_told_apart(world: World, request_: str) -> None:
    world.stand_ins.die_at(request_)
    folder, machine = await world.machine()
    with pytest.raises(ProviderError, match=f"ended while it answered {request_}"):
        await world.hypervisor.boot(folder, machine, None)
    assert await folder.wait(PATIENCE_S)
    assert folder.how_it_ended() == "the machine ended with code 1"


async def test_a_program_that_ends_at_once_is_told_with_its_last_words(world: World) -> None:
    broken = world.stand_ins.firecracker
    interpreter, *_ = broken.read_text().splitlines()
    lines = [interpreter, "import sys", "sys.exit(print('v1.17.0') if '--version' in sys.argv else 'no luck')"]
    broken.write_text("\n".join(lines))
    folder, machine = await world.machine()
    with pytest.raises(CreateFailed, match="no luck"):
        await world.hypervisor.boot(folder, machine, None)


@needs_root
async def test_a_jailer_that_fails_is_told_with_its_last_words(short_folder: Path, stand_ins: StandIns) -> None:
    stand_ins.jailer.write_text("#!/bin/sh\necho no jail today >&2\nexit 1\n")
    world = World(short_folder, stand_ins, jailed=True)
    folder, machine = await world.machine()
    with pytest.raises(CreateFailed, match="no jail today"):
        await world.hypervisor.boot(folder, machine, None)
    await world.end()


async def test_a_killed_machine_starts_again_in_its_folder(world: World) -> None:
    folder = await world.booted()
    client = await prepared(folder)
    await shell(client, "echo kept > file")
    client.close()
    async with control(folder) as pid1:
        await pid1.call("freeze", {}, type=dict[str, Any])
    vm = folder.read()
    assert vm is not None
    assert vm.vmm is not None
    os.kill(vm.vmm.pid, 9)
    assert await folder.wait(PATIENCE_S)
    assert folder.how_it_ended() == "the machine was killed by signal 9"
    await world.hypervisor.kill(folder)
    drives = (Drive(name="root", path=str(world.root), read_only=True), Drive(name="disk", path="disk.raw"))
    await world.hypervisor.boot(folder, Machine(kernel=world.kernel, drives=drives), None)
    client = await prepared(folder)
    assert await shell(client, "cat file") == "kept\n"
    client.close()


async def test_a_published_socket_leads_to_a_port_without_a_handshake(world: World) -> None:
    folder = await world.booted(publish={"agent.sock": AGENT_PORT})
    (await prepared(folder)).close()
    client = await AgentClient.greet(await dial.unix(folder.file("agent.sock")))
    assert await shell(client, "echo straight") == "straight\n"
    client.close()


async def test_a_guest_that_shuts_down_ends_its_machine(world: World) -> None:
    folder = await world.booted()
    async with control(folder) as pid1:
        await reseed(pid1)
        await pid1.call("shutdown", {"grace_s": 0}, type=dict[str, Any])
    assert await folder.wait(PATIENCE_S)
    assert folder.how_it_ended() == "the machine ended with code 0"


async def test_a_machine_has_its_limits(world: World) -> None:
    folder, machine = await world.machine()
    await world.hypervisor.boot(folder, machine, MachineLimits(memory=512 * MIB, cpus=1.0))
    vm = folder.read()
    assert vm is not None
    assert vm.vmm is not None
    if not vm.groups:
        pytest.skip("no cgroup can be made here")
    for group in vm.groups:
        assert str(vm.vmm.pid) in Path(group, "cgroup.procs").read_text().split()
    await world.hypervisor.kill(folder)
    assert not any(Path(group).exists() for group in vm.groups)


@needs_root
async def test_a_jailed_machine_stays_in_its_groups_where_there_is_one_called_as_the_program(
    short_folder: Path, stand_ins: StandIns
) -> None:
    parent = scope.holder().hierarchies.parents.get("memory")
    if parent is None:
        pytest.skip("no cgroup can be made here")
    stand_ins.firecracker = stand_ins.firecracker.rename(short_folder / f"bin/firecracker-{os.urandom(6).hex()}")
    stand_ins.have_cgroups_in(parent.path)
    world = World(short_folder, stand_ins, jailed=True)
    called_so = parent.path / stand_ins.firecracker.name
    called_so.mkdir()
    try:
        folder, machine = await world.machine()
        await world.hypervisor.boot(folder, machine, MachineLimits(memory=512 * MIB, cpus=1.0))
        vm = folder.read()
        assert vm is not None
        assert vm.vmm is not None
        assert all(vm.vmm.pid in cgroup.members([Path(group)]) for group in vm.groups)
        assert cgroup.members([called_so]) == set()
    finally:
        await world.end()
        called_so.rmdir()


@needs_root
async def test_the_console_of_a_jailed_machine_stays_roots_however_often_it_starts(
    short_folder: Path, stand_ins: StandIns
) -> None:
    """Where fs.protected_regular is 2, root may not open another's file in a sticky folder that a group may write to;
    a machine that ran without a jail before leaves such files."""
    world = World(short_folder, stand_ins, jailed=True)
    unjailed = FirecrackerHypervisor(
        short_folder / "cache", lambda: world.kernel, program=str(stand_ins.firecracker), jailer=""
    )
    folder, machine = await world.machine()
    try:
        for hypervisor in (unjailed, world.hypervisor, world.hypervisor):
            folder.file(OLDER_CONSOLE).touch()
            await hypervisor.boot(folder, machine, None)
            vm = folder.read()
            assert vm is not None
            consoles = [folder.console.stat().st_uid, folder.file(OLDER_CONSOLE).stat().st_uid]
            assert consoles == ([vm.uid] * 2 if hypervisor is unjailed else [0, 0])
            await hypervisor.kill(folder)
    finally:
        await world.end()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vcpus": 33}, "33 vCPUs"),
        ({"vcpus": 0}, "0 vCPUs"),
        ({"boot_args": ("x" * 2048,)}, "bytes of boot arguments"),
        ({"boot_args": ("a\nb",)}, "printable"),
    ],
)
async def test_what_firecracker_does_not_check_is_refused_before_it_starts(
    world: World, fields: dict[str, Any], words: str
) -> None:
    folder, machine = await world.machine(**fields)
    with pytest.raises(InvalidSpec, match=words):
        await world.hypervisor.boot(folder, machine, None)
    assert folder.read() is None


async def test_the_console_is_the_guests_and_not_full_of_what_firecracker_was_asked(world: World) -> None:
    folder = await world.booted()
    await world.hypervisor.pause(folder)
    await world.hypervisor.resume(folder)
    async with control(folder) as pid1:
        await reseed(pid1)
        await pid1.call("shutdown", {"grace_s": 0}, type=dict[str, Any])
    assert await folder.wait(PATIENCE_S), "all that it said is in its console then"
    assert folder.read_console().splitlines() == ["skerry: the stand-in for a guest is up", "Firecracker exiting"]


async def test_a_template_takes_the_room_of_what_its_memory_holds(world: World) -> None:
    memory = (await world.template()) / "memory"
    data = memory.read_bytes()
    assert len(data) == 256 * MIB
    held = sum(data[at : at + 4096] != bytes(4096) for at in range(0, 8 * MIB, 4096)) * 4096
    assert held == MIB
    assert memory.stat().st_blocks * 512 <= 2 * held


async def test_a_file_that_is_no_kernel_is_refused_before_anything_starts(world: World) -> None:
    world.kernel.vmlinux.write_text("import os")
    folder, machine = await world.machine()
    with pytest.raises(InvalidSpec, match="is no kernel"):
        await world.hypervisor.boot(folder, machine, None)
    assert folder.read() is None
