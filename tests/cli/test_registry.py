from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.cli.options import _STATES
from skerry.model.states import State

from .conftest import PROGRAM, Run, ids
from .screen import Screen

pytestmark = pytest.mark.usefixtures("boxes")


def out(done: subprocess.CompletedProcess[bytes]) -> str:
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def eventually(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def listed(skerry: Run, *args: str) -> list[str]:
    return out(skerry("ps", "-q", *args)).split()


def test_what_one_shell_makes_another_uses_and_a_third_removes(skerry: Run, boxes: Path) -> None:
    id = out(skerry("create", "--name", "shared")).strip()
    assert ids(boxes) == [id]
    assert out(skerry("exec", "shared", "--", "echo", "hi")) == "hi\n"
    assert out(skerry("exec", id[:6], "echo", "hi")) == "hi\n"
    assert listed(skerry) == [id]
    assert out(skerry("rm", "shared")) == "shared\n"
    assert ids(boxes) == []
    assert listed(skerry) == []
    assert listed(skerry, "-a") == [id]


def test_create_tells_all_as_json(skerry: Run) -> None:
    told = json.loads(out(skerry("create", "--json", "--label", "a=1", "--lifetime", "1h", "--project", "p")))
    assert told["state"] == "ready"
    assert (told["provider"], told["project"], told["labels"]) == ("local", "p", {"a": "1"})
    assert told["ends_at"] == pytest.approx(told["created_at"] + 3600, abs=30)
    assert told["enforced"]
    out(skerry("rm", told["id"]))


def test_the_same_create_with_the_same_key_gives_the_same_sandbox(skerry: Run) -> None:
    id = out(skerry("create", "--key", "k", "--label", "a=1"))
    assert out(skerry("create", "--key", "k", "--label", "a=1")) == id
    other = skerry("create", "--key", "k", "--label", "a=2")
    assert (other.returncode, other.stdout) == (125, b"")
    out(skerry("rm", id.strip()))


def test_a_name_is_given_once(skerry: Run, box: str) -> None:
    again = skerry("create", "--name", "box", "--json")
    assert again.returncode == 125
    assert json.loads(again.stdout)["error"]["code"] == "conflict"


def test_ps_is_a_table_that_tells_what_people_ask(skerry: Run) -> None:
    id = out(skerry("create", "--name", "one", "--label", "k=v", "--lifetime", "2h", "--idle", "10m")).strip()
    header, row = out(skerry("ps")).splitlines()
    assert header.split() == ["ID", "NAME", "PROVIDER", "STATE", "AGE", "ENDS", "LABELS"]
    assert row.split()[:4] == [id[:12], "one", "local", "ready"]
    assert "idle 10m" in row
    assert row.endswith("k=v")
    out(skerry("rm", "one"))
    assert "destroyed (user)" in out(skerry("ps", "--all"))


def test_ps_lists_only_what_the_filters_leave(skerry: Run) -> None:
    a = out(skerry("create", "--label", "k=1", "--label", "l=1", "--project", "p")).strip()
    b = out(skerry("create", "--label", "k=2")).strip()
    assert listed(skerry, "--label", "k=1") == [a]
    assert listed(skerry, "--label", "k=1", "--label", "l=2") == []
    assert listed(skerry, "--project", "p") == [a]
    assert listed(skerry, "--state", "ready", "--provider", "local") == [a, b]
    assert listed(skerry, "--state", "paused") == []
    assert listed(skerry, "--provider", "mock") == []
    assert [each["id"] for each in json.loads(out(skerry("ps", "--json", "--label", "k=2")))] == [b]
    assert skerry("ps", "--state", "nonsense").returncode == 125
    assert out(skerry("rm", "--all", "--label", "k=1")).split() == [a]
    assert out(skerry("rm", "--all")).split() == [b]


def test_the_states_to_choose_from_are_all_there_are() -> None:
    assert tuple(state.value for state in State) == _STATES


def test_rm_goes_on_past_what_it_cannot_remove(skerry: Run, box: str) -> None:
    done = skerry("rm", "nonsense", "box")
    assert (done.returncode, done.stdout) == (125, b"box\n")
    assert b"nonsense" in done.stderr
    done = skerry("rm", "--json", "nonsense", box)
    assert done.returncode == 125
    assert [each["ok"] for each in json.loads(done.stdout)] == [False, True]
    done = skerry("rm", "-f", "nonsense")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize("args", [(), ("--all", "x"), ("x", "--label", "a=1"), ("--all", "--label", "a")])
def test_rm_refuses_what_is_unclear(call, args: tuple[str, ...]) -> None:
    code, said, err = call("rm", *args)
    assert (code, said) == (125, "")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("grace", "said"), [("20s", ["ready", "bye"]), ("0", ["ready"])])
