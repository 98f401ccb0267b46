"""Boxes from their making to their end, on stand-ins for Firecracker behind which real agents answer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from manager.world import config_of
from providers.firecracker.fc_world import Make, config_on, machine_of, provider_on, running_in
from vm.firecracker.installing import StandIns

from skerry.errors import (
    CreateFailed,
    ProviderError,
    ProviderUnavailable,
    Unsupported,
)
from skerry.host import uids
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Network, Spec
from skerry.net.http import HttpClient
from skerry.providers.base import BoxState
from skerry.providers.firecracker import Firecracker
from skerry.providers.machine import plan, power
from skerry.providers.shared import loopback
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm.base import FIRST_CID
from skerry.vm.firecracker import probe
from skerry.vm.firecracker.jail import API
from skerry.vm.firecracker.snapshot_note import MachineNote


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


async def test_a_version_that_loses_clones_boots_each_machine(make: Make, stand_ins: StandIns) -> None:
    stand_ins.be("1.16.0")
    first, second = await make(), await make()
    assert [(await sandbox.exec("echo up")).text for sandbox in (first, second)] == ["up\n", "up\n"]
    asked = stand_ins.requests()
    assert "PUT /snapshot/create" not in asked
    assert "PUT /snapshot/load" not in asked


async def _cid(world_folder: Path, id: str) -> int:
    """CID of a machine as its Firecracker tells it."""
    folder = world_folder / "state" / id / "vm"
    socket = folder / MachineNote.read(folder).home / API
    answer = await HttpClient(f"unix://{socket}", timeout_s=10, follow=False).request("GET", "/vm/config")
    return int(answer.json(dict[str, Any])["vsock"]["guest_cid"])


@pytest.mark.parametrize("template", [False, True])
async def test_a_machine_that_boots_has_the_cid_of_its_record_and_a_clone_that_of_its_template(
    provider: Firecracker, world_folder: Path, tmp_path: Path, template: bool
) -> None:
    """Firecracker cannot change it with a snapshot. It matters to nobody: the socket of a machine is its own."""
    mine = config_on(world_folder, jailed=uids.are_available(), template=template)
    settings = config_of(tmp_path, provider="firecracker", providers={"firecracker": msgspec.to_builtins(mine)})
    async with AsyncSandboxManager(settings, reconcile=False) as manager:
        first, second = [await manager.create(data=False) for _ in range(2)]
        given = [(await manager.record(sandbox.id)).cid or 0 for sandbox in (first, second)]
        assert min(given) > FIRST_CID
        assert len({*given}) == 2
        expected = [FIRST_CID, FIRST_CID] if template else given
        assert [await _cid(world_folder, sandbox.id) for sandbox in (first, second)] == expected
        await manager.stop(first.id)
        await manager.start(first.id)
        assert await _cid(world_folder, first.id) == expected[0]
        for sandbox in (first, second):
            await manager.destroy(sandbox.id)


async def test_nothing_is_left_of_a_destroyed_box(make: Make, provider: Firecracker, world_folder: Path) -> None:
    sandbox = await make()
    assert running_in(world_folder)
    await provider.destroy(sandbox.id)
    await provider.destroy(sandbox.id)
    assert running_in(world_folder) == set()
    assert not (world_folder / "state" / sandbox.id).exists()


@pytest.mark.parametrize("put", [os.symlink, os.link])
async def test_a_file_of_ours_in_place_of_a_disk_is_in_no_snapshot(
    make: Make, provider: Firecracker, world_folder: Path, put: Callable[[Path, Path], None]
) -> None:
    sandbox = await make()
    await provider.stop(sandbox.id)
    disk, secret = machine_of(world_folder, sandbox).file("disk.raw"), world_folder / "secret"
    secret.write_bytes(b"secret" * 1000)
    disk.unlink()
    put(secret, disk)
    with pytest.raises(ProviderError, match="not the disk"):
        await provider.snapshot(sandbox.id, "stolen")
    assert await provider.snapshots() == []
    with pytest.raises(ProviderError):
        await provider.start(sandbox.id, sandbox.spec)
    assert secret.stat().st_uid == os.geteuid()


async def test_a_stopped_box_has_its_files_when_it_is_started(make: Make, provider: Firecracker) -> None:
    sandbox = await make()
    await sandbox.files.write("kept", "over the stop")
    await provider.stop(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.STOPPED
    await provider.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "over the stop"


async def test_a_stop_waits_for_a_guest_that_takes_its_time_to_write_out_its_files(
    make: Make, provider: Firecracker, stand_ins: StandIns
) -> None:
    stand_ins.shut_down_in(power._CONTROL_S + 1)
    sandbox = await make()
    await sandbox.files.write("kept", "over the stop")
    await provider.stop(sandbox.id)
    await provider.start(sandbox.id, sandbox.spec)
    assert await sandbox.files.read_text("kept") == "over the stop"


@pytest.mark.parametrize("is_proven", [True, False])
async def test_another_process_starts_a_stopped_box(
    make: Make, provider: Firecracker, world_folder: Path, is_proven: bool
) -> None:
    """It has not looked for a kernel to try KVM with: it takes the box's own, if KVM is not proven already."""
    sandbox = await make()
    await provider.stop(sandbox.id)
    if not is_proven:
        (world_folder / "cache/vm/firecracker-kvm.json").unlink()
    another = provider_on(world_folder, jailed=uids.are_available())
    await another.start(sandbox.id, sandbox.spec)
    await another.aclose()
    assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING


