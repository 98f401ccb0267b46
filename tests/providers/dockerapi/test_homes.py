"""Disks of boxes that cannot be made, and folders that are none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.host import sparse
from skerry.model.spec import new_id
from skerry.providers.dockerapi.homes import Homes


def test_a_disk_is_copied_to_another_file_system_with_its_holes(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own here")
        source, target = Path(elsewhere, "source"), tmp_path / "target"
        with source.open("wb") as file:
            for at in (0, 1 << 20, 5 << 20):
                file.seek(at)
                file.write(b"%d" % at * 1000)
            file.truncate(64 << 20)
        sparse.copy(source, target)
        assert target.read_bytes() == source.read_bytes()
        assert target.stat().st_blocks * 512 < 1 << 20


def test_a_folder_that_cannot_be_made_is_told_as_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProviderError, match="Not a directory"):
        Homes(tmp_path / "file", tmp_path).reserve(new_id(), {})


def test_what_only_looks_like_a_box_is_none(tmp_path: Path) -> None:
    (tmp_path / "a-b-c-d-e").mkdir()
    assert Homes(tmp_path, tmp_path).all() == {}
