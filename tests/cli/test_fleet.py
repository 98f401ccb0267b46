"""Fleets on the command line, on the mock."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.cli import logs
from skerry.cli.fleet_exec import run_in_members
from skerry.cli.job import make_job
from skerry.cli.logs import Lines
from skerry.fleet.fleet import AsyncFleet
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId
from skerry.providers.mock import Context, Mock
from skerry.sandbox.sandbox import AsyncSandbox

Call = Callable[..., tuple[int, str, str]]

FLEET = """\
name: demo
phases:
  - name: db
    setup: ["echo up > state.txt"]
  - name: workers
    count: 3
    wait_for: [db]
    labels: {tier: back}
"""
BROKEN = """\
name: demo
phases:
  - name: db
    cont: 2
    wait_for: [web]
  - name: web
    memory: lots
    wait_for: [db]
"""
FAILING = """\
name: demo
phases:
  - name: db
  - name: bad
    count: 2
    wait_for: [db]
    setup: ["echo no luck >&2; exit 3"]
  - name: late
    wait_for: [bad]
"""
ALL = ["agent-db-001", "agent-workers-001", "agent-workers-002", "agent-workers-003"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user is, with a fleet.yaml."""
    monkeypatch.chdir(tmp_path)
    write(FLEET)
    return tmp_path


@pytest.fixture
def up(mock: Mock, call: Call) -> None:
    code, out, err = call("fleet", "up")
    assert (code, out) == (0, ""), err


def write(text: str, name: str = "fleet.yaml") -> None:
    Path(name).write_text(text)


def members(call: Call, *args: str) -> dict[str, SandboxId]:
    """The id of each member by its name."""
    code, out, err = call("fleet", "status", "--json", *args)
    assert code == 0, err
    return {name: status["id"] for name, status in json.loads(out).items()}


# the file


def test_validate_tells_what_a_file_describes(call: Call) -> None:
    assert call("fleet", "validate") == (0, "fleet.yaml: fleet demo, 2 phases, 4 members\n", "")
    told = json.loads(call("fleet", "validate", "fleet.yaml", "--json")[1])
    assert told == {"path": "fleet.yaml", "ok": True, "fleet": "demo", "phases": 2, "members": 4, "problems": []}


@pytest.mark.parametrize("verb", ["validate", "plan", "up"])
def test_every_mistake_of_a_file_is_told_as_a_compiler_does(call: Call, mock: Mock, verb: str) -> None:
    write(BROKEN)
    code, out, err = call("fleet", verb)
    assert (code, out) == (125, "")
    places = [line.split(": ")[0] for line in err.splitlines()]
    assert places == ["fleet.yaml:4:5", "fleet.yaml:5:16", "fleet.yaml:7:13"]
    assert "db -> web -> db" in err


def test_the_mistakes_of_a_file_are_data_too(call: Call, mock: Mock) -> None:
    write(BROKEN)
    code, out, err = call("fleet", "validate", "--json")
    assert (code, err) == (125, "")
    told = json.loads(out)
    assert [(each["line"], each["column"]) for each in told["problems"]] == [(4, 5), (5, 16), (7, 13)]
    code, out, err = call("fleet", "up", "--json")
    assert (code, err, json.loads(out)["error"]["code"]) == (125, "", "invalid_fleet")