def test_rm_asks_processes_to_end_that_another_shell_started(
    skerry: Run, tmp_path: Path, grace: str, said: list[str]
) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    shown.chmod(0o777)
    out(skerry("create", "--name", "served", "-v", f"{shown}:/shown"))
    script = 'trap "echo bye >> /shown/said; exit" TERM; echo ready >> /shown/said; while :; do sleep 0.05; done'
    out(skerry("exec", "-d", "served", "--", "sh", "-c", script))
    eventually(lambda: (shown / "said").exists() and (shown / "said").read_text() == "ready\n")
    assert out(skerry("rm", "--grace", grace, "served")) == "served\n"
    assert (shown / "said").read_text().split() == said


def test_inspect_is_json_with_what_the_box_uses(skerry: Run, box: str) -> None:
    done = skerry("inspect", "box", "nonsense")
    assert done.returncode == 125
    assert b"nonsense" in done.stderr
    (told,) = json.loads(done.stdout)
    assert told["id"] == box
    assert told["reachable"]
    assert told["metrics"]["memory_bytes"] > 0
    assert all(how.keys() == {"by", "why_not"} for how in told["enforced"].values())
    out(skerry("rm", box))
    (told,) = json.loads(out(skerry("inspect", box)))
    assert told["cid"] >= 3
    assert (told["state"], told["cause"], told["reachable"], told["metrics"]) == ("destroyed", "user", False, None)


def test_wait_wakes_when_the_lifetime_ends_and_tells_so(skerry: Run, boxes: Path) -> None:
    id = out(skerry("create", "--name", "short", "--lifetime", "2s")).strip()
    begin = time.monotonic()
    assert out(skerry("wait", "short")) == "lifetime\n"
    assert time.monotonic() - begin < 15
    assert ids(boxes) == []
    (told,) = json.loads(out(skerry("wait", "--json", id)))
    assert (told["state"], told["cause"]) == ("destroyed", "lifetime")


def test_wait_gives_up_in_time(skerry: Run, box: str) -> None:
    done = skerry("wait", "box", "--timeout", "0.2s")
    assert (done.returncode, done.stdout) == (124, b"")


def test_explain_tells_when_it_ends_and_why_it_did(skerry: Run, box: str) -> None:
    told = out(skerry("explain", "box"))
    assert f"sandbox {box} is ready" in told
    assert "lifetime" in told
    assert json.loads(out(skerry("explain", "box", "--json")))["reachable"]
    out(skerry("rm", "box"))
    assert "user" in out(skerry("explain", box))


def test_events_are_told_in_order_and_from_where_one_left_off(skerry: Run, box: str) -> None:
    events = [json.loads(line) for line in out(skerry("events", "--json")).splitlines()]
    assert [event["kind"] for event in events] == ["created", "ready"]
    assert {event["sandbox"] for event in events} == {box}
    out(skerry("rm", box))
    lines = out(skerry("events", "--since", str(events[-1]["seq"]))).splitlines()
    assert "destroyed" in lines[-1]
    assert box[:12] in lines[-1]
    assert not any("created" in line for line in lines)


def test_events_are_followed_while_they_happen(skerry: Run) -> None:
    with subprocess.Popen([*PROGRAM, "events", "-f", "--json"], stdout=subprocess.PIPE) as follower:
        assert follower.stdout
        id = out(skerry("create")).strip()
        kinds = [json.loads(follower.stdout.readline())["kind"] for _ in range(2)]
        assert kinds == ["created", "ready"]
        out(skerry("rm", id))
        while json.loads(follower.stdout.readline())["kind"] != "destroyed":
            pass
        follower.send_signal(signal.SIGINT)
        assert follower.wait(20) == 130


