"""The ledger as it is written: by many at once, by those who die, over rotations."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from skerry.config import LedgerSettings
from skerry.errors import LedgerError
from skerry.ledger.files import CURRENT, numbered
from skerry.ledger.ledger import BALLAST, OFF, Ledger
from skerry.ledger.line import MAX_LINE, NO_HASH, Line, unseal
from skerry.ledger.reading import read, read_head
from skerry.ledger.verify import verify

WRITER = """
import sys
from skerry.config import LedgerSettings
from skerry.ledger.ledger import Ledger
folder, name, count, max_bytes = sys.argv[1:]
ledger = Ledger(folder, LedgerSettings(max_bytes=int(max_bytes), keep=0))
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(count)):
    ledger.append("exec", name, number=number, text="x" * (number % 500))
"""
KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from skerry.config import LedgerSettings
from skerry.ledger.ledger import Ledger
from skerry.ledger.verify import verify

folder, settings = sys.argv[1], LedgerSettings(max_bytes=300_000, keep=2)
random.seed(7)
torn = 0
for round in range(1, int(sys.argv[2]) + 1):
    reads, writes = os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            ledger, number = Ledger(folder, settings), 0
            while True:
                number += 1
                ledger.append("exec", str(os.getpid()), number=number, text="x" * (number * 7919 % 9000))
                os.write(writes, b".")
        children.append(child)
    os.close(writes)
    os.read(reads, 1)
    time.sleep(random.random() / 1000)  # any moment is as good as any other
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(reads)
    if round % 20 == 0:
        Ledger(folder, settings).append("after", number=round)
        done = verify(Path(folder))
        assert done.is_whole, done
        torn += done.torn
print(torn)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state/ledger"


def lines(folder: Path) -> list[Line]:
    return list(read(folder))


def whole(folder: Path) -> None:
    assert verify(folder).problems == ()


def start(code: str, *args: object) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_line_has_its_place_its_writer_and_the_hash_of_the_one_before(folder: Path) -> None:
    ledger = Ledger(folder, tool="cli")
    assert ledger.append("create", "id", image="i") == 2
    assert ledger.append("end", "id", cause="user") == 3
    begin, create, end = lines(folder)
    assert (begin.kind, begin.seq, begin.prev, begin.facts) == ("begin", 1, NO_HASH, {"file": 1})
    assert (create.kind, create.sandbox, create.facts) == ("create", "id", {"image": "i"})
    assert (create.who.uid, create.who.tool, create.who.pid) == (os.getuid(), "cli", os.getpid())
    assert (create.prev, end.prev) == (begin.hash, create.hash)
    assert create.time <= end.time
    assert read_head(folder) == end.hash
    whole(folder)


def test_nobody_else_can_read_it(folder: Path) -> None:
    old = os.umask(0)
    try:
        Ledger(folder).append("create")
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in (CURRENT, BALLAST)} == {0o600}


def test_a_ledger_that_is_off_writes_nothing(tmp_path: Path) -> None:
    off = Ledger(tmp_path / "ledger", LedgerSettings(enabled=False))
    assert (off.append("create"), off.note("end"), OFF.append("create"), OFF.note("end")) == (0, 0, 0, 0)
    assert not (tmp_path / "ledger").exists()


def test_facts_of_any_size_and_any_letters_are_one_line(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.append("exec", argv=["\n", '"', "\udcff", "\u2028", "é"], path=Path("/p"))
    ledger.append("exec", text="x" * (4 * MAX_LINE), many=["word"] * 100_000)
    ledger.append("exec", **{f"{'k' * 2000}{number}": "v" for number in range(100)})
    _, odd, long, keys = lines(folder)
    assert odd.facts["argv"] == ["\n", '"', "\\udcff", "\u2028", "é"]
    assert odd.facts["path"] == "/p"
    assert long.facts["text"].endswith(f"({4 * MAX_LINE} characters)")
    assert long.facts["many"][-1] == "... (100000 in all)"
    assert keys.facts == {"left_out": "more than a line holds"}
    assert all(len(raw) <= MAX_LINE for raw in (folder / CURRENT).read_bytes().split(b"\n"))
    whole(folder)


def test_eight_programs_that_append_at_once_make_one_chain(folder: Path) -> None:
    programs = [start(WRITER, folder, f"p{number}", 300, 50_000) for number in range(8)]
    for program in programs:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
    for program in programs:
        program.communicate("go\n", timeout=60)
        assert program.returncode == 0
    found = lines(folder)
    for number in range(8):
        assert [line.facts["number"] for line in found if line.sandbox == f"p{number}"] == list(range(300))
    assert [line.seq for line in found] == list(range(1, len(found) + 1))
    assert len(numbered(folder)) > 3
    whole(folder)


def test_threads_and_forked_children_share_a_ledger(folder: Path) -> None:
    ledger = Ledger(folder)

    def work() -> None:
        for number in range(100):
            ledger.append("exec", str(os.getpid()), number=number)

    work()
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.waitpid(child, 0)
    assert Counter(line.sandbox for line in lines(folder)) == {None: 1, str(os.getpid()): 500, str(child): 100}
    whole(folder)


def test_a_forked_child_leaves_the_lines_that_are_behind_to_its_parent(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.append("first")

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                ledger.append("childs")
            finally:
                os._exit(0)
        os.waitpid(child, 0)

    async def work() -> None:
        ledger.note_soon("parents")
        fork()

    asyncio.run(work())
    assert [line.kind for line in lines(folder)] == ["begin", "first", "childs", "parents"]
    whole(folder)


def test_programs_that_are_killed_as_they_write_leave_a_whole_chain(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder), "400"], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [line.facts["number"] for line in lines(folder) if line.kind == "after"][-1] == 400
    whole(folder)


def test_every_place_at_which_a_write_can_break_off_is_told_and_is_no_tampering(folder: Path) -> None:
    ledger = Ledger(folder)
    ledger.append("first")
    before = (folder / CURRENT).read_bytes()
    ledger.append("broken", text="ü" * 10)
    after = (folder / CURRENT).read_bytes()
    for end in range(len(before) + 1, len(after) - 1):
        (folder / CURRENT).write_bytes(after[:end])
        assert not verify(folder).is_whole  # as long as nobody has told of it
        (Ledger(folder) if end % 2 else ledger).append("next")
        verified = verify(folder)
        assert (verified.problems, verified.torn) == ((), 1)
        assert [line.kind for line in lines(folder)] == ["begin", "first", "torn", "next"]
    (folder / CURRENT).write_bytes(after[:-1])  # a line without its newline is all there
    assert verify(folder).is_whole
    Ledger(folder).append("next")
    assert [line.kind for line in lines(folder)] == ["begin", "first", "broken", "next"]
    whole(folder)


def test_a_first_line_that_breaks_off_is_told_too(folder: Path) -> None:
    Ledger(folder).append("first")
    whole_file = (folder / CURRENT).read_bytes()
    for end in range(1, whole_file.index(b"\n")):
        (folder / CURRENT).write_bytes(whole_file[:end])
        Ledger(folder).append("next")
        assert [line.kind for line in lines(folder)] == ["torn", "begin", "next"]
        whole(folder)


def test_a_file_that_is_empty_is_begun_again(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / CURRENT).touch()
    Ledger(folder).append("next")
    assert [line.kind for line in lines(folder)] == ["begin", "next"]
    whole(folder)


def test_rotation_keeps_the_chain_and_the_files_that_are_to_be_kept(folder: Path) -> None:
    ledger = Ledger(folder, LedgerSettings(max_bytes=2000, keep=3))
    for number in range(100):
        ledger.append("exec", number=number)
        whole(folder)
    assert len(numbered(folder)) == 3
    verified = verify(folder)
    assert verified.first > 1
    assert verified.last == lines(folder)[-1].seq
    newest = max(numbered(folder)) + 1
    assert unseal((folder / CURRENT).read_bytes().partition(b"\n")[0]).facts == {"file": newest, "oldest": newest - 3}


def test_a_rotation_that_is_cut_short_at_any_step_is_gone_on_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    settings = LedgerSettings(max_bytes=2000, keep=0)
    for name in ("link", "rename", "write", "open"):
        for when in ("before", "after"):
            real, armed = getattr(os, name), [False]

            def act(*args: object, _real=real, _when=when, _armed=armed, **options: object) -> object:  # type: ignore[no-untyped-def]
                if _armed[0] and _when == "before":
                    raise Died
                done = _real(*args, **options)
                if _armed[0]:
                    raise Died
                return done

            ledger = Ledger(folder, settings)
            while (folder / CURRENT).stat().st_size < 2000 if (folder / CURRENT).exists() else True:
                ledger.append("exec")
            monkeypatch.setattr(os, name, act)
            armed[0] = True
            with pytest.raises(Died):
                ledger.append("exec")
            armed[0] = False
            monkeypatch.setattr(os, name, real)
            Ledger(folder, settings).append("exec")
            whole(folder)


def test_one_that_holds_it_for_ever_is_not_waited_for_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from skerry.ledger import files

    monkeypatch.setattr(files, "_LOCK_S", 0.05)
    ledger = Ledger(folder)
    ledger.append("first")
    with files._reading(str(folder / CURRENT)):
        with pytest.raises(LedgerError, match="another program has held it"):
            ledger.append("second")
        assert ledger.note("end", "kept") == 0
    ledger.append("third")
    assert [line.kind for line in lines(folder)] == ["begin", "first", "end", "third"]
    whole(folder)


def test_a_folder_that_is_removed_is_begun_anew(folder: Path) -> None:
    import shutil

    ledger = Ledger(folder)
    ledger.append("first")
    shutil.rmtree(folder)
    ledger.append("second")
    assert [line.kind for line in lines(folder)] == ["begin", "second"]


def test_an_end_that_was_damaged_stops_new_work_and_is_left_as_it_is(folder: Path) -> None:
    Ledger(folder).append("first")
    (folder / CURRENT).write_bytes(os.urandom(10 * MAX_LINE))
    before = (folder / CURRENT).read_bytes()
    ledger = Ledger(folder)
    with pytest.raises(LedgerError, match="damaged"):
        ledger.append("second")
    assert ledger.note("end") == 0
    assert (folder / CURRENT).read_bytes() == before


def test_no_link_is_followed(folder: Path, tmp_path: Path) -> None:
    folder.mkdir(parents=True)
    (folder / CURRENT).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LedgerError):
        Ledger(folder).append("first")
    assert not (tmp_path / "elsewhere").exists()


def test_a_long_last_line_of_another_program_is_gone_on_from(folder: Path) -> None:
    one, other = Ledger(folder), Ledger(folder)
    for number in range(3):
        one.append("short")
        other.append("long", text=f"{number}" * 400, more=["x" * 500] * 30)
    assert verify(folder).problems == ()
    assert [line.kind for line in lines(folder)] == ["begin", *["short", "long"] * 3]
