"""Whether Firecracker works on a host: found by running a guest."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from skerry.errors import InvalidSpec, ProviderUnavailable
from skerry.manager import health
from skerry.vm import kvm
from skerry.vm.base import Kernel, Machine
from skerry.vm.firecracker import FirecrackerHypervisor, probe
from skerry.vm.folder import VmFolder
from vm.firecracker.conftest import NEEDS_ROOT
from vm.firecracker.installing import StandIns
from vm.firecracker.world import World, elf, image_of_arm

_NOTE = "firecracker-kvm.json"


async def test_kvm_is_proven_by_a_guest_that_ran_and_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    can = await world.hypervisor.probe()
    assert (can.accelerator, can.version, can.is_boundary) == ("kvm", "1.17.0", True)
    starts = world.stand_ins.requests().count("PUT /actions")
    await world.hypervisor.probe()
    assert world.stand_ins.requests().count("PUT /actions") == starts == 1
    assert [path.name for path in (world.folder / "cache").iterdir()] == [_NOTE]


async def test_a_device_that_runs_no_guest_is_no_kvm_and_is_tried_again_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    world.stand_ins.without_kvm()
    for _ in range(2):
        with pytest.raises(ProviderUnavailable, match=r"KVM runs no guest here: (?s:.*)KVM_EXIT_INTERNAL_ERROR"):
            await world.hypervisor.probe()
    assert world.stand_ins.requests().count("PUT /actions") == 1
    assert [path.name for path in (world.folder / "cache").iterdir()] == [_NOTE]
    world.stand_ins.heal()
    os.utime(world.folder / "cache" / _NOTE, (1, 1))
    assert (await world.hypervisor.probe()).is_boundary


async def test_a_failure_says_nothing_of_another_kernel(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    world.stand_ins.without_kvm()
    with pytest.raises(ProviderUnavailable):
        await world.hypervisor.probe()
    world.stand_ins.heal()
    world.kernel = msgspec.structs.replace(world.kernel, key="another")
    assert (await world.hypervisor.probe()).is_boundary


@NEEDS_ROOT
async def test_a_jailer_that_fails_says_nothing_of_kvm_and_is_not_remembered(
    short_folder: Path, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    good = stand_ins.jailer.rename(stand_ins.jailer.with_name("good"))
    stand_ins.jailer.write_text("#!/bin/sh\necho no jail today >&2\nexit 1\n")
    stand_ins.jailer.chmod(0o755)
    world = World(short_folder, stand_ins, jailed=True)
    with pytest.raises(ProviderUnavailable, match=r"no machine starts here (?s:.*)no jail today"):
        await world.hypervisor.probe()
    good.rename(stand_ins.jailer)
    assert (await world.hypervisor.probe()).is_boundary


async def test_a_guest_that_says_nothing_is_told_of_before_doctor_gives_up(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe._PROBE_S < health.DEADLINE_S
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    monkeypatch.setattr(probe, "_PROBE_S", 1.0)
    monkeypatch.setattr(kvm, "probe_machine", lambda kernel: Machine(kernel=kernel, drives=()))
    with pytest.raises(ProviderUnavailable, match="it said nothing in 1 s"):
        await world.hypervisor.probe()


async def test_what_was_proven_holds_without_a_kernel(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    await world.hypervisor.probe()
    again = FirecrackerHypervisor(world.folder / "cache", lambda: None, program=str(world.stand_ins.firecracker))
    assert (await again.probe()).is_boundary


async def test_a_host_without_firecracker_is_told_what_to_do(short_folder: Path) -> None:
    hypervisor = FirecrackerHypervisor(short_folder, lambda: None, program=str(short_folder / "none"))
    with pytest.raises(ProviderUnavailable, match="Fix: put firecracker and jailer"):
        await hypervisor.probe()


async def test_what_was_left_by_a_killed_probe_is_swept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    left = VmFolder(world.folder / "cache/.try-firecracker-old")
    left.make()
    os.utime(left.path, (1, 1))
    await world.hypervisor.probe()
    assert not left.path.exists()


async def test_without_a_kernel_nothing_can_be_proven(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda **_: None)
    hypervisor = FirecrackerHypervisor(world.folder / "cache", lambda: None, program=str(world.stand_ins.firecracker))
    with pytest.raises(ProviderUnavailable, match="Fix: skerry image build"):
        await hypervisor.probe()


def test_a_device_that_is_not_there_or_not_ours_is_told(short_folder: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="there is no"):
        probe.check_device(in_jail=False, device=short_folder / "kvm")
    for in_jail in (False, True):
        probe.check_device(in_jail=in_jail, device=Path("/dev/null"))


@pytest.mark.parametrize(
    ("mode", "gid", "fix"),
    [
        (0o600, 0, "as root: chgrp kvm .* && chmod 660 .* && usermod -aG kvm nobody"),
        (0o660, 0, "as root: chgrp kvm"),
        (0o600, 65534, "as root: chgrp kvm"),
        (0o660, 65534, "Fix: usermod -aG nogroup nobody; then log in anew"),
    ],
)
@NEEDS_ROOT
def test_who_may_not_use_the_device_is_told_what_would_help(short_folder: Path, mode: int, gid: int, fix: str) -> None:
    device = short_folder / "kvm"
    device.touch()
    os.chown(device, 0, gid)
    device.chmod(mode)
    child = os.fork()  # nobody's rights cannot be given back
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setresgid(1, 1, 1)
            os.setresuid(65534, 65534, 65534)
            with pytest.raises(ProviderUnavailable, match=fix):
                probe.check_device(in_jail=False, device=device)
            code = 0
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


@NEEDS_ROOT
def test_machines_without_a_jail_need_a_device_that_their_uids_may_use(short_folder: Path) -> None:
    device = short_folder / "kvm"
    device.touch(0o600)
    probe.check_device(in_jail=True, device=device)
    with pytest.raises(ProviderUnavailable, match="install Firecracker's jailer, or chgrp kvm"):
        probe.check_device(in_jail=False, device=device)


@pytest.mark.parametrize(
    ("machine", "head", "problem"),
    [
        ("x86_64", elf(62), None),
        ("x86_64", elf(183), "is not for x86_64"),
        ("x86_64", image_of_arm(), "is not for x86_64"),
        ("aarch64", image_of_arm(), None),
        ("aarch64", elf(183), "on aarch64 Firecracker boots an Image"),
        ("aarch64", elf(62), "on aarch64 Firecracker boots an Image"),
    ],
)
def test_only_what_firecracker_loads_on_this_processor_is_its_kernel(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch, machine: str, head: bytes, problem: str | None
) -> None:
    host = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*host[:4], machine)))
    vmlinux = short_folder / "vmlinux"
    vmlinux.write_bytes(head)
    none = short_folder / "none"
    kernel = Kernel(key="k", version="6.12", own=True, vmlinuz=none, vmlinux=vmlinux, initrd=none)
    if problem is None:
        assert probe.kernel_file(kernel, "1.15.1") == vmlinux
    else:
        with pytest.raises(InvalidSpec, match=problem):
            probe.kernel_file(kernel, "1.15.1")
