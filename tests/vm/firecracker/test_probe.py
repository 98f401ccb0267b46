"""Whether Firecracker works on a host: found by running a guest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import ProviderUnavailable
from skerry.vm.firecracker import FirecrackerHypervisor, probe
from skerry.vm.folder import VmFolder
from vm.firecracker.world import World


async def test_kvm_is_proven_by_a_guest_that_ran_and_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda: None)
    can = await world.hypervisor.probe()
    assert (can.accelerator, can.version, can.is_boundary) == ("kvm", "1.17.0", True)
    starts = world.stand_ins.requests().count("PUT /actions")
    await world.hypervisor.probe()
    assert world.stand_ins.requests().count("PUT /actions") == starts == 1
    assert [path.name for path in (world.folder / "cache").iterdir()] == ["firecracker-works"]


async def test_a_device_that_runs_no_guest_is_no_kvm(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda: None)
    world.stand_ins.without_kvm()
    with pytest.raises(ProviderUnavailable, match="KVM runs no guest here"):
        await world.hypervisor.probe()
    assert [*(world.folder / "cache").iterdir()] == []


async def test_a_host_without_firecracker_is_told_what_to_do(short_folder: Path) -> None:
    hypervisor = FirecrackerHypervisor(short_folder, lambda: None, program=str(short_folder / "none"))
    with pytest.raises(ProviderUnavailable, match="Fix: put firecracker and jailer"):
        await hypervisor.probe()


async def test_what_was_left_by_a_killed_probe_is_swept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda: None)
    left = VmFolder(world.folder / "cache/.try-firecracker-old")
    left.make()
    os.utime(left.path, (1, 1))
    await world.hypervisor.probe()
    assert not left.path.exists()


async def test_without_a_kernel_nothing_can_be_proven(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "check_device", lambda: None)
    hypervisor = FirecrackerHypervisor(world.folder / "cache", lambda: None, program=str(world.stand_ins.firecracker))
    with pytest.raises(ProviderUnavailable, match="Fix: skerry image build"):
        await hypervisor.probe()


def test_a_device_that_is_not_there_or_not_ours_is_told(short_folder: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="there is no"):
        probe.check_device(short_folder / "kvm")
    probe.check_device(Path("/dev/null"))
