"""Memory in files is used only as it was kept, and only by whose it is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from skerry.errors import Conflict, InvalidSpec
from skerry.model.spec import new_id
from skerry.providers.machine import memory
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.machine.memory import Started
from skerry.vm.base import Drive, Kernel, Machine, MachineLimits
from skerry.vm.folder import VmFolder
from skerry.vm.guest import Preparation

BOX = new_id()


class Copier:
    """In place of a hypervisor: it writes a memory with holes, and a state."""

    async def copy_memory(self, folder: VmFolder, into: Path) -> None:
        with open(into / "memory", "wb") as file:
            file.truncate(4 << 20)
            for at in (0, 8192, 70_000, 3 << 20):
                file.seek(at)
                file.write(b"content")
        (into / "state").write_bytes(b"state")


def started(tmp_path: Path, **changes: Any) -> Started:
    kernel = Kernel(key="k", version="6", own=True, vmlinuz=tmp_path, vmlinux=tmp_path, initrd=tmp_path)
    (tmp_path / "root.ext4").touch()
    drives = (Drive(name="root", path=str(tmp_path / "root.ext4"), read_only=True), Drive(name="disk", path="disk"))
    return Started(
        machine=Machine(kernel=kernel, drives=drives, memory_mib=changes.pop("memory_mib", 256), cid=7),
        limits=MachineLimits(memory=1 << 30, cpus=1),
        disk=changes.pop("disk", 1 << 20),
        prepared=Preparation(home="/home/user", cwd="/home/user", env={"PATH": "/bin"}, **changes),
    )


@pytest.fixture
async def kept(tmp_path: Path) -> Path:
    folder = tmp_path / "kept"
    folder.mkdir()
    await memory.keep(Copier(), VmFolder(tmp_path), folder, BOX, started(tmp_path))  # type: ignore[arg-type]
    return folder


async def test_what_was_kept_is_read(kept: Path, tmp_path: Path) -> None:
    found = memory.read(kept, BOX)
    assert found.started.machine == started(tmp_path).machine
    found.started.refuse_others(started(tmp_path))
    assert set(found.files) == {"memory", "state"}
    await memory._check(kept, found)


async def test_a_copy_is_as_good_whether_it_has_holes_or_not(kept: Path, tmp_path: Path) -> None:
    for sparse in ("always", "never"):
        copy = tmp_path / sparse
        copying = await asyncio.create_subprocess_exec("cp", "-r", f"--sparse={sparse}", kept, copy)
        assert await copying.wait() == 0
        await memory._check(copy, memory.read(copy, BOX))


@pytest.mark.parametrize("at", [0, 8193, 65_536 + 4096, (3 << 20) + 3, (4 << 20) - 1])
async def test_a_changed_byte_is_found_wherever_it_is(kept: Path, at: int) -> None:
    with open(kept / "memory", "r+b") as file:
        file.seek(at)
        file.write(b"X")
    with pytest.raises(Conflict, match="damaged: memory"):
        await memory._check(kept, memory.read(kept))


async def test_files_that_are_cut_gone_or_too_many_are_found(kept: Path) -> None:
    note = memory.read(kept)
    os.truncate(kept / "state", 2)
    with pytest.raises(Conflict, match="damaged: state"):
        await memory._check(kept, note)
    (kept / "memory").unlink()
    (kept / "more").touch()
    with pytest.raises(Conflict, match="memory, more, state"):
        await memory._check(kept, note)


async def test_anothers_memory_one_without_a_note_and_one_without_its_image_are_refused(
    kept: Path, tmp_path: Path
) -> None:
    with pytest.raises(Conflict, match=f"another box, {BOX}"):
        memory.read(kept, new_id())
    (tmp_path / "root.ext4").unlink()
    with pytest.raises(Conflict, match=r"root\.ext4, which is gone"):
        memory.read(kept)
    (kept / "kept.json").write_bytes(b'{"box": "x"}')
    with pytest.raises(Conflict, match="no whole memory"):
        memory.read(kept)


@pytest.mark.parametrize("change", [{"memory_mib": 512}, {"disk": 2 << 20}, {"user": "root"}, {"pids": 9}])
async def test_what_runs_is_given_nothing_else(kept: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match=next(iter(change)).removesuffix("_mib")):
        memory.read(kept).started.refuse_others(started(tmp_path, **change))


async def test_a_lifetime_is_no_other_machine(kept: Path, tmp_path: Path) -> None:
    before = memory.read(kept).started
    before.refuse_others(started(tmp_path, lifetime_s=3.0, idle_s=9.0))
    own = Drive(name="disk", path="other")
    assert before.with_drives(own).drives == (before.machine.drives[0], own)


async def test_a_box_sleeps_once_all_is_in_its_place_and_no_longer_than_that(tmp_path: Path) -> None:
    box = MachineBox(tmp_path, new_id())
    box.make()

    def fall_asleep(name: str) -> None:
        with box.falling_asleep() as folder:
            (folder / "half").touch()
            (folder / name).touch()
            assert not box.is_asleep()

    with pytest.raises(FileNotFoundError):
        fall_asleep("no/room")
    assert not box.is_asleep()
    assert list(box.path.iterdir()) == []
    fall_asleep("whole")
    assert box.is_asleep()
    box.wake_up()
    assert not box.is_asleep()
    box.clear_memory()
    assert list(box.path.iterdir()) == []
