from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from skerry.errors import Conflict, ProviderError
from skerry.vm.qemu import saved
from skerry.vm.qemu.saved import About

ABOUT = About(version="7.2", cpu="some", shape=["-machine", "pc"])
SIZE = 4 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    memory = tmp_path / "memory"
    memory.write_bytes(os.urandom(SIZE))
    folder = tmp_path / "saved"
    folder.mkdir()
    saved.write(folder, state=b"state", memory=memory, mode=0o444, about=ABOUT, sizes={"disk": 5})
    assert not memory.exists()
    return folder


def test_what_was_saved_is_read(folder: Path) -> None:
    note, state = saved.read(folder, ABOUT)
    assert (state, note.sizes, note.memory_size) == (b"state", {"disk": 5}, SIZE)
    assert (folder / saved.MEMORY).stat().st_mode & 0o777 == 0o444


def _change(name: str, at: int, *, size: int | None = None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.chmod(0o600)
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
            if size is not None:
                file.truncate(size)

    return change


def _flip_and_set_the_time_back(at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        before = (folder / saved.MEMORY).stat()
        _change(saved.MEMORY, at)(folder)
        os.utime(folder / saved.MEMORY, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_change(saved.STATE, 2), "its state is damaged"),
        (_change(saved.MEMORY, SIZE // 2), "its memory was changed"),
        (_change(saved.MEMORY, 0, size=SIZE - 1), "its memory has another size"),
        (_flip_and_set_the_time_back(5), "its memory is damaged"),
        (_flip_and_set_the_time_back(SIZE - 1), "its memory is damaged"),
        (lambda folder: (folder / saved.MEMORY).unlink(), "no whole machine"),
        (lambda folder: (folder / saved.STATE).unlink(), "no whole machine"),
        (lambda folder: (folder / "saved.json").unlink(), "no whole machine"),
        (lambda folder: (folder / "saved.json").write_text("{}"), "no whole machine"),
        (_change(saved.MEMORY, 0, size=0), "its memory has another size"),
    ],
)
def test_what_is_damaged_is_not_restored(folder: Path, damage: Callable[[Path], None], reason: str) -> None:
    damage(folder)
    with pytest.raises(Conflict, match=reason):
        saved.read(folder, ABOUT)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (msgspec.structs.replace(ABOUT, version="8.2"), "saved by QEMU 7.2, and this is 8.2"),
        (msgspec.structs.replace(ABOUT, cpu="other"), "saved on some, and this is other"),
        (msgspec.structs.replace(ABOUT, shape=["-machine", "q35"]), "another machine: then pc, now q35"),
        (msgspec.structs.replace(ABOUT, shape=["pc", "-machine"]), "in another order"),
    ],
)
def test_what_does_not_fit_this_host_is_not_restored(folder: Path, now: About, reason: str) -> None:
    with pytest.raises(Conflict, match=reason):
        saved.read(folder, now)


def test_a_link_is_not_taken_for_a_machines_memory(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (tmp_path / "memory").symlink_to(secret)
    with pytest.raises(ProviderError, match="is not the memory"):
        saved.write(tmp_path, state=b"", memory=tmp_path / "memory", mode=0o666, about=ABOUT, sizes={})
    assert secret.stat().st_mode & 0o777 != 0o666
