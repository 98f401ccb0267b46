"""What a process that is not trusted left to be kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skerry.errors import ProviderError
from skerry.vm.firecracker import snapshot_note
from skerry.vm.firecracker.snapshot_note import NEW_MEMORY, NEW_STATE, MachineNote

NOTE = MachineNote(version="1.0.0", memory_mib=1, vcpus=1, drives={}, home=".")


@pytest.fixture
def left(tmp_path: Path) -> Path:
    (tmp_path / "into").mkdir()
    (tmp_path / NEW_STATE).write_bytes(b"state")
    (tmp_path / NEW_MEMORY).write_bytes(bytes(1 << 20))
    return tmp_path


def test_two_plain_files_are_kept(left: Path) -> None:
    snapshot_note.keep(NOTE, left, left / "into")
    assert (left / "into" / snapshot_note.STATE).read_bytes() == b"state"


@pytest.mark.parametrize("name", [NEW_STATE, NEW_MEMORY])
def test_a_file_of_any_length_is_not_taken_into_memory_or_kept(left: Path, name: str) -> None:
    os.truncate(left / name, 1 << 36)
    with pytest.raises(ProviderError, match="more than a machine has"):
        snapshot_note.keep(NOTE, left, left / "into")


@pytest.mark.parametrize("name", [NEW_STATE, NEW_MEMORY])
def test_another_name_of_a_file_of_ours_is_neither_taken_nor_opened_to_all(left: Path, name: str) -> None:
    secret = left / "secret"
    secret.write_bytes(b"secret")
    secret.chmod(0o600)
    (left / name).unlink()
    os.link(secret, left / name)
    with pytest.raises(ProviderError, match="of its own"):
        snapshot_note.keep(NOTE, left, left / "into")
    assert secret.stat().st_mode & 0o777 == 0o600
