"""Folders that several programs make, hold and sweep at the same time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from skerry.host import folders, locks


def test_a_sweep_removes_what_nobody_holds_and_nothing_else(tmp_path: Path) -> None:
    abandoned, other = tmp_path / ".new-dead", tmp_path / "kept"
    (abandoned / "deep/below").mkdir(parents=True)
    other.mkdir()
    (tmp_path / ".new-link").symlink_to(other)
    with folders.scratch(tmp_path, ".new-") as held:
        folders.sweep(tmp_path, ".new-")
        assert held.is_dir()
        assert not abandoned.exists()
    assert sorted(os.listdir(tmp_path)) == [".new-link", "kept"]


def test_a_sweep_spares_what_is_young_where_it_is_asked_to(tmp_path: Path) -> None:
    young, old = tmp_path / ".new-young", tmp_path / ".new-old"
    young.mkdir()
    old.mkdir()
    os.utime(old, (0, 0))
    folders.sweep(tmp_path, ".new-", 60)
    assert os.listdir(tmp_path) == [young.name]


def test_nobody_loses_a_folder_to_sweeps_that_come_while_it_is_made(tmp_path: Path) -> None:
    def work(_: int) -> bool:
        folders.sweep(tmp_path, ".new-")
        with folders.scratch(tmp_path, ".new-") as held:
            (held / "file").write_text("x")
            folders.sweep(tmp_path, ".new-")
            return (held / "file").read_text() == "x"

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(100)))
    assert os.listdir(tmp_path) == []


def test_a_lock_on_what_was_replaced_is_noticed(tmp_path: Path) -> None:
    folder = tmp_path / "box"
    folder.mkdir()
    fd = locks.open_folder(folder)
    try:
        assert locks.is_in_place(fd, folder)
        folder.rename(tmp_path / "gone")
        assert not locks.is_in_place(fd, folder)
        folder.mkdir()
        assert not locks.is_in_place(fd, folder)
    finally:
        os.close(fd)