def test_a_compose_file_is_found_and_is_a_fleet(call: Call, mock: Mock) -> None:
    Path("fleet.yaml").unlink()
    write("name: demo\nservices:\n  db: {image: app}\n  web: {image: app, depends_on: [db]}\n", "compose.yaml")
    assert call("fleet", "validate") == (0, "compose.yaml: fleet demo, 2 phases, 2 members\n", "")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("up", "other.yaml"), "cannot be read"),
        (("up", "-f", "fleet.yaml", "fleet.yaml"), "named twice"),
        (("status", "-f", "fleet.yaml", "--fleet", "demo"), "exclude each other"),
        (("status", "--project", "p"), "needs --fleet"),
        (("exec", "all"), "COMMAND"),
        (("exec", "all", "--"), "no command"),
        (("exec", "all", "true"), "no members"),
        (("scale", "workers"), "not PHASE=N"),
        (("scale", "workers=-1"), "not PHASE=N"),
        (("scale", "worker=1"), "did you mean 'workers'?"),
        (("stop-phase", "worker"), "did you mean 'workers'?"),
        (("up", "--timeout", "soon"), "--timeout"),
    ],
)
def test_what_is_unclear_is_refused(call: Call, mock: Mock, args: tuple[str, ...], why: str) -> None:
    code, out, err = call("fleet", *args)
    assert (code, out) == (125, "")
    assert why in err
    assert err.count("\n") == 1


def test_without_a_file_it_is_told_how_to_name_one(call: Call, mock: Mock) -> None:
    Path("fleet.yaml").unlink()
    for verb, has_name in (("up", False), ("down", True)):
        code, _, err = call("fleet", verb)
        assert code == 125
        assert "-f" in err
        assert ("--fleet NAME" in err) == has_name


# plan and up


def test_plan_draws_what_waits_for_what_and_what_would_change(call: Call, mock: Mock) -> None:
    code, out, _ = call("fleet", "plan")
    assert code == 0
    graph, changes = out.split("\n\n")
    assert [line.split()[-2:] for line in graph.splitlines()] == [["db", "(1)"], ["workers", "(3)"]]
    assert changes.splitlines() == [*(f"+ {name}" for name in ALL), "4 to create"]
    told = json.loads(call("fleet", "plan", "--json")[1])
    assert [change["kind"] for change in told["changes"]] == ["create"] * 4
    assert told["changed"]
    assert mock.host.boxes == {}


def test_up_tells_each_step_and_a_second_one_changes_nothing(call: Call, mock: Mock) -> None:
    code, out, err = call("fleet", "up")
    assert (code, out) == (0, "")
    lines = err.splitlines()
    assert lines[0] == "db: starts 1"
    assert lines.index("workers: starts 3") > [line.startswith("db: ready, 1/1") for line in lines].index(True)
    assert lines[-1].startswith("skerry: fleet demo: 4 of 4 ready")
    before = members(call)
    assert list(before) == ALL
    assert call("fleet", "plan")[1].endswith("nothing to do: all is as the file says\n")
    code, _, err = call("fleet", "up")
    assert code == 0
    assert "workers: agent-workers-002 is kept" in err
    assert members(call) == before


@pytest.mark.usefixtures("up")
def test_a_changed_file_touches_only_the_difference(call: Call) -> None:
    before = members(call)
    write(FLEET.replace("echo up", "echo changed").replace("count: 3", "count: 2"))
    changes = call("fleet", "plan")[1].split("\n\n")[1].splitlines()
    assert changes == [
        "~ agent-db-001: replace, its phase was changed",
        "- agent-workers-003: destroy, there are to be fewer",
        "1 to replace, 2 to keep, 1 to destroy",
    ]
    assert call("fleet", "up")[0] == 0
    after = members(call)
    assert list(after) == ALL[:3]
    assert {name for name in after if after[name] == before[name]} == set(ALL[1:3])


def test_a_phase_that_fails_is_taken_back_and_told(call: Call, mock: Mock) -> None:
    write(FAILING)
    code, out, err = call("fleet", "up")
    assert (code, out) == (125, "")
    assert "skerry: bad: failed, 0 of 2 ready" in err
    assert "ended with 3" in err
    assert "no luck" in err
    assert "skerry: late: skipped, 0 of 1 ready" in err
    assert list(members(call)) == ["agent-db-001"]
    told = json.loads(call("fleet", "up", "--json")[1])
    assert not told["ok"]
    assert {name: phase["state"] for name, phase in told["phases"].items()} == {
        "db": "ready",
        "bad": "failed",
        "late": "skipped",
    }


