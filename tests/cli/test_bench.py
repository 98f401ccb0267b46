"""`skerry bench`: figures of this machine, and nothing left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from skerry.measure import limits, memory
from skerry.measure.figures import Figure
from skerry.providers.mock import Mock

from .conftest import Run, ids
from .screen import PROGRAM

ON_EVERY_PROVIDER = {"create, to the first answer", "create, echo, destroy", "exec of true, in an open sandbox"}


class Report(msgspec.Struct, forbid_unknown_fields=True):
    host: dict[str, str | int | float]
    provider: str
    quick: bool
    figures: list[Figure]


def test_the_default_provider_is_measured_beside_the_limits(skerry: Run, boxes: Path) -> None:
    done = skerry("bench", "--quick", timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0].split() == ["WHAT", "MEASURED", "BESIDE", "RATIO"]
    assert all(any(line.startswith(what) for line in lines) for what in ON_EVERY_PROVIDER)
    create = next(line for line in lines if line.startswith("create, to"))
    assert "bwrap true" in create
    assert create.split()[-1] == "x"
    assert b"local: create" in done.stderr
    assert ids(boxes) == []
    assert json.loads(skerry("ps", "--json").stdout) == []


def test_json_has_each_figure_with_its_number_and_the_machine_it_is_of(skerry: Run, boxes: Path) -> None:
    done = skerry("bench", "--quick", "--json", timeout=120)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    assert (report.provider, report.quick, report.host["cpus"]) == ("local", True, os.cpu_count())
    figures = {figure.what: figure for figure in report.figures}
    assert figures.keys() >= ON_EVERY_PROVIDER
    assert all(figure.value is not None and figure.value > 0 for figure in report.figures)
    idle = figures["memory of an idle sandbox, its own alone"]
    assert idle.unit == " MB"
    assert "fit into" in figures["memory of an idle sandbox, with its part of what it shares"].note
    assert ids(boxes) == []


def test_verbs_that_a_provider_has_are_measured_too(call, mock: Mock) -> None:
    code, out, err = call("bench", "--quick", "--json", "--provider", "mock")
    assert code == 0, err
    measured = {figure["what"] for figure in json.loads(out)["figures"]}
    assert measured >= {"resume, to the first answer", "fork of its files, to the first answer", *ON_EVERY_PROVIDER}
    assert mock.host.boxes == {}
    assert mock.host.snapshots == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("step", ["create", "many at once"])
def test_a_signal_ends_it_and_leaves_nothing(skerry: Run, boxes: Path, number: signal.Signals, step: str) -> None:
    with subprocess.Popen([*PROGRAM, "bench"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert any(f"local: {step}".encode() in line for line in process.stderr)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert ids(boxes) == []
    assert json.loads(skerry("ps", "--json").stdout) == []


def test_a_provider_that_does_not_work_is_an_error_with_its_reason(skerry: Run, boxes: Path) -> None:
    done = skerry("bench", "--provider", "nonsense", "--json")
    assert done.returncode == 125
    assert "nonsense" in json.loads(done.stdout)["error"]["message"]


def test_a_server_elsewhere_is_not_measured(skerry: Run, boxes: Path) -> None:
    done = skerry("bench", env={"SKERRY_URL": "http://127.0.0.1:9", "SKERRY_TOKEN": "none"})
    assert done.returncode == 125
    assert b"run it there" in done.stderr


def test_a_sandbox_that_fails_in_the_middle_leaves_none(call, mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mock.host.programs, "echo", lambda _: 3)
    code, out, err = call("bench", "--quick", "--provider", "mock")
    assert (code, out) == (125, "")
    assert "echo ended with code 3" in err
    assert mock.host.boxes == {}


def test_the_spawner_tells_the_time_of_each_start_and_of_a_failure() -> None:
    with limits.bare_process() as process:
        assert 0 < process.once() < 60
    with limits.Spawner("/bin/false") as process, pytest.raises(RuntimeError, match="ended with code 5"):
        process.once()


def test_processes_of_a_sandbox_are_those_that_bear_its_id_and_those_below() -> None:
    mark = "1b671a64-40d5-491e-99b0-da01ff1f3341"
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo; wait", mark], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            found = memory.processes_of(mark)
            assert process.pid in found
            assert len(found) == 2
            assert all(0 < memory.private_memory(pid) <= memory.proportional_memory(pid) + 4096 for pid in found)
        finally:
            for pid in memory.processes_of(mark):
                os.kill(pid, signal.SIGKILL)
