"""Whatever is done to the files, `verify` finds it and says where."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.config import LedgerSettings
from skerry.ledger.files import CURRENT, name_of, numbered
from skerry.ledger.ledger import Ledger
from skerry.ledger.reading import read_head
from skerry.ledger.verify import verify

LINES = 40
KEPT: dict[str, bytes] = {}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A ledger of several files, as bytes by their names."""
    if not KEPT:
        folder = tmp_path_factory.mktemp("ledger")
        ledger = Ledger(folder, LedgerSettings(max_bytes=2500, keep=0))
        for number in range(LINES):
            ledger.append("exec", f"sandbox-{number % 3}", argv=["echo", str(number)])
        KEPT.update({path.name: path.read_bytes() for path in [*numbered(folder).values(), folder / CURRENT]})
        assert len(KEPT) > 3
    return KEPT


@pytest.fixture
def folder(files: dict[str, bytes], tmp_path: Path) -> Path:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    return tmp_path


class Copy:
    """A copy of the ledger for one example."""

    def __enter__(self) -> Path:
        self.folder = Path(tempfile.mkdtemp(prefix="skerry-ledger-"))
        for name, data in KEPT.items():
            (self.folder / name).write_bytes(data)
        return self.folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)


def rows(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def places(folder: Path) -> Iterator[tuple[Path, int]]:
    for path in [*numbered(folder).values(), folder / CURRENT]:
        for number in range(len(rows(path))):
            yield path, number


def is_last(folder: Path, path: Path, number: int) -> bool:
    return path.name == CURRENT and number == len(rows(path)) - 1


def test_one_that_nobody_touched_is_whole(folder: Path, files: dict[str, bytes]) -> None:
    done = verify(folder)
    assert (done.problems, done.files, done.first, done.torn) == ((), len(files), 1, 0)
    assert done.last == done.lines == LINES + len(files)
    assert done.head == read_head(folder)


def test_none_at_all_is_whole(tmp_path: Path) -> None:
    done = verify(tmp_path / "nothing")
    assert (done.problems, done.files, done.lines) == ((), 0, 0)


@given(data=st.data())
def test_any_byte_that_is_changed_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    with Copy() as folder:
        path = folder / data.draw(st.sampled_from(sorted(files)))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        done = verify(folder)
        assert path.name in {problem.file for problem in done.problems}


@given(data=st.data())
def test_any_line_that_is_removed_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    with Copy() as folder:
        head = read_head(folder)
        path, number = data.draw(st.sampled_from(list(places(folder))))
        was_last = is_last(folder, path, number)
        kept = rows(path)
        del kept[number]
        path.write_bytes(b"".join(kept))
        assert verify(folder).is_whole == was_last  # a cut end is seen by whoever kept the head
        assert not verify(folder, head).is_whole


@given(data=st.data())
def test_any_two_lines_that_change_places_are_found(files: dict[str, bytes], data: st.DataObject) -> None:
    with Copy() as folder:
        (first, a), (second, b) = data.draw(
            st.lists(st.sampled_from(list(places(folder))), min_size=2, max_size=2, unique=True)
        )
        one, other = rows(first)[a], rows(second)[b]
        for path, number, line in ((first, a, other), (second, b, one)):
            changed = rows(path)
            changed[number] = line
            path.write_bytes(b"".join(changed))
        assert not verify(folder).is_whole


@given(data=st.data())
def test_any_line_that_is_there_twice_is_found(files: dict[str, bytes], data: st.DataObject) -> None:
    with Copy() as folder:
        path, number = data.draw(st.sampled_from(list(places(folder))))
        target, place = data.draw(st.sampled_from(list(places(folder))))
        copied, changed = rows(path)[number], rows(target)
        changed.insert(place + data.draw(st.integers(0, 1)), copied)
        target.write_bytes(b"".join(changed))
        assert not verify(folder).is_whole


@given(data=st.data())
def test_any_cut_is_found_but_for_one_at_the_very_end(files: dict[str, bytes], data: st.DataObject) -> None:
    with Copy() as folder:
        head = read_head(folder)
        path = folder / data.draw(st.sampled_from(sorted(files)))
        content = path.read_bytes()
        cut = content[: data.draw(st.integers(0, len(content) - 1))]
        path.write_bytes(cut)
        only_newline = path.name == CURRENT and cut == content[:-1]
        at_end_of_line = cut.endswith(b"\n") or (cut and content[len(cut) :].startswith(b"\n"))
        clean_end = path.name == CURRENT and bool(at_end_of_line)
        assert verify(folder).is_whole == (clean_end or only_newline)
        assert verify(folder, head).is_whole == only_newline


@given(data=st.data())
def test_what_is_put_in_is_found_also_with_a_hash_of_its_own(files: dict[str, bytes], data: st.DataObject) -> None:
    with Copy() as folder, tempfile.TemporaryDirectory() as other:
        forger = Ledger(other)
        for number in range(data.draw(st.integers(1, LINES))):
            forger.append("exec", argv=["forged", str(number)])
        forged = rows(Path(other, CURRENT))[-1]
        path, number = data.draw(st.sampled_from(list(places(folder))))
        changed = rows(path)
        changed.insert(number, forged)
        path.write_bytes(b"".join(changed))
        assert not verify(folder).is_whole


def test_a_problem_is_told_with_its_file_and_line(folder: Path) -> None:
    path = folder / name_of(2)
    changed = rows(path)
    changed[2] = changed[2].replace(b"echo", b"rm -")
    path.write_bytes(b"".join(changed))
    (problem,) = verify(folder).problems
    assert (problem.file, problem.line) == (name_of(2), 3)
    assert "changed" in problem.what


def test_a_line_that_is_missing_is_told_by_its_number(folder: Path) -> None:
    path = folder / name_of(1)
    changed = rows(path)
    del changed[3]
    path.write_bytes(b"".join(changed))
    (problem,) = verify(folder).problems
    assert (problem.file, problem.line, problem.what) == (name_of(1), 4, "line 4 is missing before it")


def test_a_file_that_is_missing_in_the_middle_is_told(folder: Path) -> None:
    (folder / name_of(2)).unlink()
    told = {(problem.file, problem.line) for problem in verify(folder).problems}
    assert (name_of(2), 0) in told


def test_an_oldest_file_that_rotation_did_not_remove_is_told(folder: Path) -> None:
    (folder / name_of(1)).unlink()
    (problem,) = verify(folder).problems
    assert (problem.file, problem.line) == (name_of(1), 0)
    assert "no rotation" in problem.what


def test_oldest_files_that_rotation_removed_are_not_missed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, LedgerSettings(max_bytes=1000, keep=2))
    for _ in range(30):
        ledger.append("exec")
    assert min(numbered(tmp_path)) > 1
    assert verify(tmp_path).is_whole
    numbered(tmp_path)[min(numbered(tmp_path))].unlink()
    assert not verify(tmp_path).is_whole