def test_a_run_is_seen_from_another_shell_and_ends_with_its_program(skerry: Run, boxes: Path) -> None:
    with subprocess.Popen([*PROGRAM, "run", "sh", "-c", "echo up; sleep 60"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        (id,) = listed(skerry)
        assert out(skerry("exec", id, "echo", "hi")) == "hi\n"
        process.kill()
        process.wait()
    planned = json.loads(out(skerry("reconcile", "--dry-run", "--json")))
    assert [(each["id"], each["action"]) for each in planned] == [(id, "destroy")]
    assert ids(boxes) == [id]
    assert f"{id[:12]}  local     destroy" in out(skerry("reconcile"))
    assert ids(boxes) == []
    assert json.loads(out(skerry("reconcile", "--json"))) == []
    (told,) = json.loads(out(skerry("inspect", id)))
    assert (told["state"], told["cause"]) == ("destroyed", "owner_died")


def test_what_a_killed_run_left_is_gone_when_somebody_looks(skerry: Run, boxes: Path) -> None:
    with subprocess.Popen([*PROGRAM, "run", "sh", "-c", "echo up; sleep 60"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"up\n"
        process.kill()
        process.wait()
    assert listed(skerry) == []
    assert ids(boxes) == []


def test_a_kept_sandbox_outlives_its_run(skerry: Run) -> None:
    assert skerry("run", "--keep", "--name", "kept", "true").returncode == 0
    assert out(skerry("exec", "kept", "echo", "hi")) == "hi\n"
    out(skerry("rm", "kept"))


def test_prune_forgets_what_has_ended_and_nothing_else(skerry: Run, box: str) -> None:
    for _ in range(2):
        assert skerry("run", "true").returncode == 0
    assert len(listed(skerry, "-a")) == 3
    assert out(skerry("prune", "--older", "1h")) == "0 records removed\n"
    assert json.loads(out(skerry("prune", "--json"))) == {"removed": 2}
    assert listed(skerry, "-a") == [box]


def test_a_provider_that_can_stops_and_pauses(call) -> None:
    assert call("create", "--provider", "mock", "--name", "able")[0] == 0
    states = (("pause", "paused"), ("unpause", "ready"), ("stop", "stopped"), ("start", "ready"))
    for verb, state in states:
        assert call(verb, "able") == (0, "able\n", "")
        assert json.loads(call("inspect", "able")[1])[0]["state"] == state
    assert call("rm", "able")[0] == 0


@pytest.mark.parametrize("verb", ["stop", "start", "pause", "unpause"])
def test_what_a_provider_cannot_do_is_refused_clearly(skerry: Run, box: str, verb: str) -> None:
    done = skerry(verb, "box", "nonsense")
    assert (done.returncode, done.stdout) == (125, b"")
    assert done.stderr.count(b"\n") == 2
    assert json.loads(skerry(verb, "--json", "nonsense").stdout)[0]["error"]["code"] == "not_found"


@pytest.mark.parametrize("command", ["exec", "attach", "logs", "top", "kill", "inspect", "explain", "wait", "stats"])
def test_a_sandbox_that_is_not_there_is_named(skerry: Run, command: str) -> None:
    done = skerry(command, "nonsense", *(["true"] if command == "exec" else []))
    assert done.returncode == 125
    assert b"'nonsense'" in done.stderr


def complete(skerry: Run, words: str) -> list[str]:
    count = str(len(words.split()) - (not words.endswith(" ")))
    done = skerry(env={"_SKERRY_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count})
    return [line.partition(",")[2] for line in out(done).split()]


def test_names_and_ids_are_completed(skerry: Run, box: str) -> None:
    assert complete(skerry, "skerry exec ") == ["box", box[:12]]
    assert complete(skerry, "skerry rm bo") == ["box"]
    assert complete(skerry, f"skerry inspect {box[:3]}") == [box[:12]]
    assert complete(skerry, f"skerry top {box[:20]}") == [box]
    assert complete(skerry, "skerry logs x") == []


def test_a_registry_that_cannot_be_read_completes_nothing(skerry: Run, tmp_path: Path) -> None:
    state = tmp_path / "broken"
    state.mkdir()
    (state / "registry.db").write_bytes(os.urandom(10_000))
    words = {"_SKERRY_COMPLETE": "bash_complete", "COMP_WORDS": "skerry rm ", "COMP_CWORD": "2"}
    done = skerry(env={**words, "SKERRY_STATE_DIR": str(state)})
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\n", b"")


def test_what_takes_long_shows_that_it_goes_on(
    open_screen: Callable[..., Screen], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/mute.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/mute.sock")
        listener.listen()
        screen = open_screen("snapshot", "ls", "--provider", "docker")
        screen.wait_for("asking the providers")
        screen.type("\x03")
        assert screen.wait() == 130
