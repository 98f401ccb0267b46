from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skerry.cli.ledger import _KINDS
from skerry.ledger.ledger import Ledger
from skerry.providers.mock import Mock

from .conftest import PROGRAM

Call = Callable[..., tuple[int, str, str]]
SECRET = "Zq7xSecretValue9yK"


@pytest.fixture
def folder(mock: Mock, tmp_path: Path) -> Path:
    return tmp_path / "state/ledger"


@pytest.fixture
def filled(call: Call, folder: Path) -> Path:
    """The ledger of a sandbox that was made, used and removed."""
    for args in (
        ("create", "--name", "box", "-e", f"TOKEN={SECRET}"),
        ("exec", "box", "--", "echo", "--password", SECRET),
        ("rm", "box"),
    ):
        code, _, err = call(*args)
        assert code == 0, err
    return folder


def shown(call: Call, *args: str) -> list[dict[str, Any]]:
    code, out, err = call("ledger", "show", "--json", *args)
    assert (code, err) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


def test_what_the_command_line_does_is_in_the_ledger(call: Call, filled: Path) -> None:
    lines = shown(call)
    kinds = [line["kind"] for line in lines]
    assert kinds == ["begin", "create", "ready", "exec", "exit", "destroy", "end"]
    assert {line["who"]["tool"] for line in lines} == {"cli"}
    assert {line["who"]["uid"] for line in lines} == {os.getuid()}
    assert lines[3]["facts"]["argv"] == ["echo", "--password", "***"]
    assert SECRET not in json.dumps(lines)


def test_show_is_a_line_for_people(call: Call, filled: Path) -> None:
    code, out, _ = call("ledger", "show")
    assert code == 0
    line = next(line for line in out.splitlines() if "exec " in line)
    assert "argv=" in line
    assert line.endswith(f"(cli uid {os.getuid()} pid {os.getpid()})")
    assert SECRET not in out


def test_lines_are_chosen_by_sandbox_kind_time_tool_and_host(call: Call, filled: Path) -> None:
    id = shown(call, "--kind", "create")[0]["sandbox"]
    other = Ledger(filled, tool="gate")
    other.append("connect", "other", name="pypi.org", port=443)
    other.append("refuse", "other", name="evil.example", port=443)

    def kinds(*args: str) -> list[str]:
        return [line["kind"] for line in shown(call, *args)]

    everything = ["create", "ready", "exec", "exit", "destroy", "end"]
    assert kinds("--sandbox", id) == kinds("--sandbox", id[:8]) == kinds("--sandbox", "box") == everything
    assert kinds("--kind", "exec", "--kind", "end") == ["exec", "end"]
    assert kinds("--tool", "gate") == kinds("--sandbox", "other") == ["connect", "refuse"]
    assert kinds("--name", "pypi.org") == kinds("--name", "p*.org") == ["connect"]
    assert kinds("--since", "1h", "--tool", "gate") == ["connect", "refuse"]
    assert kinds("--until", "1h") == kinds("--since", "2100-01-01") == []
    assert kinds("-n", "1") == ["refuse"]
    assert kinds("--sandbox", "box", "-n", "2") == ["destroy", "end"]
    code, _, err = call("ledger", "show", "--since", "yesterday")
    assert code == 125
    assert "--since 'yesterday' is no time" in err
    code, _, err = call("ledger", "show", "--kind", "refused")
    assert code == 125
    assert "'refuse'" in err, "the kinds that there are"
    assert call("ledger", "show", "--sandbox", "nobody") == (0, "", "skerry: no line of the ledger fits\n")


