"""Snapshots, forks, volumes and caches on the command line, on a provider that has them all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.errors import ProviderUnavailable
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec, parse_id
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.units import format_size

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def box(mock: Mock, call: Call) -> str:
    code, out, err = call("create", "--name", "box", "--image", "app")
    assert code == 0, err
    return out.strip()


def write(call: Call, sandbox: str, text: str) -> None:
    assert call("exec", sandbox, "--", "sh", "-c", f"echo {text} > f; echo {text} > /.data/f") == (0, "", "")


def read(call: Call, sandbox: str, path: str = "f") -> str:
    return call("exec", sandbox, "--", "cat", path)[1].strip()


def test_a_snapshot_is_taken_listed_restored_and_removed(call: Call, box: str) -> None:
    write(call, "box", "before")
    assert call("snapshot", "create", "box", "one") == (0, "one\n", "")
    write(call, "box", "after")
    header, row = call("snapshot", "ls")[1].splitlines()
    assert header.split() == ["NAME", "SANDBOX", "SIZE", "CREATED"]
    assert row.split()[:2] == ["one", box[:12]]
    assert call("snapshot", "ls", "-q") == (0, "one\n", "")
    assert [each["sandbox"] for each in json.loads(call("snapshot", "ls", "--json")[1])] == [box]
    assert call("restore", "box", "one", "-e", "A=1") == (0, "box\n", "")
    assert (read(call, "box"), read(call, "box", "/.data/f")) == ("before", "after")
    assert call("exec", "box", "--", "sh", "-c", "echo $A")[1] == "1\n"
    code, out, err = call("snapshot", "rm", "one", "two")
    assert (code, out) == (125, "")
    assert "one: " in err
    assert "two: " in err
    assert call("rm", "-v", "box")[0] == 0
    assert call("snapshot", "rm", "one", "--json")[0] == 0
    assert json.loads(call("snapshot", "ls", "--json")[1]) == []


def test_restore_tells_the_record_as_json(call: Call, box: str) -> None:
    assert json.loads(call("snapshot", "create", "box", "one", "--json")[1])["name"] == "one"
    told = json.loads(call("restore", "box", "one", "--json")[1])
    assert (told["id"], told["state"]) == (box, "ready")
    code, out, _ = call("restore", "box", "nothing", "--json")
    assert (code, json.loads(out)["error"]["code"]) == (125, "not_found")


def test_many_forks_are_made_of_one_moment(call: Call, box: str) -> None:
    write(call, "box", "same")
    code, out, _ = call("fork", "box", "--count", "3")
    forks = out.split()
    assert (code, len({box, *forks})) == (0, 4)
    assert [read(call, each) for each in forks] == ["same"] * 3
    assert len(json.loads(call("fork", "box", "--count", "2", "--json")[1])) == 2
    code, out, err = call("fork", "box", "--count", "2", "--name", "both")
    assert (code, out) == (125, "")
    assert "count" in err


@pytest.mark.parametrize(
    "words",
    [("pause", "--save", "box"), ("snapshot", "create", "box", "warm", "--memory"), ("fork", "box", "--memory")],
)
def test_memory_is_refused_where_it_cannot_be_kept(call: Call, box: str, words: tuple[str, ...]) -> None:
    code, out, err = call(*words)
    assert (code, out) == (125, "")
    assert "memory" in err
    assert [each["state"] for each in json.loads(call("ps", "--json")[1])] == ["ready"]


def test_a_fork_is_another_sandbox_with_the_same_files(call: Call, box: str) -> None:
    write(call, "box", "shared")
    code, out, _ = call("fork", "box", "--name", "copy", "-e", "A=1")
    assert code == 0
    assert out.strip() != box
    assert read(call, "copy") == "shared"
    assert call("exec", "copy", "--", "cat", "/.data/f")[0] != 0
    told = json.loads(call("fork", "copy", "--json")[1])
    assert told["name"] is None
    assert call("rm", "-v", "copy", told["id"], "box")[0] == 0


def test_start_gives_the_environment(call: Call, box: str) -> None:
    assert call("stop", "box")[0] == 0
    code, _, err = call("exec", "box", "true")
    assert code == 125
    assert "start it" in err
    assert call("start", "box", "-e", "A=1") == (0, "box\n", "")
    assert call("exec", "box", "--", "sh", "-c", "echo $A")[1] == "1\n"


def test_data_outlives_its_sandbox_and_is_removed_by_hand(call: Call, box: str) -> None:
    write(call, "box", "kept")
    assert call("rm", "box")[0] == 0
    header, row = call("volume", "ls", "--size")[1].splitlines()
    assert header.split()[:5] == ["NAME", "KIND", "PROJECT", "OF", "SIZE"]
    name, kind, project, of = row.split()[:4]
    assert (kind, project, of) == ("data", "default", "box")
    assert call("create", "--name", "box")[0] == 0
    assert read(call, "box", "/.data/f") == "kept"
    code, _, err = call("volume", "rm", name)
    assert code == 125
    assert "used" in err
    assert call("rm", "box")[0] == 0
    assert call("volume", "rm", name) == (0, f"{name}\n", "")
    assert json.loads(call("volume", "ls", "--json")[1]) == []


def test_caches_are_listed_and_removed_by_tool_and_project(call: Call, mock: Mock) -> None:
    async def fill(project: str) -> None:
        spec = Spec.of(provider="mock", project=project, cache="write")
        sandbox = await AsyncSandbox.create(spec, mock)
        await sandbox.files.write("/.cache/pip/f", "x" * 2048)
        await sandbox.destroy(volumes=True)

    asyncio.run(fill("a"))
    asyncio.run(fill("b"))
    told = json.loads(call("cache", "ls", "--json")[1])
    assert {each["project"] for each in told} == {"a", "b"}
    assert [each["size"] for each in told if each["label"] == "pip"] == [2048, 2048]
    assert format_size(2048) in call("cache", "ls", "--project", "a")[1]
    assert call("cache", "rm", "pip", "--project", "a")[0] == 0
    left = json.loads(call("cache", "ls", "--json")[1])
    assert [each["project"] for each in left if each["label"] == "pip"] == ["b"]
    code, _, err = call("cache", "rm", "pip", "--project", "a")
    assert code == 125
    assert "no cache of 'pip'" in err
    assert call("cache", "rm", "--all")[0] == 0
    assert json.loads(call("cache", "ls", "--json")[1]) == []


@pytest.mark.parametrize("args", [("volume", "ls"), ("cache", "ls"), ("snapshot", "ls")])
def test_a_provider_that_is_down_hides_nothing_of_the_others(
    call: Call, mock: Mock, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], tmp_path: Path
) -> None:
    async def fill() -> None:
        async with AsyncSandboxManager() as manager:
            sandbox = await manager.create(provider="mock", project="a", cache="write")
            await manager.snapshot(sandbox.id, "one")
            await manager.destroy(sandbox.id)

    asyncio.run(fill())
    monkeypatch.setenv("SKERRY_PROVIDER", "docker")
    monkeypatch.setenv("SKERRY_PROVIDERS__DOCKER__HOST", f"unix://{tmp_path}/nobody")
    code, out, err = call(*args, "-q")
    assert code == 125
    assert out
    assert err.startswith("skerry: docker: ")
    code, out, err = call(*args, "--json")
    *found, failed = json.loads(out)
    assert (code, err, bool(found)) == (125, "", True)
    assert (failed["provider"], failed["error"]["code"]) == ("docker", "provider_unavailable")
    assert call(*args, "--provider", "mock")[0] == 0


def test_ps_and_inspect_tell_what_was_done_by_hand(
    call: Call, mock: Mock, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asyncio.run(mock.stop(parse_id(box)))
    assert json.loads(call("inspect", "box")[1])[0]["state"] == "stopped"
    assert call("start", "box")[0] == 0
    asyncio.run(mock.stop(parse_id(box)))
    assert [each["state"] for each in json.loads(call("ps", "--json")[1])] == ["stopped"]
    assert call("ps", "-q", "--state", "stopped") == (0, f"{box}\n", "")

    async def fail(_mock: Mock) -> None:
        raise ProviderUnavailable("mock", "it is off", fix="switch it on")

    monkeypatch.setattr(Mock, "discover", fail)
    assert call("ps", "-q") == (
        0,
        f"{box}\n",
        "skerry: mock does not answer: its sandboxes are shown as they were last known\n",
    )


def test_caches_of_another_registry_are_left_alone(call: Call, mock: Mock) -> None:
    async def fill() -> None:
        spec = Spec.of(provider="mock", cache="write", labels={"skerry.instance": "another"})
        await (await AsyncSandbox.create(spec, mock)).destroy(volumes=True)

    asyncio.run(fill())
    there = json.loads(call("volume", "ls", "--json")[1])
    assert {each["instance"] for each in there} == {"another"}
    assert json.loads(call("cache", "ls", "--json")[1]) == []
    assert call("cache", "rm", "--all") == (0, "", "")
    assert call("cache", "rm", "pip")[0] == 125
    assert json.loads(call("volume", "ls", "--json")[1]) == there


@pytest.mark.parametrize(
    "args", [("cache", "rm"), ("cache", "rm", "--all", "pip"), ("snapshot", "rm"), ("volume", "rm")]
)
def test_what_is_unclear_is_refused(call: Call, mock: Mock, args: tuple[str, ...]) -> None:
    code, out, err = call(*args)
    assert (code, out) == (125, "")
    assert err.count("\n") == 1


def test_the_box_itself_has_a_log(call: Call, box: str) -> None:
    assert call("logs", "--box", "box") == (0, "mock: running\n", "")
    call("stop", "box")
    assert call("logs", "--box", "box", "-f", "--tail", "1") == (0, "mock: stopped\n", "")
    assert json.loads(call("logs", "--box", "box", "--json")[1]) == {"log": "mock: running\nmock: stopped\n"}
    assert call("logs", "box", "--tail", "1")[0] == 125


def test_reconcile_says_of_whom_nothing_is_known(
    call: Call, mock: Mock, box: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def be_gone(*_: object) -> None:
        raise ProviderUnavailable("mock", "it does not answer", fix="start it")

    monkeypatch.setattr(Mock, "discover", be_gone)
    monkeypatch.setattr(Mock, "check", be_gone)
    code, out, err = call("reconcile", "--json")
    assert (code, json.loads(out)) == (0, [])
    assert "it does not answer" in err
    assert "left as they are" in err


def test_what_is_outdated_is_told_and_rebuilt(call: Call, mock: Mock, box: str) -> None:
    write(call, "box", "old")
    mock.host.images["app"] = "newer"
    assert "leave" in call("reconcile")[1]
    (told,) = json.loads(call("reconcile", "--rebuild", "--dry-run", "--json")[1])
    assert (told["action"], told["outdated"]) == ("rebuild", True)
    assert read(call, "box") == "old"
    assert "rebuild" in call("reconcile", "--rebuild")[1]
    assert call("exec", "box", "--", "cat", "f")[0] != 0
    assert read(call, "box", "/.data/f") == "old"
    assert json.loads(call("reconcile", "--json")[1]) == []


@pytest.mark.parametrize("verb", ["stop", "rm"])
def test_an_end_takes_a_grace_time(call: Call, box: str, verb: str) -> None:
    code, _, err = call(verb, "--grace", "2h", "box")
    assert (code, "grace: 7200 s is out of range" in err) == (125, True)
    assert call(verb, "-t", "10s", "box")[0] == 0


def test_a_command_ends_after_the_time_of_its_sandbox_unless_it_has_its_own(call: Call, mock: Mock) -> None:
    call("create", "--name", "slow", "--default-timeout", "5s")
    code, _, err = call("exec", "slow", "--", "sleep", "100")
    assert (code, err) == (124, "skerry: the command was ended after 5 s, as the sandbox's timeout says\n")
    assert call("exec", "--timeout", "200s", "slow", "--", "sleep", "100") == (0, "", "")
