from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skerry.vm import launch
from skerry.vm.base import Drive, Kernel, Machine
from skerry.vm.launch import Launch
from skerry.vm.qemu.command import HostFacts, command, kernel_arguments, shape

DEBIAN = Kernel(
    key="k", version="6.1", own=False, vmlinuz=Path("/k/vmlinuz"), vmlinux=Path("/k/vmlinux"), initrd=Path("/k/initrd")
)
OWN = Kernel(
    key="o", version="6.12", own=True, vmlinuz=Path("/o/vmlinuz"), vmlinux=Path("/o/vmlinux"), initrd=Path("/o/initrd")
)
DRIVES = (
    Drive(name="root", path="/images/root.ext4", read_only=True),
    Drive(name="disk", path="disk.qcow2", format="qcow2"),
    Drive(name="data", path="/volumes/data"),
)
LAYERS = {
    "root": (Path("/images/root.ext4"),),
    "disk": (Path("disk.qcow2"), Path("/saved/disk.qcow2"), Path("/blanks/1G.ext4")),
    "data": (Path("/volumes/data"),),
}
MACHINE = Machine(kernel=DEBIAN, drives=DRIVES, vcpus=2, memory_mib=512)
SOFTWARE = HostFacts(program="/usr/bin/qemu", accelerator="tcg", tsc_khz=2_600_000, opens_memory_read_only=False)
HARDWARE = SOFTWARE._replace(accelerator="kvm", device_groups=(108,))


def options(what: Launch, name: str) -> list[str]:
    return [what.argv[at + 1] for at, word in enumerate(what.argv) if word == name]


def nodes(what: Launch) -> dict[str, dict[str, Any]]:
    found = [json.loads(text) for text in options(what, "-blockdev")]
    return {node["node-name"]: node for node in found}


def path_of(what: Launch, name: str) -> Path:
    """Which file a name in the command line stands for."""
    names = {launch.file(index): path for index, path in enumerate(what.files)}
    return names.get(name, Path(name))


def test_a_machine_has_no_device_that_was_not_asked_for_and_starts_no_process() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(what.argv)
    assert options(what, "-display") == ["none"]
    assert options(what, "-sandbox") == ["on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"]
    assert not options(what, "-netdev")


def test_nothing_outside_the_folder_is_named_by_its_path() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    assert not [word for word in what.argv[1:] if any(str(path) in word for path in what.files)]
    assert set(what.files) == {
        *map(Path, ("/images/root.ext4", "/saved/disk.qcow2", "/blanks/1G.ext4", "/volumes/data")),
        DEBIAN.vmlinuz,
        DEBIAN.initrd,
    }


def test_drives_are_devices_in_their_order() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    blocks = [device for device in options(what, "-device") if device.startswith("virtio-blk")]
    assert [device.split(",")[1] for device in blocks] == ["drive=root", "drive=disk", "drive=data"]


def test_only_the_uppermost_layer_of_a_writable_drive_is_written_to() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    root, disk, data = (nodes(what)[name] for name in ("root", "disk", "data"))
    assert (root["read-only"], disk["read-only"], data["read-only"]) == (True, False, False)
    assert disk["file"]["filename"] == "disk.qcow2"
    middle, base = disk["backing"], disk["backing"]["backing"]
    assert [node["driver"] for node in (disk, middle, base)] == ["qcow2", "qcow2", "raw"]
    assert path_of(what, middle["file"]["filename"]) == Path("/saved/disk.qcow2")
    assert path_of(what, base["file"]["filename"]) == Path("/blanks/1G.ext4")
    assert [node["read-only"] for node in (middle, base)] == [True, True]
    assert what.own == ("disk.qcow2", "/volumes/data")


def test_what_many_machines_read_is_not_locked_and_what_one_writes_is() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    root, disk = nodes(what)["root"], nodes(what)["disk"]
    assert root["file"]["locking"] == "off"
    assert disk["file"]["locking"] == "auto"
    assert disk["backing"]["file"]["locking"] == "off"


def test_a_debian_kernel_finds_its_devices_on_pci() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    assert options(what, "-machine")[0].startswith("pc,")
    assert all("-pci" in device for device in options(what, "-device") if device.startswith("virtio-"))
    assert path_of(what, options(what, "-kernel")[0]) == DEBIAN.vmlinuz
    assert "tsc=reliable no_timer_check mitigations=off" in kernel_arguments(MACHINE, SOFTWARE)


def test_our_own_kernel_boots_the_smallest_machine() -> None:
    machine = Machine(kernel=OWN, drives=DRIVES)
    what = command(machine, SOFTWARE, LAYERS)
    assert options(what, "-machine")[0].startswith("microvm,acpi=off")
    assert not [device for device in options(what, "-device") if "-pci" in device]
    assert path_of(what, options(what, "-kernel")[0]) == OWN.vmlinux
    assert "tsc_early_khz=2600000 lpj=13000000 nolapic_timer" in kernel_arguments(machine, SOFTWARE)


