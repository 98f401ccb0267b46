"""Lifetimes on the command line: any command ends what is overdue, and a wall clock that was set ends nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skerry import clock
from skerry.clock import End

from .conftest import Run

pytestmark = pytest.mark.timeout(120)
_YEAR_S = 365 * 86400.0
_SHIFTS_S = {"+1h": 3600.0, "-1h": -3600.0, "+30y": 30 * _YEAR_S, "-30y": -30 * _YEAR_S}


def record_of(skerry: Run, id: str, **options: Any) -> dict[str, Any]:
    done = skerry("ps", "-a", "--json", **options)
    assert done.returncode == 0, done.stderr
    return next(each for each in json.loads(done.stdout) if each["id"] == id)


@pytest.fixture
def frozen(skerry: Run, boxes: Path) -> Iterator[str]:
    """The id of a sandbox of one hour, all of whose processes stand still: its agent will not end it."""
    done = skerry("create", "--lifetime", "1h")
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().strip()
    (meta,) = (boxes / id).glob("processes*")
    for process in json.loads(meta.read_bytes()):
        os.kill(process["pid"], signal.SIGSTOP)
    yield id
    skerry("rm", "-f", id)


def let_pass(registry: Path, id: str, left_s: float) -> None:
    """So much is left of its lifetime now."""
    with sqlite3.connect(registry) as database:
        end = msgspec.json.encode(End(clock.now(), left_s)).decode()
        assert database.execute("UPDATE sandboxes SET ends = ? WHERE id = ?", (end, id)).rowcount == 1
    database.close()


@pytest.mark.parametrize("command", ["ps", "create", "run", "reconcile"])
def test_the_next_command_ends_what_its_agent_did_not(
    skerry: Run, frozen: str, tmp_path: Path, boxes: Path, command: str
) -> None:
    registry = tmp_path / "state/registry.db"
    let_pass(registry, frozen, 60)
    assert record_of(skerry, frozen)["state"] == "ready"
    let_pass(registry, frozen, -6)
    arguments = {"create": ["--name", "other"], "run": ["true"]}.get(command, [])
    done = skerry(command, *arguments)
    assert done.returncode == 0, done.stderr
    with sqlite3.connect(registry) as database:
        found = database.execute("SELECT state, cause FROM sandboxes WHERE id = ?", (frozen,)).fetchone()
    database.close()
    assert found == ("destroyed", "lifetime")
    assert not (boxes / frozen).exists()
    skerry("rm", "-f", "other")


@pytest.mark.parametrize("shift", _SHIFTS_S)
def test_a_command_under_another_wall_clock_ends_nothing(skerry: Run, boxes: Path, shift: str) -> None:
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("no faketime: apt-get install faketime")
    library = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    elsewhen = {"LD_PRELOAD": str(library), "FAKETIME": shift, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    done = skerry("create", "--lifetime", "30m", "--idle", "20m")
    assert done.returncode == 0, done.stderr
    id = done.stdout.decode().strip()
    try:
        assert json.loads(skerry("reconcile", "--json", env=elsewhen).stdout) == []
        found = record_of(skerry, id, env=elsewhen)
        assert (found["state"], found["cause"]) == ("ready", None)
        left_s = found["ends_at"] - time.time() - _SHIFTS_S[shift]
        assert left_s == pytest.approx(1800, abs=60)  # told by the clock that whoever asks has
        assert skerry("exec", id, "true", env=elsewhen).returncode == 0
        assert json.loads(skerry("reconcile", "--json").stdout) == []
    finally:
        assert skerry("rm", "-f", id).returncode == 0