def test_up_goes_by_its_options_rather_than_by_the_file(call: Call, mock: Mock) -> None:
    write(FLEET.replace("phases:", "provider: local\ntimeout: 1h\nphases:"))
    assert call("fleet", "up", "--provider", "mock", "--max-parallel", "1")[0] == 0
    assert len(mock.host.boxes) == 4


@pytest.mark.usefixtures("up")
def test_scale_makes_more_or_fewer(call: Call) -> None:
    before = members(call)
    code, _, err = call("fleet", "scale", "workers=1")
    assert code == 0
    assert "agent-workers-003 is removed" in err
    assert list(members(call)) == ALL[:2]
    told = json.loads(call("fleet", "scale", "workers=4", "--json")[1])
    assert told["phases"]["workers"]["ready"] == 4
    after = members(call)
    assert list(after) == [*ALL, "agent-workers-004"]
    assert after["agent-workers-001"] == before["agent-workers-001"]


# seeing


@pytest.mark.usefixtures("up")
def test_status_is_a_table_with_every_member(call: Call) -> None:
    header, *rows = call("fleet", "status")[1].splitlines()
    assert header.split() == ["MEMBER", "ID", "STATE", "IP", "UPTIME", "CPU", "MEMORY", "ERROR"]
    assert [row.split()[0] for row in rows] == ALL
    assert all(row.split()[2] == "ready" for row in rows)


@pytest.mark.usefixtures("up")
def test_status_shows_what_members_reach(call: Call) -> None:
    async def give() -> None:
        async with AsyncSandboxManager(reconcile=False) as manager:
            record = await manager.store.find("agent-workers-001")
            await manager.store.change(record, spec=record.spec.but(reach=["db:5432", "db:5433"]))

    assert "REACH" not in call("fleet", "status")[1]
    asyncio.run(give())
    header, *rows = call("fleet", "status")[1].splitlines()
    assert header.split()[-1] == "REACH"
    assert [row.split()[0] for row in rows if row.endswith("db:5432,db:5433")] == ["agent-workers-001"]
    found = json.loads(call("fleet", "status", "--json")[1])
    assert [status["reach"] for status in found.values()] == [[], ["db:5432", "db:5433"], [], []]


def test_status_of_a_fleet_that_is_not_there_is_empty(call: Call, mock: Mock) -> None:
    assert json.loads(call("fleet", "status", "--json")[1]) == {}
    assert call("fleet", "status", "--fleet", "nothing")[0] == 0
    assert json.loads(call("fleet", "ls", "--json")[1]) == []


@pytest.mark.usefixtures("up")
def test_ls_lists_the_fleets_that_are_up(call: Call) -> None:
    write("name: other\nphases: [{name: one}]\n", "other.yaml")
    assert call("fleet", "up", "other.yaml")[0] == 0
    header, *rows = call("fleet", "ls")[1].splitlines()
    assert header.split() == ["FLEET", "PROJECT", "PHASES", "READY", "AGE"]
    assert [row.split()[:4] for row in rows] == [
        ["demo", "demo", "db,workers", "4/4"],
        ["other", "other", "one", "1/1"],
    ]
    assert [each["members"] for each in json.loads(call("fleet", "ls", "--json")[1])] == [4, 1]


# commanding


@pytest.mark.usefixtures("up")
def test_exec_names_who_says_what_and_keeps_the_highest_exit_code(call: Call) -> None:
    script = "echo $SKERRY_INDEX of $SKERRY_COUNT; echo oops >&2; exit $SKERRY_INDEX"
    code, out, err = call("fleet", "exec", "all", "--", "sh", "-c", script)
    assert code == 3
    assert sorted(out.splitlines()) == ["agent-db-001      | 1 of 1"] + [
        f"agent-workers-00{index} | {index} of 3" for index in (1, 2, 3)
    ]
    assert err.count("| oops\n") == 4


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(
    ("target", "meant"), [("workers", ALL[1:]), ("tier=back", ALL[1:]), ("agent-db-001", ALL[:1]), ("all", ALL)]
)
def test_exec_reaches_who_is_meant(call: Call, target: str, meant: list[str]) -> None:
    code, out, _ = call("fleet", "exec", target, "--", "echo", "hi")
    assert code == 0
    assert sorted(line.split()[0] for line in out.splitlines()) == meant


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize("target", ["worker", "tier=front"])
def test_exec_on_nobody_is_an_error(call: Call, target: str) -> None:
    code, out, err = call("fleet", "exec", target, "--", "true")
    assert (code, out) == (125, "")
    assert target in err