def test_a_clock_of_unknown_speed_is_left_to_the_kernel() -> None:
    assert "tsc" not in kernel_arguments(Machine(kernel=OWN, drives=()), SOFTWARE._replace(tsc_khz=None))


def test_the_hosts_processor_is_used_as_it_is_where_kvm_works() -> None:
    what = command(MACHINE, HARDWARE, LAYERS)
    assert (options(what, "-accel"), options(what, "-cpu"), what.device_groups) == (["kvm"], ["host"], (108,))
    assert "tsc" not in kernel_arguments(MACHINE, HARDWARE)


def test_software_emulates_the_best_processor_it_knows() -> None:
    what = command(MACHINE, SOFTWARE, LAYERS)
    assert options(what, "-accel") == ["tcg,thread=single,tb-size=64"]
    assert options(what, "-cpu") == ["max"]
    assert what.small_pages
    assert not command(MACHINE, SOFTWARE._replace(accelerator="kvm"), LAYERS).small_pages


def test_the_guest_is_told_of_its_channel_and_of_what_the_caller_adds() -> None:
    machine = Machine(kernel=DEBIAN, drives=(), boot_args=("skerry.probe",))
    words = kernel_arguments(machine, SOFTWARE).split()
    assert words[-2:] == ["skerry.channel=port:agent.0", "skerry.probe"]
    assert {"console=ttyS0", "reboot=t", "panic=-1"} <= set(words)


@pytest.mark.parametrize(("saveable", "memory"), [(False, "memory-backend-ram"), (True, "memory-backend-file")])
def test_memory_is_a_file_only_if_it_is_to_be_saved(saveable: bool, memory: str) -> None:
    machine = Machine(kernel=DEBIAN, drives=(), memory_mib=300, saveable=saveable)
    what = command(machine, SOFTWARE, {})
    assert options(what, "-object")[0].startswith(f"{memory},id=ram,size=300M")
    assert ("share=on" in options(what, "-object")[0]) == saveable


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("saved", [None, Path("/saved/memory")])
def test_equal_pages_of_machines_are_merged_only_if_the_host_says_so(saved: Path | None, merges: bool) -> None:
    what = command(MACHINE, SOFTWARE._replace(merges_memory=merges), LAYERS, saved)
    assert f"mem-merge={'on' if merges else 'off'}" in options(what, "-machine")


@pytest.mark.parametrize("read_only", [False, True])
def test_a_clone_keeps_its_changes_of_the_saved_memory_to_itself(read_only: bool) -> None:
    host = SOFTWARE._replace(opens_memory_read_only=read_only)
    what = command(MACHINE, host, LAYERS, Path("/saved/memory"))
    memory = dict(word.partition("=")[::2] for word in options(what, "-object")[0].split(","))
    assert memory["share"] == "off"
    assert path_of(what, memory["mem-path"]) == Path("/saved/memory")
    assert (memory.get("readonly"), memory.get("rom")) == (("on", "off") if read_only else (None, None))
    assert options(what, "-incoming") == ["defer"]
    assert not options(what, "-kernel")


def test_a_clone_has_the_shape_of_the_machine_it_is_a_clone_of() -> None:
    other_disk = Drive(name="disk", path="/elsewhere/other.qcow2", format="qcow2")
    clone = Machine(kernel=DEBIAN, drives=(DRIVES[0], other_disk, DRIVES[2]), vcpus=2, memory_mib=512)
    assert shape(clone, "tcg") == shape(MACHINE, "tcg")
    assert shape(Machine(kernel=DEBIAN, drives=DRIVES, vcpus=2), "tcg") != shape(MACHINE, "tcg")


def test_the_kernels_vsock_takes_the_place_of_the_port() -> None:
    what = command(MACHINE, SOFTWARE._replace(cid=7), LAYERS)
    assert "vhost-vsock-pci,guest-cid=7" in options(what, "-device")
    assert not [device for device in options(what, "-device") if "serial" in device]
    assert "skerry.channel=vsock" in options(what, "-append")[0]
    assert (what.channel, what.cid) == (False, 7)


def test_a_guest_that_all_users_of_the_host_can_reach_is_told_the_digest_of_its_token() -> None:
    what = command(MACHINE, SOFTWARE._replace(cid=7, token_digest="d1"), LAYERS)
    assert "skerry.token=d1" in options(what, "-append")[0].split()
    assert "skerry.token" not in options(command(MACHINE, SOFTWARE, LAYERS), "-append")[0]


def test_a_network_is_added_where_it_is_asked_for() -> None:
    what = command(Machine(kernel=DEBIAN, drives=(), network="user"), SOFTWARE, {})
    assert options(what, "-netdev")[0].startswith("user,id=net")
    assert "virtio-net-pci,netdev=net" in options(what, "-device")
    assert what.network
    assert not command(MACHINE, SOFTWARE, LAYERS).network