def test_a_newest_file_that_was_removed_is_told_before_and_after_the_next_line(folder: Path) -> None:
    (folder / CURRENT).unlink()
    assert not verify(folder).is_whole
    Ledger(folder).append("next")
    (problem,) = verify(folder).problems
    assert (problem.file, problem.line) == (CURRENT, 1)


def test_a_damaged_last_line_is_no_torn_one_even_if_the_next_line_closes_it_off(folder: Path) -> None:
    changed = rows(folder / CURRENT)
    changed[-1] = changed[-1].replace(b"echo", b"rm -")
    (folder / CURRENT).write_bytes(b"".join(changed))
    Ledger(folder).append("next")
    assert not verify(folder).is_whole


def test_an_unfinished_line_that_is_removed_is_missed_by_the_one_that_tells_of_it(folder: Path) -> None:
    with (folder / CURRENT).open("ab") as file:
        file.write(b'{"seq":')
    Ledger(folder).append("next")
    assert verify(folder).is_whole
    kept = [row for row in rows(folder / CURRENT) if row != b'{"seq":\n']
    (folder / CURRENT).write_bytes(b"".join(kept))
    (problem,) = verify(folder).problems
    assert (problem.file, problem.line) == (CURRENT, len(kept) - 1)


def test_a_head_that_was_kept_is_there_for_as_long_as_all_is(folder: Path) -> None:
    head = read_head(folder)
    Ledger(folder).append("next")
    assert verify(folder, head).is_whole
    assert "hash" in verify(folder, "f" * 64).problems[-1].what


def test_a_ledger_that_was_written_anew_is_found_by_the_head(folder: Path) -> None:
    head = read_head(folder)
    for path in [*numbered(folder).values(), folder / CURRENT]:
        path.unlink()
    ledger = Ledger(folder)
    for number in range(2 * LINES):
        ledger.append("exec", argv=["echo", str(number)])
    assert verify(folder).is_whole
    assert not verify(folder, head).is_whole
