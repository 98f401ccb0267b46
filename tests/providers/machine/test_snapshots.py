"""Snapshots are whole or not there, and are not used if they are not what was taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import Conflict, NotFound, ProviderError
from skerry.model.spec import new_id
from skerry.providers.machine.boxes import MachineBox, MachineMeta
from skerry.providers.machine.snapshots import DiskSnapshots, checksum

MIB = 1 << 20
META = MachineMeta(created_at=0, image="sha256:i", asked="minimal")


@pytest.fixture
def box(tmp_path: Path) -> MachineBox:
    return MachineBox(tmp_path, new_id())


@pytest.fixture
def snapshots(tmp_path: Path) -> DiskSnapshots:
    return DiskSnapshots(tmp_path)


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "snapshots").iterdir() if path.name != ".locks")


async def a_disk(target: Path) -> None:
    with open(target, "wb") as file:
        file.truncate(64 * MIB)
        file.seek(5 * MIB)
        file.write(b"content" * 1000)


async def test_what_was_taken_is_found_by_its_name(snapshots: DiskSnapshots, box: MachineBox) -> None:
    taken = await snapshots.take(box, META, "first", a_disk)
    assert (taken.name, taken.sandbox) == ("first", box.id)
    assert taken.size < MIB
    assert snapshots.all() == [taken]
    found = snapshots.get("first")
    assert (found.image, found.asked, found.writable_root) == ("sha256:i", "minimal", False)
    with open(await snapshots.disk(found), "rb") as file:
        file.seek(5 * MIB)
        assert file.read(7) == b"content"


async def test_a_name_is_given_once(snapshots: DiskSnapshots, box: MachineBox, tmp_path: Path) -> None:
    await snapshots.take(box, META, "first", a_disk)

    async def taken_meanwhile(target: Path) -> None:
        await a_disk(target)
        await snapshots.take(box, META, "second", a_disk)

    for name, copy in (("first", a_disk), ("second", taken_meanwhile)):
        with pytest.raises(Conflict, match=name):
            await snapshots.take(box, META, name, copy)
    assert left(tmp_path) == ["first", "second"]


async def test_a_copy_that_fails_leaves_nothing(snapshots: DiskSnapshots, box: MachineBox, tmp_path: Path) -> None:
    async def fail(target: Path) -> None:
        await a_disk(target)
        raise ProviderError("no room")

    with pytest.raises(ProviderError, match="no room"):
        await snapshots.take(box, META, "first", fail)
    assert left(tmp_path) == []


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
async def test_a_damaged_one_is_refused_and_can_be_removed(
    snapshots: DiskSnapshots, box: MachineBox, damage: str
) -> None:
    await snapshots.take(box, META, "first", a_disk)
    disk = await snapshots.disk(snapshots.get("first"))
    if damage == "changed":
        before = disk.stat()
        with open(disk, "r+b") as file:
            file.seek(5 * MIB + 3)
            file.write(b"x")
        os.utime(disk, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif damage == "cut":
        os.truncate(disk, 6 * MIB)
    else:
        disk.unlink()
    with pytest.raises(ProviderError, match="damaged"):
        await snapshots.disk(snapshots.get("first"))
    snapshots.remove("first")
    assert snapshots.all() == []


async def test_one_that_a_box_is_made_of_stays(snapshots: DiskSnapshots, tmp_path: Path) -> None:
    box = MachineBox(tmp_path, new_id())
    await snapshots.take(box, META, "first", a_disk)
    box.make()
    box.write_meta(MachineMeta(created_at=0, image="i", asked="minimal", snapshot="first"))
    with pytest.raises(Conflict, match=box.id):
        snapshots.remove("first")
    await box.remove()
    snapshots.remove("first")
    with pytest.raises(NotFound):
        snapshots.remove("first")


def test_the_checksum_is_of_what_is_held_not_of_how(tmp_path: Path) -> None:
    sparse, dense, other = (tmp_path / name for name in ("sparse", "dense", "other"))
    with open(sparse, "wb") as file:
        file.truncate(10 * MIB)
        file.seek(3 * MIB + 100)
        file.write(b"x")
    dense.write_bytes(sparse.read_bytes())
    other.write_bytes(dense.read_bytes()[:-1] + b"y")
    assert checksum(sparse) == checksum(dense) != checksum(other)
