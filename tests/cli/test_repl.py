"""`skerry repl`: an interpreter on a terminal, or code from a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skerry.cli.repl import needs_more

from .conftest import Run
from .screen import Screen

pytestmark = [pytest.mark.usefixtures("boxes"), pytest.mark.timeout(120)]

_PICTURE = "class P:\n    def _repr_png_(self): return b'\\x89PNG'\nP()\n"


def test_code_from_a_pipe_is_run_whole(skerry: Run) -> None:
    done = skerry("repl", input=b"x = 20\nfor n in range(2):\n    print(n)\nx + 1\n")
    assert (done.returncode, done.stdout) == (0, b"0\n1\n21\n")
    failed = skerry("repl", input=b"print('here')\n1 / 0\n")
    assert (failed.returncode, failed.stdout) == (1, b"here\n")
    assert b"ZeroDivisionError" in failed.stderr


def test_events_are_one_a_line_as_json(skerry: Run) -> None:
    done = skerry("repl", "--json", input=b"print('x')\n5")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["type"] for event in events] == ["started", "stdout", "result", "end"]
    assert events[2]["result"]["data"] == {"text/plain": "5"}


def test_pictures_become_files(skerry: Run, tmp_path: Path) -> None:
    done = skerry("repl", "--images", str(tmp_path), input=_PICTURE.encode())
    assert done.returncode == 0
    assert (tmp_path / "1.png").read_bytes() == b"\x89PNG"
    assert str(tmp_path / "1.png").encode() in done.stderr.replace(b"\n", b"")


def test_a_sandbox_that_is_there_remembers_from_one_to_the_next(skerry: Run) -> None:
    id = skerry("create").stdout.decode().strip()
    assert skerry("repl", id, input=b"x = 'kept'").returncode == 0
    assert skerry("repl", id, input=b"x").stdout == b"'kept'\n"
    assert skerry("repl", id, "--language", "bash", input=b"echo $0 | wc -l").stdout == b"1\n"
    assert skerry("repl", id, "--memory", "1G", input=b"x").returncode == 125
    assert skerry("rm", id).returncode == 0


def test_a_conversation_on_a_terminal() -> None:
    screen = Screen("repl")
    screen.wait_for(">>> ", 60)
    screen.type("x = 5\n")
    screen.wait_for(">>> ")
    screen.type("for n in range(2):\n")
    screen.wait_for("... ")
    screen.type("    print('n', n)\n\n")
    screen.wait_for("n 1")
    screen.wait_for(">>> ")
    screen.type("import time; print('go'); time.sleep(60)\n")
    screen.wait_for("go\r\n")
    screen.type("\x03")
    screen.wait_for("KeyboardInterrupt")
    screen.wait_for(">>> ")
    screen.type("x + 1\n")
    screen.wait_for("6\r\n")
    screen.wait_for(">>> ")
    screen.type("import os; os._exit(1)\n")
    screen.wait_for("started anew")
    screen.wait_for(">>> ")
    screen.type("\x04")
    assert screen.wait() == 0


def test_a_piece_goes_on_until_it_is_whole() -> None:
    assert needs_more("python", ["def f():"])
    assert needs_more("python", ["def f():", "    return 1"])
    assert not needs_more("python", ["def f():", "    return 1", ""])
    assert not needs_more("python", ["x = 1"])
    assert not needs_more("python", ["x = = 1"])
    assert needs_more("python", ["x = ("])
    assert not needs_more("python", ["!ls"])
    assert needs_more("javascript", ["function f() {"])
    assert not needs_more("javascript", ["function f() {", "}"])
    assert needs_more("bash", ["echo a \\"])
