from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import ProviderUnavailable
from skerry.host import uids
from skerry.vm import kvm, launch
from skerry.vm.folder import VmFolder
from skerry.vm.qemu import hypervisor

CPUINFO = "processor\t: 0\nmodel name\t: Some CPU @ 2.60GHz\ncpu MHz\t\t: 2596.150\n"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("7.2.22 (Debian 1:7.2+dfsg-7)", (7, 2)), ("10.0.0", (10, 0)), ("9.1-rc2", (9, 1))],
)
def test_versions_are_compared_by_number(version: str, numbers: tuple[int, int]) -> None:
    assert hypervisor.numbers(version) == numbers


def test_the_processors_clock_is_known_where_its_speed_is_fixed(tmp_path: Path) -> None:
    cpuinfo, scaling = tmp_path / "cpuinfo", tmp_path / "cpufreq"
    cpuinfo.write_text(CPUINFO)
    assert hypervisor.cpu_model(cpuinfo) == "Some CPU @ 2.60GHz"
    assert hypervisor.tsc_khz(cpuinfo, scaling) == 2596150
    scaling.mkdir()
    assert hypervisor.tsc_khz(cpuinfo, scaling) is None
    (scaling / "base_frequency").write_text("2600000\n")
    assert hypervisor.tsc_khz(cpuinfo, scaling) == 2600000


def test_a_host_without_qemu_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hypervisor, "_PATH", str(tmp_path))
    with pytest.raises(ProviderUnavailable, match="apt-get install qemu-system-x86"):
        hypervisor.find_version(tmp_path / "cache")


def test_a_qemu_that_does_not_run_is_told_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "qemu-system-x86_64"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(hypervisor, "_PATH", str(tmp_path))
    with pytest.raises(ProviderUnavailable, match="cannot be run"):
        hypervisor.find_version(tmp_path / "cache")
    broken.write_text("#!/bin/sh\necho something else\n")
    with pytest.raises(ProviderUnavailable, match="does not tell its version"):
        hypervisor.find_version(tmp_path / "cache")


def test_a_version_is_asked_for_once_for_each_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "qemu-system-x86_64"
    program.write_text("#!/bin/sh\necho QEMU emulator version 7.2.1\n")
    program.chmod(0o755)
    monkeypatch.setattr(hypervisor, "_PATH", str(tmp_path))
    assert hypervisor.find_version(tmp_path / "cache") == "7.2.1"
    monkeypatch.setattr(hypervisor, "_ask", lambda path: "asked again")
    assert hypervisor.find_version(tmp_path / "cache") == "7.2.1"
    program.write_text("#!/bin/sh\necho QEMU emulator version 10.0\n")
    assert hypervisor.find_version(tmp_path / "cache") == "asked again"


def test_there_is_no_kvm_without_its_device(tmp_path: Path) -> None:
    assert kvm.access(str(tmp_path / "kvm")) is None


@pytest.mark.skipif(not uids.are_available(), reason="only root gives machines uids of their own")
@pytest.mark.parametrize(
    ("mode", "group", "found"),
    [(0o666, 0, ()), (0o660, 108, (108,)), (0o660, 0, None), (0o600, 108, None)],
)
def test_a_machines_user_gets_a_group_for_kvm_but_never_roots(
    tmp_path: Path, mode: int, group: int, found: tuple[int, ...] | None
) -> None:
    device = tmp_path / "kvm"
    device.touch()
    os.chown(device, 0, group)
    device.chmod(mode)
    assert kvm.access(str(device)) == found


@pytest.mark.parametrize("runs", [True, False])
async def test_kvm_is_tried_once_for_each_boot_and_version(tmp_path: Path, runs: bool) -> None:
    tried: list[None] = []

    async def try_out() -> bool:
        tried.append(None)
        return runs

    assert await kvm.works(tmp_path / "cache", "7.2", try_out) is runs
    assert await kvm.works(tmp_path / "cache", "7.2", try_out) is runs
    assert len(tried) == 1
    assert await kvm.works(tmp_path / "cache", "8.0", try_out) is runs
    assert len(tried) == 2


async def test_on_the_kernels_vsock_a_machine_has_the_cid_that_it_is_to_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else any that is free; with a port of its own it has none."""
    monkeypatch.setattr(launch, "take_cid", lambda owner, wanted=None: wanted or 3)
    monkeypatch.setattr(hypervisor, "program", lambda: "/usr/bin/qemu-system-x86_64")
    monkeypatch.setattr(hypervisor, "find_version", lambda cache: "9.0.0")
    folder = VmFolder(tmp_path / "vm")
    found = [
        (await hypervisor.QemuHypervisor(tmp_path, channel=channel)._about_host(None, folder, wanted)).cid
        for channel, wanted in (("vsock", 70_000_000), ("vsock", None), ("port", 70_000_000))
    ]
    assert found == [70_000_000, 3, None]
