"""A disk on which nothing more fits: new work stops, ends are told all the same."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skerry.config import LedgerSettings
from skerry.errors import LedgerError, LedgerFull
from skerry.ledger.files import CURRENT
from skerry.ledger.ledger import BALLAST, Ledger
from skerry.ledger.reading import read
from skerry.ledger.verify import verify

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
GO_ON = LedgerSettings(when_full="go-on")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    waste = disk / "waste"
    with waste.open("ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue
    return waste


def kinds(folder: Path) -> list[str]:
    return [line.kind for line in read(folder)]


def full(ledger: Ledger) -> None:
    """Until there is no room at all, not even in the last block of a file."""

    def append_much() -> None:
        for _ in range(1000):
            ledger.append("filling", text="x" * 400)

    with pytest.raises(LedgerFull) as caught:
        append_much()
    assert (caught.value.code, caught.value.retryable) == ("ledger_full", True)
    assert "free some" in str(caught.value)


@needs_root
def test_new_work_stops_and_ends_are_told_by_the_room_that_was_kept(disk: Path) -> None:
    folder = disk / "ledger"
    ledger = Ledger(folder)
    ledger.append("create", "a")
    waste = fill(disk)
    full(ledger)
    assert (folder / BALLAST).exists()
    for number in range(200):
        assert ledger.note("end", "a", number=number) > 0
    assert not (folder / BALLAST).exists()
    full(ledger)
    full(Ledger(folder))  # another program is told the same
    assert verify(folder).is_whole
    waste.unlink()
    ledger.append("create", "b")
    assert (folder / BALLAST).exists()
    found = list(read(folder))
    assert [line.facts["number"] for line in found if line.kind == "end"] == list(range(200))
    assert found[-1].sandbox == "b"
    assert verify(folder).is_whole


@needs_root
def test_what_does_not_fit_even_then_is_kept_and_comes_before_the_next_line(disk: Path) -> None:
    folder = disk / "ledger"
    ledger = Ledger(folder)
    ledger.append("create", "a")
    waste = fill(disk)
    full(ledger)
    (folder / BALLAST).unlink()
    fill(disk)
    full(ledger)
    numbers = [ledger.note("end", "a", number=number) for number in range(20)]
    assert numbers[-1] == 0
    waste.unlink()
    ledger.append("create", "b")
    found = list(read(folder))
    assert [line.facts["number"] for line in found if line.kind == "end"] == list(range(20))
    assert found[-1].kind == "create"
    assert verify(folder).is_whole


@needs_root
def test_one_that_is_to_go_on_counts_what_it_lost(disk: Path) -> None:
    folder = disk / "ledger"
    ledger = Ledger(folder, GO_ON)
    ledger.append("create", "a")
    waste = fill(disk)
    lost = 0
    while lost < 5:
        lost += ledger.append("exec", "a", text="x" * 400) == 0
    waste.unlink()
    ledger.append("create", "b")
    *_, gap, create = read(folder)
    assert (gap.kind, gap.facts, create.kind) == ("gap", {"lines": 5}, "create")
    assert verify(folder).is_whole


@needs_root
def test_a_full_disk_that_is_to_be_rotated_on_keeps_the_chain(disk: Path) -> None:
    folder = disk / "ledger"
    ledger = Ledger(folder, LedgerSettings(max_bytes=2000, keep=0))
    ledger.append("create", "a")
    waste = fill(disk)
    full(ledger)
    for number in range(50):
        ledger.note("end", "a", number=number)
    waste.unlink()
    for _ in range(20):
        ledger.append("create", "b")
    assert [line.facts["number"] for line in read(folder) if line.kind == "end"] == list(range(50))
    assert verify(folder).is_whole


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("create", "a")
    size = (tmp_path / CURRENT).stat().st_size
    for more in (0, 1, 100):
        with largest_file(size + more), pytest.raises(LedgerFull):
            ledger.append("exec", "a", text="x" * 300)
        assert (tmp_path / CURRENT).stat().st_size == size
    ledger.append("exec", "a")
    assert kinds(tmp_path) == ["begin", "create", "exec"]
    assert verify(tmp_path).is_whole


def test_more_ends_than_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skerry.ledger import ledger as module

    monkeypatch.setattr(module, "_MAX_BEHIND", 3)
    ledger = Ledger(tmp_path)
    ledger.append("create", "a")
    with largest_file((tmp_path / CURRENT).stat().st_size):
        for number in range(5):
            assert ledger.note("end", "a", number=number) == 0
    ledger.note("end", "a", number=5)
    assert kinds(tmp_path) == ["begin", "create", "end", "end", "gap", "end", "end"]
    assert verify(tmp_path).is_whole


def test_a_folder_that_cannot_be_written_stops_new_work_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("a file")
    with pytest.raises(LedgerError, match="cannot be written") as caught:
        Ledger(tmp_path / "ledger").append("create")
    assert caught.value.code == "ledger_error"
    assert Ledger(tmp_path / "ledger", GO_ON).append("create") == 0
    assert Ledger(tmp_path / "ledger").note("end") == 0