def test_verify_tells_that_it_is_whole_and_where_it_is_not(call: Call, filled: Path) -> None:
    code, out, err = call("ledger", "verify")
    assert (code, err) == (0, "")
    assert out.startswith("the ledger is whole: 7 lines in 1 file, from 1 to 7")
    file = filled / "ledger.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"echo"', b'"true"'))
    code, out, err = call("ledger", "verify")
    assert code == 1
    assert "ledger.jsonl:4: it was changed" in err
    assert "NOT whole" in out
    code, out, err = call("ledger", "verify", "--json")
    told = json.loads(out)
    assert (code, err, told["whole"]) == (1, "", False)
    assert [(each["file"], each["line"]) for each in told["problems"]] == [("ledger.jsonl", 4)]


def test_a_cut_end_is_found_by_a_head_that_was_kept(call: Call, filled: Path) -> None:
    code, head, _ = call("ledger", "head")
    assert code == 0
    assert json.loads(call("ledger", "head", "--json")[1]) == {"head": head.strip()}
    assert call("ledger", "verify", "--head", head.strip())[0] == 0
    file = filled / "ledger.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))
    assert call("ledger", "verify")[0] == 0
    code, _, err = call("ledger", "verify", "--head", head[:8])
    assert code == 125
    assert "give all 64 digits" in err
    code, _, err = call("ledger", "verify", "--head", head.strip())
    assert code == 1
    assert "the end was cut off" in err


def test_an_export_is_json_lines_or_csv_in_a_file_or_on_stdout(call: Call, filled: Path, tmp_path: Path) -> None:
    code, out, _ = call("ledger", "export", "--kind", "exec")
    assert code == 0
    (line,) = map(json.loads, out.splitlines())
    assert line["facts"]["argv"][0] == "echo"
    assert call("ledger", "export", str(tmp_path / "out.csv"), "--format", "csv")[0] == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [row["kind"] for row in rows] == [line["kind"] for line in shown(call)]
    assert json.loads(rows[3]["facts"])["argv"][0] == "echo"
    code, _, err = call("ledger", "export", str(tmp_path / "no/such/folder"))
    assert code == 125
    assert "no/such/folder" in err


def test_there_may_be_no_ledger_yet(call: Call, folder: Path) -> None:
    assert shown(call) == []
    assert call("ledger", "verify")[0] == 0
    assert call("ledger", "head")[1].strip() == "0" * 64


def test_one_that_is_off_says_so(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_LEDGER__ENABLED", "false")
    assert call("create", "--name", "box")[0] == 0
    assert call("rm", "box")[0] == 0
    code, out, err = call("ledger", "show")
    assert (code, out) == (0, "")
    assert "the ledger is off" in err
    assert not folder.exists()


def test_follow_prints_lines_as_they_come_until_it_is_ended(filled: Path) -> None:
    following = subprocess.Popen(
        [*PROGRAM, "ledger", "follow", "--json", "--after", "6"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert following.stdout is not None
        assert json.loads(following.stdout.readline())["kind"] == "end"
        ledger = Ledger(filled)
        ledger.append("exec", "id", argv=["one"])
        assert json.loads(following.stdout.readline())["facts"] == {"argv": ["one"]}
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=20)
        assert (following.returncode, err.strip()) == (130, b"")
    finally:
        following.kill()
        following.communicate()


def test_a_full_ledger_stops_new_work_with_its_own_error_and_removing_still_works(
    call: Call, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    assert call("create", "--name", "old")[0] == 0
    real = os.write

    def no_room(fd: int, data: bytes) -> int:
        if data.startswith(b'{"seq"') and os.path.exists(filled / "ballast"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", no_room)
    code, out, _ = call("create", "--name", "new", "--json")
    assert code == 125
    error = json.loads(out)["error"]
    assert (error["code"], error["retryable"]) == ("ledger_full", True)
    code, _, err = call("exec", "old", "--", "true")
    assert code == 125
    assert "no room to write the ledger" in err
    assert call("rm", "old")[0] == 0
    monkeypatch.undo()


def test_kinds_that_are_completed_are_those_there_are(call: Call, filled: Path) -> None:
    assert {line["kind"] for line in shown(call)} <= set(_KINDS)
