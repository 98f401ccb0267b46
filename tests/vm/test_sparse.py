"""Copies of large files with little in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.host import sparse

_MIB = 1 << 20


def _with_holes(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"begin")
        file.seek(64 * _MIB)
        file.write(b"middle")
        file.truncate(128 * _MIB)


def test_a_copy_is_equal_and_takes_no_more_room(tmp_path: Path) -> None:
    _with_holes(tmp_path / "old")
    sparse.copy(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").stat().st_size == 128 * _MIB
    assert (tmp_path / "new").stat().st_blocks <= (tmp_path / "old").stat().st_blocks + 16
    with (tmp_path / "new").open("rb") as file:
        assert file.read(8) == b"begin\0\0\0"
        file.seek(64 * _MIB)
        assert file.read(8) == b"middle\0\0"


def test_the_copy_and_the_source_go_their_own_ways(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    sparse.copy(tmp_path / "old", tmp_path / "new")
    (tmp_path / "new").write_bytes(b"new")
    assert (tmp_path / "old").read_bytes() == b"old"


def test_an_empty_file_has_an_empty_copy(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    sparse.copy(tmp_path / "old", tmp_path / "new")
    assert (tmp_path / "new").stat().st_size == 0


def test_what_is_there_is_not_overwritten_nor_a_link_followed(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"old")
    (tmp_path / "ours").write_bytes(b"ours")
    os.symlink(tmp_path / "ours", tmp_path / "link")
    for target in ("ours", "link"):
        with pytest.raises(FileExistsError):
            sparse.copy(tmp_path / "old", tmp_path / target)
    assert (tmp_path / "ours").read_bytes() == b"ours"


def test_zeros_become_holes_and_nothing_else_changes(tmp_path: Path) -> None:
    block, zeros = b"\1" * 4096, bytes(4096)
    data = block + 3 * zeros + block + bytes(3 * _MIB) + block + 2 * zeros + bytes(99) + b"end" + bytes(50)
    path = tmp_path / "file"
    path.write_bytes(data)
    sparse.punch(path)
    assert path.read_bytes() == data
    assert path.stat().st_blocks * 512 <= 8 * 4096
    sparse.punch(path)
    assert path.read_bytes() == data


def test_no_link_is_followed_to_what_gets_holes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    with pytest.raises(OSError, match="symbolic"):
        sparse.punch(tmp_path / "link")