@pytest.mark.usefixtures("up")
def test_exec_tells_each_member_on_a_line_of_json(call: Call) -> None:
    script = "echo $SKERRY_INDEX $A; pwd; exit $SKERRY_INDEX"
    code, out, _ = call("fleet", "exec", "--json", "-e", "A=x", "-w", "/tmp", "workers", "--", "sh", "-c", script)
    assert code == 3
    told = {each["member"]: each for each in map(json.loads, out.splitlines())}
    assert sorted(told) == ALL[1:]
    assert [told[name]["exit_code"] for name in ALL[1:]] == [1, 2, 3]
    assert told["agent-workers-002"]["stdout"] == "2 x\n/tmp\n"


@pytest.mark.usefixtures("up")
def test_a_command_that_takes_too_long_is_ended_in_each_member(call: Call) -> None:
    code, _, err = call("fleet", "exec", "--timeout", "200ms", "workers", "--", "sleep", "3600")
    assert code == 124
    assert err.count("as --timeout asks") == 3


@pytest.mark.usefixtures("up")
def test_a_member_that_is_not_reached_keeps_nobody_from_answering(call: Call, mock: Mock) -> None:
    lost = members(call)["agent-workers-002"]
    mock.host.boxes.pop(lost)
    code, out, err = call("fleet", "exec", "workers", "--", "echo", "hi")
    assert code == 125
    assert sorted(line.split()[0] for line in out.splitlines()) == ["agent-workers-001", "agent-workers-003"]
    assert "skerry: agent-workers-002: " in err
    code, out, _ = call("fleet", "exec", "--json", "workers", "--", "true")
    assert code == 125
    assert [each["member"] for each in map(json.loads, out.splitlines()) if "error" in each] == ["agent-workers-002"]
    status = json.loads(call("fleet", "status", "--json")[1])["agent-workers-002"]
    assert (status["agent"], bool(status["error"])) == (None, True)


@pytest.mark.usefixtures("up")
def test_logs_are_of_all_background_processes(call: Call) -> None:
    assert call("fleet", "logs") == (0, "", "")
    assert call("fleet", "logs", "--follow", "--json")[0] == 125
    code, out, _ = call("fleet", "exec", "-d", "workers", "--", "sh", "-c", "echo said by $SKERRY_INDEX")
    assert code == 0
    assert len(out.splitlines()) == 3
    code, out, _ = call("fleet", "logs", "--follow")
    assert code == 0
    assert sorted(out.splitlines()) == [f"agent-workers-00{index} | said by {index}" for index in (1, 2, 3)]
    assert call("fleet", "logs", "agent-workers-001")[1] == "agent-workers-001 | said by 1\n"
    told = [json.loads(line) for line in call("fleet", "logs", "workers", "--json")[1].splitlines()]
    assert [each["stdout"] for each in told] == [f"said by {index}\n" for index in (1, 2, 3)]
    assert call("fleet", "exec", "-d", "agent-workers-001", "--", "echo", "again")[0] == 0
    assert sorted({line.split()[1] for line in call("fleet", "logs", "workers", "--follow")[1].splitlines()}) != ["|"]