async def test_a_paused_box_goes_on_where_it_was(make: Make, provider: Firecracker) -> None:
    sandbox = await make()
    await provider.pause(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.PAUSED
    await provider.resume(sandbox.id)
    assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING
    assert (await sandbox.exec("echo on")).text == "on\n"


async def test_a_box_that_does_not_go_on_after_its_pause_is_told(
    make: Make, provider: Firecracker, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "loses_what_it_resumes", lambda version: False)
    for name in ("_CONTROL_S", "_FREEZE_S"):
        monkeypatch.setattr(power, name, 0.5)
    stand_ins.be("1.16.1")
    sandbox = await make()
    await provider.pause(sandbox.id)
    with pytest.raises(ProviderError, match="its guest does not go on"):
        await provider.resume(sandbox.id)
    with pytest.raises(ProviderError, match="does not write out its files"):
        await provider.snapshot(sandbox.id, "broken")
    assert await provider.snapshots() == []


@pytest.mark.parametrize("version", ["1.15.1", "1.16.1"])
async def test_a_box_made_of_a_snapshot_has_its_files(
    make: Make, provider: Firecracker, stand_ins: StandIns, version: str
) -> None:
    stand_ins.be(version)
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


async def test_a_network_is_refused_with_what_to_do_instead(provider: Firecracker) -> None:
    with pytest.raises(Unsupported, match="provider qemu"):
        await provider.enforcement(Spec(provider="firecracker", network=Network.BRIDGE))


async def test_a_box_with_rules_is_prepared_by_its_first_process_at_each_start(
    make: Make, provider: Firecracker
) -> None:
    sandbox = await make(network="rules")
    assert sandbox.enforced["network"].by == loopback.BY_RULES
    for _ in range(2):
        said = (await sandbox.exec(["cat", loopback.LOW_PORTS_FILE, loopback.RESOLV_CONF])).text
        assert said == f"0\n{loopback.RESOLV_CONF_TEXT}"
        await sandbox.close()
        await provider.stop(sandbox.id)
        await provider.start(sandbox.id, sandbox.spec)


async def test_a_box_with_rules_that_its_first_process_did_not_prepare_is_no_box(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_PREPARED", {})
    with pytest.raises(CreateFailed, match="the box cannot have rules"):
        await make(network="rules")


async def test_doctor_is_told_of_the_jail(provider: Firecracker, world_folder: Path) -> None:
    told = await provider.describe()
    assert told["hypervisor"].by == "firecracker 1.17.0, kvm"
    if uids.are_available():
        assert told["jail"].by == str(world_folder / "bin/jailer")
        without = await provider_on(world_folder, jailed=False).describe()
        assert without["jail"].why_not == "there is no jailer"
    else:
        assert told["jail"].why_not


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("1.15.1", None),
        ("1.17.0-dev", None),
        ("1.16.0", "1.16.0 loses guests that its API pauses.*it loses clones too.*; 1.15.1 is good"),
        ("1.16.1", "1.16.1 loses guests that its API pauses: they are stopped by signals instead; 1.15.1 is good"),
        ("1.14.2", "never driven on 1.14.2; 1.15.1 is good"),
    ],
)
async def test_doctor_is_told_which_version_is_good(
    provider: Firecracker, stand_ins: StandIns, version: str, told: str | None
) -> None:
    stand_ins.be(version)
    found = (await provider.describe())["version"]
    if told is None:
        assert found.by == version.removesuffix("-dev")
    else:
        assert re.search(told, found.why_not)


async def test_a_host_without_firecracker_is_unavailable(world_folder: Path) -> None:
    found = Firecracker(Firecracker.Config(program=str(world_folder / "none"), cache_dir=str(world_folder)))
    with pytest.raises(ProviderUnavailable, match="none"):
        await found.check()
