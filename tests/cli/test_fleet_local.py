"""Fleets on the command line as users run it: in processes of its own, on the default provider, on a terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import PROGRAM, Run, ids
from .screen import Screen
from .test_fleet import ALL, FLEET, write

SLOW = """\
name: demo
phases:
  - name: db
  - name: workers
    count: 2
    wait_for: [db]
    setup: [[sleep, "3600"]]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the user is, with a fleet.yaml."""
    monkeypatch.chdir(tmp_path)
    write(FLEET)


@pytest.fixture
def clear(skerry: Run, boxes: Path) -> Iterator[None]:
    """The fleet goes with the test."""
    yield
    assert skerry("fleet", "down", "--fleet", "demo").returncode == 0


def await_setup(skerry: Run) -> None:
    """Until the slow members are at their setup."""
    deadline = time.monotonic() + 20
    while len(json.loads(skerry("fleet", "status", "--fleet", "demo", "--json").stdout)) < 3:
        assert time.monotonic() < deadline


def test_one_shell_starts_a_fleet_another_uses_it_and_a_third_ends_it(skerry: Run, boxes: Path) -> None:
    done = skerry("fleet", "up")
    assert done.returncode == 0, done.stderr
    assert len(ids(boxes)) == 4
    said = skerry("fleet", "exec", "workers", "--", "sh", "-c", "echo $SKERRY_PEERS; exit $SKERRY_INDEX")
    assert said.returncode == 3
    assert set(said.stdout.decode().splitlines()) == {f"{name} | {','.join(ALL[1:])}" for name in ALL[1:]}
    assert skerry("fleet", "exec", "db", "--", "cat", "state.txt").stdout == b"agent-db-001 | up\n"
    assert skerry("fleet", "down").stdout.decode().split() == [*ALL[1:], ALL[0]]
    assert ids(boxes) == []


@pytest.mark.usefixtures("clear")
def test_what_fails_is_told_once_and_harmlessly(skerry: Run) -> None:
    write("name: demo\nphases:\n  - {name: bad, setup: ['printf \"\\\\033[2Jmine\" >&2; exit 3']}\n")
    done = skerry("fleet", "up")
    assert done.returncode == 125
    assert b"\x1b" not in done.stderr
    told = [line.split(":")[0] for line in done.stderr.decode().splitlines() if "agent-bad-001" in line]
    assert told == ["bad", "bad", "skerry"]  # it starts, it failed, and why


@pytest.mark.usefixtures("clear")
def test_up_ends_on_time(skerry: Run) -> None:
    write(SLOW)
    done = skerry("fleet", "up", "--timeout", "2s", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == 125
    assert {name: phase["state"] for name, phase in told["phases"].items()} == {"db": "ready", "workers": "timed_out"}


@pytest.mark.usefixtures("clear")
def test_ctrl_c_takes_back_what_is_not_ready_and_tells(skerry: Run, boxes: Path) -> None:
    write(SLOW)
    with subprocess.Popen([*PROGRAM, "fleet", "up"], stderr=subprocess.PIPE, text=True) as process:
        await_setup(skerry)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted; up: agent-db-001; removed: agent-workers-001, agent-workers-002" in err
    assert len(ids(boxes)) == 1


@pytest.mark.usefixtures("clear")
def test_a_second_ctrl_c_leaves_at_once_and_what_it_leaves_is_cleared_by_the_next(skerry: Run, boxes: Path) -> None:
    write(SLOW)
    with subprocess.Popen([*PROGRAM, "fleet", "up"], stderr=subprocess.PIPE, text=True) as process:
        await_setup(skerry)
        os.kill(process.pid, signal.SIGSTOP)  # both are there when it goes on
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        process.communicate(timeout=30)
    assert process.returncode in (130, 143)
    assert skerry("fleet", "ls").returncode == 0
    assert len(ids(boxes)) == 1


@pytest.mark.usefixtures("clear")
def test_a_terminal_shows_the_phases_as_they_come(
    skerry: Run, open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    write(SLOW)
    screen = open_screen("fleet", "up")
    screen.wait_for("PHASE")
    screen.wait_for("LAST ERROR")
    screen.wait_for("starting  0/2")
    screen.wait_for("\x1b[1A")  # drawn again in its place
    screen.type("\x03")
    screen.wait_for("stopped")
    screen.wait_for("\x1b[?25h")  # the cursor is back
    screen.wait_for("interrupted; up: agent-db-001")
    assert screen.wait() == 130
    assert screen.mode() == screen.mode_before


@pytest.mark.usefixtures("clear")
def test_a_terminal_has_colours_and_a_status_that_stays_in_its_place(
    skerry: Run, open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert skerry("fleet", "up").returncode == 0
    screen = open_screen("fleet", "exec", "db", "--", "printf", r"\033[31mred")
    screen.wait_for("\x1b[36magent-db-001 | \x1b[0m\x1b[31mred\x1b[0m\r\n")
    assert screen.wait() == 0
    watching = open_screen("fleet", "status", "-w")
    for _ in range(2):
        watching.wait_for("\x1b[H\x1b[J")
        watching.wait_for("agent-workers-003")
    watching.type("\x03")
    assert watching.wait() == 130


@pytest.mark.usefixtures("clear")
def test_a_status_that_is_watched_is_no_longer_than_the_terminal(
    skerry: Run, open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert skerry("fleet", "up").returncode == 0
    watching = open_screen("fleet", "status", "-w")
    watching.resize(5, 60)
    watching.wait_for("... and 2 more")
    watching.type("\x03")
    assert watching.wait() == 130
