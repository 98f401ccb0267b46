"""Real guests, in software where KVM runs none: a kernel, and a first program that counts aloud."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from skerry.errors import Conflict, CreateFailed, InvalidSpec, ProviderUnavailable, WrongState
from skerry.vm import kvm
from skerry.vm.base import Drive, Kernel, Machine, MachineLimits
from skerry.vm.folder import VmFolder
from skerry.vm.images import boot, tree
from skerry.vm.qemu import hypervisor, saved
from skerry.vm.qemu.hypervisor import QemuHypervisor

from ..standins import seen_on_host, until

INIT = b"""#!/bin/sh
mkdir /sys
mount -t proc proc /proc
mount -t sysfs sys /sys
read -r asked </proc/cmdline
case "$asked" in *skerry.probe*) echo "skerry: this kernel runs"; reboot -f;; esac
for again in 1 2 3 4; do
    for module in /modules/*.ko; do insmod $module 2>/dev/null; done
done
count=0
while :; do
    read -r size </sys/block/vdc/size
    count=$((count + 1))
    echo "count $count size $size"
    sleep 0.05
done
"""
LIMITS = MachineLimits(memory=1 << 30, cpus=2)
DISK = 1 << 20
COUNT = re.compile(r"count (\d+) size (\d+)\n")


class Place:
    """Where the machines of these tests are, and what they are made of."""

    def __init__(self, path: Path, kernel: Kernel) -> None:
        self.path = path
        self.qemu = QemuHypervisor(path / "cache", lambda: self.kernel)
        for name in ("root", "runtime", "blank"):
            with open(path / name, "wb") as file:
                file.truncate(DISK)
        initrd = path / "initrd"
        initrd.write_bytes(kernel.initrd.read_bytes() + boot.archive([tree.file_entry("init", INIT, 0o755)]))
        self.kernel = msgspec.structs.replace(kernel, initrd=initrd)

    def folder(self, name: str) -> VmFolder:
        folder = VmFolder(self.path / name)
        folder.make()
        return folder

    async def machine(self, folder: VmFolder, *, size: int | None = None, saveable: bool = False) -> Machine:
        drives = [Drive(name=name, path=str(self.path / name), read_only=True) for name in ("root", "runtime")]
        drives.append(await self.qemu.make_disk(folder, "disk", base=self.path / "blank", size=size))
        return Machine(kernel=self.kernel, drives=tuple(drives), vcpus=1, saveable=saveable)


@pytest.fixture(scope="module")
def place(vm_kernel: Kernel) -> Iterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="skerry-qemu-"))
    place = Place(path, vm_kernel)
    try:
        asyncio.run(place.qemu.probe())
    except ProviderUnavailable as error:
        shutil.rmtree(path)
        pytest.skip(str(error))
    yield place
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def template(place: Place) -> Path:
    """A machine that was saved while it counted."""
    into = place.path / "template"
    into.mkdir()
    asyncio.run(_save(place, into))
    return into


async def _save(place: Place, into: Path) -> None:
    folder = place.folder("to-save")
    try:
        await place.qemu.boot(folder, await place.machine(folder, saveable=True), LIMITS)
        await counted(folder)
        await place.qemu.save(folder, into)
        assert folder.how_it_ended() == "the machine ended with code 0"
    finally:
        await place.qemu.kill(folder)


@pytest.fixture
async def folder(place: Place, request: pytest.FixtureRequest) -> AsyncIterator[VmFolder]:
    folder = place.folder(re.sub(r"\W", "-", request.node.name))
    yield folder
    await place.qemu.kill(folder)
    assert seen_on_host(folder) == []
    folder.remove()


async def counted(folder: VmFolder, above: int = 0) -> tuple[int, int]:
    """The first count above that the guest says, and the size of its disk."""

    def look() -> tuple[int, int] | None:
        assert folder.is_running(), folder.read_console()
        found = ((int(count), int(size)) for count, size in COUNT.findall(folder.read_console()))
        return next((pair for pair in found if pair[0] > above), None)

    await asyncio.to_thread(until, look)
    seen = look()
    assert seen is not None
    return seen


async def test_what_qemu_can_do_here_is_found_by_running_a_guest(place: Place) -> None:
    found = await place.qemu.probe()
    assert found.accelerator in ("kvm", "tcg")
    assert found.version[0].isdigit()
    assert found.snapshots


async def test_software_is_assumed_until_there_is_a_kernel_to_try(tmp_path: Path) -> None:
    assert (await QemuHypervisor(tmp_path).probe()).accelerator == "tcg"


async def test_vsock_is_refused_with_the_remedy_where_the_kernel_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hypervisor, "_VSOCK", str(tmp_path / "none"))
    with pytest.raises(ProviderUnavailable, match="modprobe vhost_vsock"):
        await QemuHypervisor(tmp_path, channel="vsock").probe()


async def test_a_kernel_that_is_tried_says_so_and_ends(place: Place, folder: VmFolder) -> None:
    machine = Machine(kernel=place.kernel, drives=(), boot_args=("skerry.probe",))
    await place.qemu.boot(folder, machine, LIMITS)
    assert await folder.wait(50)
    assert kvm.SAID in folder.read_console()
    assert folder.how_it_ended() == "the machine ended with code 0"


async def test_a_machine_pauses_goes_on_and_is_killed(place: Place, template: Path, folder: VmFolder) -> None:
    qemu = place.qemu
    await qemu.restore(folder, await place.machine(folder), template, LIMITS)
    await counted(folder)
    assert not await qemu.is_paused(folder)
    await qemu.pause(folder)
    await qemu.pause(folder)
    assert await qemu.is_paused(folder)
    count = int(COUNT.findall(folder.read_console())[-1][0])
    await qemu.resume(folder)
    assert not await qemu.is_paused(folder)
    await counted(folder, above=count + 1)
    with pytest.raises(WrongState, match="not booted to be saved"):
        await qemu.save(folder, place.path)
    await qemu.kill(folder)
    assert not folder.is_running()
    with pytest.raises(CreateFailed, match="the machine"):
        await qemu.is_paused(folder)


def test_a_saved_machine_takes_the_room_of_what_its_memory_holds(template: Path) -> None:
    memory = template / saved.MEMORY
    data = memory.read_bytes()
    held = sum(data[at : at + 4096] != bytes(4096) for at in range(0, len(data), 4096)) * 4096
    assert 0 < held < len(data) // 2
    assert memory.stat().st_blocks * 512 <= held * 1.1, held


async def test_a_clone_goes_on_where_the_saved_machine_was(place: Place, template: Path, folder: VmFolder) -> None:
    at_end = int(COUNT.findall(VmFolder(place.path / "to-save").read_console())[-1][0])
    await place.qemu.restore(folder, await place.machine(folder), template, LIMITS)
    count, size = await counted(folder)
    assert count in (at_end, at_end + 1)
    assert size == DISK // 512


async def test_clones_share_what_was_saved_and_change_nothing_of_it(place: Place, template: Path) -> None:
    before = (template / saved.MEMORY).stat()
    folders = [place.folder(f"clone-{index}") for index in range(2)]
    try:
        for folder in folders:
            await place.qemu.restore(folder, await place.machine(folder), template, LIMITS)
        first = await asyncio.gather(*(counted(folder) for folder in folders))
        await asyncio.gather(*(counted(folder, above=count) for folder, (count, _) in zip(folders, first, strict=True)))
    finally:
        for folder in folders:
            await place.qemu.kill(folder)
            folder.remove()
    after = (template / saved.MEMORY).stat()
    assert (before.st_mtime_ns, before.st_size, before.st_blocks) == (after.st_mtime_ns, after.st_size, after.st_blocks)


@pytest.mark.parametrize("is_booted", [False, True])
async def test_the_memory_of_a_machine_is_copied_and_both_go_on_from_there(
    place: Place, template: Path, folder: VmFolder, tmp_path: Path, is_booted: bool
) -> None:
    qemu, kept = place.qemu, tmp_path / "kept"
    kept.mkdir()
    if is_booted:
        await qemu.boot(folder, await place.machine(folder), LIMITS)
    else:
        await qemu.restore(folder, await place.machine(folder), template, LIMITS)
    await counted(folder)
    await qemu.copy_memory(folder, kept)
    assert await qemu.is_paused(folder)
    at_copy = int(COUNT.findall(folder.read_console())[-1][0])
    memory = (kept / saved.MEMORY).stat()
    assert memory.st_size == 256 << 20
    assert memory.st_blocks * 512 < memory.st_size, "what is zero takes no room"
    await qemu.resume(folder)
    await counted(folder, above=at_copy + 1)
    copy = place.folder(f"{folder.path.name}-copy")
    try:
        await qemu.restore(copy, await place.machine(copy), kept, LIMITS, frozen=True)
        assert await qemu.is_paused(copy)
        assert not COUNT.search(copy.read_console())
        await qemu.resume(copy)
        assert (await counted(copy))[0] in (at_copy, at_copy + 1)
    finally:
        await qemu.kill(copy)
        copy.remove()


async def test_a_guest_is_told_of_a_disk_that_is_larger_than_when_it_was_saved(
    place: Place, template: Path, folder: VmFolder
) -> None:
    await place.qemu.restore(folder, await place.machine(folder, size=5 << 30), template, LIMITS)
    count, size = await counted(folder)
    while size == DISK // 512:
        count, size = await counted(folder, above=count)
    assert size == (5 << 30) // 512


async def test_a_machine_of_another_shape_is_no_clone(place: Place, template: Path, folder: VmFolder) -> None:
    larger = msgspec.structs.replace(await place.machine(folder), memory_mib=512)
    with pytest.raises(Conflict, match="another machine: then 256, now 512"):
        await place.qemu.restore(folder, larger, template, LIMITS)
    assert folder.read() is None


async def test_what_qemu_itself_refuses_to_restore_is_a_conflict_in_its_words(
    place: Place, template: Path, folder: VmFolder, tmp_path: Path
) -> None:
    """Its note says that it is whole, and still it is not what QEMU wrote."""
    note = msgspec.json.decode((template / "saved.json").read_bytes(), type=saved.SnapshotNote)
    shutil.copy(template / saved.MEMORY, tmp_path / "copy")
    broken = tmp_path / "broken"
    broken.mkdir()
    state = (template / saved.STATE).read_bytes()
    saved.write(
        broken,
        state=state[: len(state) // 2] + bytes(len(state) // 2),
        memory=tmp_path / "copy",
        mode=0o666,
        about=note.about,
        sizes=note.sizes,
    )
    with pytest.raises(Conflict, match="cannot be restored"):
        await place.qemu.restore(folder, await place.machine(folder), broken, LIMITS)


async def test_what_is_no_kernel_is_told_of_in_qemus_words(place: Place, folder: VmFolder, tmp_path: Path) -> None:
    nonsense = tmp_path / "vmlinuz"
    nonsense.write_text("nonsense")
    kernel = msgspec.structs.replace(place.kernel, vmlinuz=nonsense, vmlinux=nonsense)
    with pytest.raises(CreateFailed, match="the machine ended with code 1"):
        await place.qemu.boot(folder, Machine(kernel=kernel, drives=()), LIMITS)


async def test_an_overlay_from_elsewhere_is_no_drive(place: Place, folder: VmFolder) -> None:
    foreign = Drive(name="disk", path=str(place.path / "other.qcow2"), format="qcow2")
    with pytest.raises(InvalidSpec, match="was not made in"):
        await place.qemu.boot(folder, Machine(kernel=place.kernel, drives=(foreign,)), LIMITS)


async def test_a_disk_keeps_to_what_lay_below_it_when_it_was_made(
    place: Place, template: Path, folder: VmFolder
) -> None:
    """A machine that was taken over may write any path into its own overlay."""
    machine = await place.machine(folder)
    overlay = folder.file("disk.qcow2")
    overlay.write_bytes(overlay.read_bytes().replace(str(place.path / "blank").encode(), b"/etc/hostname"))
    await place.qemu.restore(folder, machine, template, LIMITS)
    assert (await counted(folder))[1] == DISK // 512
