"""Whoever dies, or answers nobody, on stand-ins for Firecracker: what is left is told as it is, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from providers.firecracker import fc_victim
from providers.firecracker.fc_world import Make, machine_of, running_in

from skerry.errors import AgentUnreachable, SkerryError, WrongState
from skerry.host import processes, uids
from skerry.model.spec import new_id
from skerry.providers.base import BoxState
from skerry.providers.firecracker import Firecracker
from skerry.testing.conformance.base import eventually
from skerry.vm import guest
from skerry.vm.firecracker.jail import API
from skerry.vm.firecracker.snapshot_note import MachineNote
from skerry.vm.folder import VmFolder


@pytest.mark.parametrize("party", ["vmm", "warden"])
async def test_a_box_whose_processes_are_killed_is_stopped_and_gone_after_a_destroy(
    make: Make, provider: Firecracker, world_folder: Path, party: str
) -> None:
    sandbox = await make()
    vm = machine_of(world_folder, sandbox).read()
    assert vm is not None
    process = getattr(vm, party)
    os.kill(process.pid, signal.SIGKILL)

    async def is_stopped() -> bool:
        return (await provider.discover())[sandbox.id].state is BoxState.STOPPED

    await eventually(is_stopped, "the box is stopped: its disk is there, and it can be started again")
    assert running_in(world_folder) == set(), "what is called stopped does not run"
    with pytest.raises(SkerryError):
        await sandbox.exec("true")
    await provider.destroy(sandbox.id)
    assert running_in(world_folder) == set()


@pytest.mark.parametrize("verb", ["snapshot", "pause", "start", "dial"])
async def test_no_verb_takes_a_machine_that_has_lost_its_warden_for_a_stopped_one(
    make: Make, provider: Firecracker, world_folder: Path, verb: str
) -> None:
    """A jailed one outlives its warden: a copy of its disk would be of one that changes."""
    sandbox = await make()
    await sandbox.files.write("kept", "here")
    async with guest.control(machine_of(world_folder, sandbox), 10) as client:
        await client.call("freeze", type=dict[str, Any])
    vm = machine_of(world_folder, sandbox).read()
    assert vm is not None
    assert vm.warden is not None
    assert vm.vmm is not None
    os.kill(vm.warden.pid, signal.SIGKILL)
    await asyncio.to_thread(processes.wait_until_dead, [vm.warden], 10)
    if verb == "snapshot":
        await provider.snapshot(sandbox.id, "dead")
        await provider.remove_snapshot("dead")
    elif verb == "start":
        await provider.start(sandbox.id, sandbox.spec)
        assert await sandbox.files.read_text("kept") == "here"
    else:
        with pytest.raises((WrongState, AgentUnreachable), match="not run"):
            await (provider.pause(sandbox.id) if verb == "pause" else provider.dial(sandbox.id))
    assert not vm.vmm.is_alive()


async def test_a_machine_that_does_not_die_is_no_reason_not_to_tell_of_others(
    make: Make, provider: Firecracker, world_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alone, other = await make(), await make()
    vm = machine_of(world_folder, left_alone).read()
    assert vm is not None
    assert vm.warden is not None
    os.kill(vm.warden.pid, signal.SIGKILL)
    assert await asyncio.to_thread(processes.wait_until_dead, [vm.warden], 10)
    with monkeypatch.context() as undying:
        undying.setattr(processes, "wait_until_dead", lambda *_, **__: False)
        states = {id: status.state for id, status in (await provider.discover()).items()}
    if uids.are_available():  # else it died with its warden
        assert states[left_alone.id] is BoxState.RUNNING
    assert states[other.id] is BoxState.RUNNING


async def test_a_machine_whose_hypervisor_answers_nobody_is_told_of_and_stopped_like_others(
    make: Make, provider: Firecracker, world_folder: Path
) -> None:
    """One that was taken over may do so, or somebody who holds all connections that it takes."""
    paused, other = await make(), await make()
    await provider.pause(paused.id)
    folder = machine_of(world_folder, paused)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            with VmFolder(folder.file(MachineNote.read(folder.path).home)).short() as home:
                connection.connect(f"{home}/{API}")
        states = {id: status.state for id, status in (await provider.discover()).items()}
        assert states == {paused.id: BoxState.PAUSED, other.id: BoxState.RUNNING}
        await provider.stop(paused.id)
    assert (await provider.discover())[paused.id].state is BoxState.STOPPED


@pytest.mark.parametrize("point", fc_victim.POINTS)
async def test_a_maker_that_is_killed_leaves_what_destroy_removes(
    provider: Firecracker, world_folder: Path, point: str
) -> None:
    id = new_id()
    await _kill_maker(world_folder, id, point)
    status = (await provider.discover()).get(id)
    assert status is None or status.state is not BoxState.RUNNING
    await provider.destroy(id, volumes=True)
    assert running_in(world_folder) == set()
    assert id not in await provider.discover()


@pytest.mark.parametrize(
    ("point", "is_first", "next_"),
    [
        (fc_victim.NOTE, False, "discover"),
        (fc_victim.NOTE, False, "snapshot"),
        (fc_victim.LAUNCH, False, "discover"),
        ("PUT /snapshot/load", False, "start"),
        ("PUT /actions", True, "discover"),
        ("PUT /actions", True, "destroy"),
    ],
)
async def test_a_box_whose_starter_was_killed_is_stopped_and_nothing_of_it_runs(
    make: Make, provider: Firecracker, world_folder: Path, point: str, is_first: bool, next_: str
) -> None:
    """Its processes may be noted or not, and it may have been the first that needs a template."""
    sandbox = await make()
    await sandbox.files.write("kept", "here")
    await provider.stop(sandbox.id)
    if is_first:
        shutil.rmtree(world_folder / "cache/vm/templates")
    await _kill_maker(world_folder, sandbox.id, point)
    assert running_in(world_folder)
    if next_ == "discover":
        assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
        assert not machine_of(world_folder, sandbox).may_run(), "it is not killed at every look"
    elif next_ == "snapshot":
        await provider.snapshot(sandbox.id, "off")
        await provider.remove_snapshot("off")
    elif next_ == "start":
        await provider.start(sandbox.id, sandbox.spec)
        assert await sandbox.files.read_text("kept") == "here"
        return
    else:
        await provider.destroy(sandbox.id)
    assert running_in(world_folder) == set()


async def test_a_look_leaves_a_box_alone_that_is_being_started(
    make: Make, provider: Firecracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await make()
    await provider.stop(sandbox.id)
    become = guest.become

    async def looked(*arguments: Any, **options: Any) -> None:
        assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
        await become(*arguments, **options)

    monkeypatch.setattr(guest, "become", looked)
    await provider.start(sandbox.id, sandbox.spec)
    assert (await sandbox.exec("echo on")).text == "on\n"


async def _kill_maker(world_folder: Path, id: str, point: str) -> None:
    command = [sys.executable, fc_victim.__file__, str(world_folder), id, point]
    done = await asyncio.to_thread(subprocess.run, command, timeout=50, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