async def test_lines_of_several_members_stay_whole(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = Lines(["a", "long"])
    one, other = lines.of("a"), lines.of("long")
    piece = b"x" * 5000  # more than a pipe takes at once
    for _ in range(3):
        await asyncio.gather(one.write(1, piece), other.write(1, b"y\nz"))
    await asyncio.gather(one.write(1, b"\n"), other.end())
    out = capfdbinary.readouterr().out.decode().splitlines()
    assert sorted(out) == sorted(["a    | " + "x" * 15000, "long | y", "long | zy", "long | zy", "long | z"])


async def test_a_line_without_an_end_is_written_in_pieces(
    capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_LONGEST", 10)
    lines = Lines(["a"]).of("a")
    await lines.write(2, b"12345678901")
    await lines.write(2, b"2")
    await lines.end()
    assert capfdbinary.readouterr().err == b"a | 12345678901\na | 2\n"


# ending


@pytest.mark.usefixtures("up")
def test_stop_phase_removes_only_its_members(call: Call) -> None:
    assert call("fleet", "stop-phase", "workers") == (0, "".join(f"{name}\n" for name in ALL[1:]), "")
    assert list(members(call)) == ALL[:1]
    assert call("fleet", "stop-phase", "workers") == (0, "", "")


@pytest.mark.usefixtures("up")
def test_down_removes_all_and_twice_is_no_error(call: Call, mock: Mock) -> None:
    mock.host.boxes.pop(members(call)["agent-workers-002"])
    assert call("fleet", "down", "--volumes") == (0, "".join(f"{name}\n" for name in [*ALL[1:], ALL[0]]), "")
    assert mock.host.boxes == {}
    assert asyncio.run(mock.volumes()) == []
    assert json.loads(call("fleet", "down", "--json")[1]) == {"fleet": "demo", "removed": []}


@pytest.mark.usefixtures("up")
def test_down_works_without_a_file_that_is_right(call: Call, mock: Mock) -> None:
    write(BROKEN)
    code, _, err = call("fleet", "down")
    assert code == 125
    assert "--fleet NAME" in err
    Path("fleet.yaml").unlink()
    assert list(members(call, "--fleet", "demo")) == ALL
    assert call("fleet", "exec", "--fleet", "demo", "db", "--", "cat", "state.txt")[1] == "agent-db-001 | up\n"
    assert call("fleet", "down", "--fleet", "demo", "--project", "other") == (0, "", "")
    assert call("fleet", "down", "--fleet", "demo")[0] == 0
    assert mock.host.boxes == {}


# the shell


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fleet status --fleet ", ["demo"]),
        ("fleet stop-phase ", ["db", "workers"]),
        ("fleet exec --fleet demo w", ["workers"]),
        ("fleet logs ", ["all", "db", "workers", *ALL]),
        ("fleet scale w", ["workers="]),
    ],
)
def test_the_shell_completes_fleets_phases_and_members(
    call: Call, monkeypatch: pytest.MonkeyPatch, words: str, offered: list[str]
) -> None:
    from click.shell_completion import ShellComplete

    from skerry.cli import cli

    *args, incomplete = words.split(" ")
    found = ShellComplete(cli, {}, "skerry", "_SKERRY_COMPLETE").get_completions(args, incomplete)
    assert [item.value for item in found] == offered


def test_completion_offers_nothing_where_a_file_is_wrong(mock: Mock) -> None:
    from click.shell_completion import ShellComplete

    from skerry.cli import cli

    write(BROKEN)
    assert ShellComplete(cli, {}, "skerry", "_").get_completions(["fleet", "stop-phase"], "") == []


@pytest.mark.parametrize("columns", [50, 80, 120])
@pytest.mark.parametrize("name", ["bad", "a-phase-of-a-long-name"])
def test_a_long_error_takes_no_column_from_the_table(name: str, columns: int) -> None:
    from rich.console import Console

    from skerry.cli.fleet_up import View
    from skerry.fleet.events import PhaseFailed
    from skerry.fleet.model import Phase

    view = View([Phase(name=name)])
    view(PhaseFailed(phase=name, state="failed", ready=0, total=1, duration_s=3.0, error="no " * 60))
    console = Console(width=columns, color_system=None)
    with console.capture() as drawn:
        console.print(view.draw())
    header, row = drawn.get().splitlines()
    assert header.split()[:4] == ["PHASE", "STATE", "READY", "TIME"]
    assert row.split()[:4] == [name, "failed", "0/1", "3.0s"]


