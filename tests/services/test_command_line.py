"""Services on the command line: made, seen, read, and ended, each by a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.screen import PROGRAM

from .world import fetch, is_refused, notes

LINE = "echo serving; exec python3 -m http.server 3002"


class Shell:
    def __init__(self, env: dict[str, str]) -> None:
        self._env = env

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *args], capture_output=True, text=True, env=self._env, stdin=subprocess.DEVNULL, timeout=60
        )

    def ok(self, *args: str) -> str:
        done = self.run(*args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def json(self, *args: str) -> Any:
        return json.loads(self.ok(*args))


@pytest.fixture
def shell(own_registry: None, folder: Path) -> Iterator[Shell]:
    shell = Shell(dict(os.environ))
    yield shell
    shell.run("rm", "--all")
    assert notes(folder) == []


def test_a_service_is_made_seen_and_read(shell: Shell) -> None:
    made = shell.json("create", "--name", "web", "--command", LINE, "-p", "3002", "--json")
    address = made["addresses"]["3002"]
    fetch(address)
    (told,) = shell.json("inspect", "web")
    assert told["addresses"] == {"3002": address}
    assert told["spec"]["command"] == LINE
    assert (told["service"]["state"], told["service"]["healthy"]) == ("running", True)
    (listed,) = shell.json("ps", "--json")
    assert (listed["service"]["healthy"], listed["addresses"]) == (True, {"3002": address})
    header, row = shell.ok("ps").splitlines()
    assert header.split()[-2:] == ["SERVICE", "ADDRESSES"]
    assert row.split()[-2:] == ["healthy", f"{address}->3002"]
    assert shell.ok("logs", "web").startswith("serving\n")
    (log,) = shell.json("logs", "web", "--json")
    assert log["process"] == "service"
    assert log["stdout"].startswith("serving\n")
    shell.ok("rm", "web")
    assert is_refused(address)


def test_a_service_beside_a_background_process_bears_its_name(shell: Shell) -> None:
    shell.ok("create", "--name", "web", "--command", "echo one; sleep 1000")
    shell.ok("exec", "-d", "web", "--", "sh", "-c", "echo two; sleep 1000")
    lines = shell.ok("logs", "web").splitlines()
    assert sorted(line.split("|")[1].strip() for line in lines) == ["one", "two"]
    assert any(line.startswith("service") for line in lines)


def test_run_has_a_service_beside_its_command(shell: Shell) -> None:
    ask = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:3002/').status)"
    wait = 'until python3 -c "$0" 2>/dev/null; do sleep 0.05; done'
    assert shell.ok("run", "--command", LINE, "-p", "3002", "--", "sh", "-c", wait, ask).strip() == "200"


def test_a_list_without_services_looks_as_ever(shell: Shell) -> None:
    shell.ok("create", "--name", "plain")
    assert shell.ok("ps").splitlines()[0].split() == ["ID", "NAME", "PROVIDER", "STATE", "AGE", "ENDS", "LABELS"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--command", "image"], "unsupported", "command"),
        (["-p", "0.0.0.0:80:80"], "invalid_spec", "127.0.0.1 alone"),
        (["--restart", "always"], "invalid_spec", "no command"),
    ],
)
def test_what_cannot_be_is_told(shell: Shell, args: list[str], code: str, words: str) -> None:
    done = shell.run("create", "--json", *args)
    assert done.returncode == 125
    told = json.loads(done.stdout or done.stderr)
    assert told["error"]["code"] == code
    assert words in told["error"]["message"]
    assert shell.json("ps", "--json") == []
