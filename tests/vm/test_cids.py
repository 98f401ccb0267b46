from __future__ import annotations

import fcntl
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skerry.vm import cids
from skerry.vm.base import FIRST_CID


def owner(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_each_machine_has_a_number_of_its_own(tmp_path: Path) -> None:
    owners = [owner(tmp_path, f"vm{index}") for index in range(8)]
    with ThreadPoolExecutor() as threads:
        taken = list(threads.map(lambda each: cids.take(each, tmp_path / "cids"), owners))
    assert sorted(taken) == list(range(FIRST_CID, FIRST_CID + 8))


def test_a_number_that_was_given_back_is_given_out_again(tmp_path: Path) -> None:
    first, second = owner(tmp_path, "a"), owner(tmp_path, "b")
    cid = cids.take(first, tmp_path / "cids")
    cids.free(cid, first, tmp_path / "cids")
    assert cids.take(second, tmp_path / "cids") == cid


def test_nobody_gives_anothers_number_back(tmp_path: Path) -> None:
    first, second = owner(tmp_path, "a"), owner(tmp_path, "b")
    cid = cids.take(first, tmp_path / "cids")
    cids.free(cid, second, tmp_path / "cids")
    assert cids.take(second, tmp_path / "cids") != cid


def test_the_number_of_a_machine_that_is_gone_is_free(tmp_path: Path) -> None:
    gone = owner(tmp_path, "a")
    cid = cids.take(gone, tmp_path / "cids")
    gone.rmdir()
    assert cids.take(owner(tmp_path, "b"), tmp_path / "cids") == cid


def test_whoever_may_look_at_the_numbers_cannot_hold_them_up(tmp_path: Path) -> None:
    """The folder is readable for all, and so anybody could lock it."""
    numbers = tmp_path / "cids"
    cids.take(tmp_path, numbers)
    fd = os.open(numbers, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert cids.take(tmp_path, numbers) > FIRST_CID
    finally:
        os.close(fd)
    assert (numbers / ".lock").stat().st_mode & 0o777 == 0o600
