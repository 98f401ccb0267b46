"""Volumes have one user at a time, outlive it, and are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.errors import Conflict, NotFound
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.providers.machine.boxes import MachineBox, MachineMeta
from skerry.providers.machine.volumes import DiskVolumes
from skerry.providers.shared import volume_plan
from skerry.providers.shared.volume_plan import Wanted

MIB = 1 << 20


@pytest.fixture
def blank(tmp_path: Path) -> Path:
    blank = tmp_path / "blank"
    with open(blank, "wb") as file:
        file.write(b"blank")
        file.truncate(8 * MIB)
    return blank


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def volumes(state: Path) -> DiskVolumes:
    return DiskVolumes(state)


def wanted(id: SandboxId, name: str | None = None) -> Wanted:
    (found,) = volume_plan.wanted("qemu", id, Spec(name=name))
    return found


def make_box(state: Path, volumes: DiskVolumes, volume: str, id: SandboxId | None = None) -> MachineBox:
    box = MachineBox(state, id or new_id())
    box.make()
    with volumes.claiming(volume, box.id):
        box.write_meta(MachineMeta(created_at=0, image="i", asked="minimal", volume=volume))
    return box


async def test_a_volume_begins_blank_and_keeps_what_is_written(volumes: DiskVolumes, blank: Path) -> None:
    want = wanted(new_id(), "work")
    disk = await volumes.make(want, blank)
    assert (disk.stat().st_size, disk.read_bytes()[:5]) == (8 * MIB, b"blank")
    disk.chmod(0o600)
    with open(disk, "r+b") as file:
        file.write(b"mine!")
    assert (await volumes.make(want, blank)).read_bytes()[:5] == b"mine!"
    (volume,) = volumes.all()
    assert (volume.kind, volume.label, volume.in_use) == ("data", "work", False)
    assert volume.size is not None
    assert volume.size < MIB, "it takes the room of what is in it"


async def test_a_copy_that_was_cut_short_is_begun_anew(volumes: DiskVolumes, blank: Path) -> None:
    want = wanted(new_id())
    disk = await volumes.make(want, blank)
    disk.rename(disk.with_suffix(".new"))
    assert (await volumes.make(want, blank)).read_bytes()[:5] == b"blank"
    assert not disk.with_suffix(".new").exists()


async def test_a_volume_has_one_user_at_a_time(volumes: DiskVolumes, blank: Path, state: Path) -> None:
    name = wanted(new_id(), "work").name
    await volumes.make(wanted(new_id(), "work"), blank)
    box = make_box(state, volumes, name)
    with pytest.raises(Conflict, match=box.id), volumes.claiming(name, new_id()):
        pytest.fail("two boxes had one disk")
    with volumes.claiming(name, box.id):
        """Its own box may start again."""
    with pytest.raises(Conflict, match=box.id):
        volumes.remove(name)
    await box.remove()
    make_box(state, volumes, name)


async def test_data_goes_with_a_box_that_is_gone_by_name_or_by_label(volumes: DiskVolumes, blank: Path) -> None:
    unnamed, named = new_id(), new_id()
    await volumes.make(wanted(unnamed), blank)
    await volumes.make(wanted(named, "work"), blank)
    volumes.drop_data_of(unnamed, None)
    assert [volume.label for volume in volumes.all()] == ["work"]
    volumes.drop_data_of(new_id(), wanted(named, "work").name)
    assert volumes.all() == []
    volumes.drop_data_of(unnamed, None)


async def test_data_that_another_box_has_by_now_is_not_dropped(volumes: DiskVolumes, blank: Path, state: Path) -> None:
    first = new_id()
    want = wanted(first, "work")
    await volumes.make(want, blank)
    make_box(state, volumes, want.name)
    volumes.drop_data_of(first, want.name)
    assert [volume.in_use for volume in volumes.all()] == [True]


def test_what_is_not_there_is_not_found(volumes: DiskVolumes) -> None:
    assert volumes.all() == []
    with pytest.raises(NotFound):
        volumes.remove("none")
