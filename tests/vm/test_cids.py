from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from skerry.errors import CreateFailed
from skerry.providers.machine import plan
from skerry.providers.machine.boxes import MachineMeta
from skerry.vm import launch
from skerry.vm.base import FIRST_CID


def owner(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_each_machine_has_a_number_of_its_own(tmp_path: Path) -> None:
    owners = [owner(tmp_path, f"vm{index}") for index in range(8)]
    with ThreadPoolExecutor() as threads:
        taken = list(threads.map(lambda each: launch.take_cid(each, folder=tmp_path / "cids"), owners))
    assert sorted(taken) == list(range(FIRST_CID, FIRST_CID + 8))


def test_a_number_that_was_given_back_is_given_out_again(tmp_path: Path) -> None:
    first, second = owner(tmp_path, "a"), owner(tmp_path, "b")
    cid = launch.take_cid(first, folder=tmp_path / "cids")
    launch.free_cid(cid, first, tmp_path / "cids")
    assert launch.take_cid(second, folder=tmp_path / "cids") == cid


def test_nobody_gives_anothers_number_back(tmp_path: Path) -> None:
    first, second = owner(tmp_path, "a"), owner(tmp_path, "b")
    cid = launch.take_cid(first, folder=tmp_path / "cids")
    launch.free_cid(cid, second, tmp_path / "cids")
    assert launch.take_cid(second, folder=tmp_path / "cids") != cid


def test_the_number_of_a_machine_that_is_gone_is_free(tmp_path: Path) -> None:
    gone = owner(tmp_path, "a")
    cid = launch.take_cid(gone, folder=tmp_path / "cids")
    gone.rmdir()
    assert launch.take_cid(owner(tmp_path, "b"), folder=tmp_path / "cids") == cid


def test_whoever_may_look_at_the_numbers_cannot_hold_them_up(tmp_path: Path) -> None:
    """The folder is readable for all, and so anybody could lock it."""
    numbers = tmp_path / "cids"
    launch.take_cid(tmp_path, folder=numbers)
    fd = os.open(numbers, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert launch.take_cid(tmp_path, folder=numbers) > FIRST_CID
    finally:
        os.close(fd)
    assert (numbers / ".lock").stat().st_mode & 0o777 == 0o600


def test_the_number_of_a_registry_is_the_machines_and_stays_so_when_it_starts_again(tmp_path: Path) -> None:
    machine, other, numbers = owner(tmp_path, "a"), owner(tmp_path, "b"), tmp_path / "cids"
    assert [launch.take_cid(machine, 70_000_000, numbers) for _ in range(2)] == [70_000_000] * 2
    with pytest.raises(CreateFailed, match="70000000 already"):
        launch.take_cid(other, 70_000_000, numbers)
    machine.rmdir()
    assert launch.take_cid(other, 70_000_000, numbers) == 70_000_000


@pytest.mark.parametrize(
    ("label", "cid"), [("70000000", 70_000_000), ("3", 3), ("2", None), ("4294967295", None), ("x", None), ("", None)]
)
def test_a_box_is_told_its_number_by_a_label(label: str, cid: int | None) -> None:
    meta = MachineMeta(created_at=0, image="", asked="", labels={"skerry.cid": label})
    assert plan.cid(meta) == cid