@pytest.mark.parametrize("counts", [("workers=2", "workers=3"), ("workers=" + "9" * 5000,), ("workers",)])
def test_scale_refuses_what_is_no_count(mock: Mock, call: Call, counts: tuple[str, ...]) -> None:
    write(FLEET)
    code, _, err = call("fleet", "scale", *counts)
    assert code == 125
    assert "see `skerry fleet scale --help`" in err


def test_a_member_for_which_this_machine_has_no_file_left_keeps_no_other_from_answering(
    mock: Mock, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(FLEET)
    assert call("fleet", "up")[0] == 0
    ping = AsyncSandbox.ping

    async def ping_or_not(self: AsyncSandbox) -> object:
        if self.spec.name == ALL[1]:
            raise OSError(errno.EMFILE, "Too many open files")
        return await ping(self)

    monkeypatch.setattr(AsyncSandbox, "ping", ping_or_not)
    code, out, err = call("fleet", "exec", "workers", "--", "echo", "x")
    assert code == 125
    assert sorted(line.split(" | ")[0] for line in out.splitlines()) == ALL[2:]
    assert f"{ALL[1]}: its agent cannot be reached: Too many open files" in err


@pytest.mark.usefixtures("mock")
def test_a_phase_alone_is_started_once_those_are_ready_that_it_waits_for(call: Call) -> None:
    code, _, err = call("fleet", "start-phase", "workers")
    assert code == 125
    assert "waits for 'db'" in err
    assert call("fleet", "start-phase", "db")[0] == 0
    code, out, _ = call("fleet", "start-phase", "workers", "--json")
    assert (code, json.loads(out)["phases"]["workers"]["ready"]) == (0, 3)
    assert sorted(members(call)) == ALL
    code, _, err = call("fleet", "start-phase", "wokers")
    assert (code, "did you mean 'workers'?" in err) == (125, True)
    call("fleet", "down")


def test_nothing_runs_in_members_whose_setup_is_not_done(call: Call, mock: Mock) -> None:
    write("name: demo\nphases:\n  a: {count: 2, setup: look}\n")
    seen = []

    async def look(_context: Context) -> None:
        async with AsyncSandboxManager(reconcile=False) as manager:
            fleet = await AsyncFleet.open(manager, "demo")
            job = make_job(["true"], True, None)
            seen.append(await run_in_members(manager, fleet, "agent-a-001", job, 8))

    mock.host.programs["look"] = look
    _, out, _ = call("fleet", "up")
    assert set(seen) == {125}
    told = [json.loads(line)["error"]["message"] for line in out.splitlines() if line.startswith('{"member"')]
    assert set(told) == {"agent-a-001 cannot be used: its setup is not done"}
    call("fleet", "down")


@pytest.mark.usefixtures("up")
@pytest.mark.parametrize("verb", [("down",), ("stop-phase", "workers")])
def test_an_end_takes_a_grace_time(call: Call, verb: tuple[str, ...]) -> None:
    code, _, err = call("fleet", *verb, "--grace", "2h")
    assert (code, "grace: 7200 s is out of range" in err) == (125, True)
    assert call("fleet", *verb, "-t", "1s")[0] == 0


def test_validate_refuses_a_phase_without_an_image_where_its_provider_needs_one(call: Call) -> None:
    write("name: demo\nphases:\n  a: {provider: incus}\n")
    told = "fleet.yaml:3:17: phase 'a': image: incus makes its boxes of one, and none is named\n"
    assert call("fleet", "validate") == (125, "", told)
    write("name: demo\nimage: x\nphases:\n  a: {provider: incus}\n")
    assert call("fleet", "validate")[0] == 0
