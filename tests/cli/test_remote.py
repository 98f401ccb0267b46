"""The command line against a server: the same commands, in processes of their own, and contexts."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from loopback import free_port

from .conftest import Run
from .screen import PROGRAM, Screen

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("cli-remote")]
FLEET = """
name: crew
phases:
  db: {count: 1}
  web: {count: 2, wait_for: [db]}
"""


class Place:
    """A server, and a client that shares nothing with it but its address and a token."""

    def __init__(self, url: str, token: str, run: Run, client: Path) -> None:
        self.url = url
        self.token = token
        self.env = {"SKERRY_URL": url, "SKERRY_TOKEN": token, "SKERRY_STATE_DIR": str(client)}
        self._run = run

    def __call__(self, *args: str, code: int = 0, input: bytes | None = None) -> str:
        done = self._run(*args, env=self.env, input=input, timeout=60)
        assert done.returncode == code, (done.stdout, done.stderr)
        self.errors = done.stderr.decode()
        return done.stdout.decode()


@pytest.fixture
def served(skerry: Run, boxes: Path, tmp_path: Path) -> Iterator[Place]:
    """A real `skerry serve`, whose sandboxes are real."""
    port = free_port()
    argv = [*PROGRAM, "serve", "--listen", f"127.0.0.1:{port}", "--socket", "off", "--no-link"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
        try:
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], 60)[0], "the server says nothing"
            assert str(port).encode() in server.stdout.readline()
            token = skerry("token", "create").stdout.decode().strip()
            place = Place(f"http://127.0.0.1:{port}", token, skerry, tmp_path / "client")
            yield place
            place("rm", "--all")
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=30)
    assert not (tmp_path / "client").exists(), "the client has made a registry of its own"


def test_commands_do_on_a_server_what_they_do_at_home(served: Place, tmp_path: Path) -> None:
    assert served("run", "--", "echo", "hello") == "hello\n"
    id = served("create", "--name", "box", "--label", "a=b").strip()
    assert json.loads(served("ps", "--json"))[0]["id"] == id
    assert served("exec", "-i", "box", "--", "cat", input=b"typed") == "typed"
    assert served("exec", "box", "--", "sh", "-c", "echo out; exit 5", code=5) == "out\n"
    (tmp_path / "file").write_text("content")
    served("cp", str(tmp_path / "file"), "box:there")
    assert served("cp", "box:there", "-") == "content"
    number = served("exec", "-d", "box", "--", "sh", "-c", "echo said; sleep 60").strip()
    assert "sleep 60" in served("top", "box")
    assert served("logs", "box", number) == "said\n"
    assert served("kill", "box", number).strip() == number
    assert "box" in served("stats", "--no-stream")
    assert json.loads(served("inspect", "box"))[0]["reachable"]
    assert "lifetime" in served("explain", "box")
    assert "created" in served("events")
    assert json.loads(served("network", "show", "box", "--json"))["network"] == "none"
    assert "exec" in served("ledger", "show", "--sandbox", "box")
    assert "whole" in served("ledger", "verify")
    assert served("reconcile", "--quiet") == ""
    assert json.loads(served("volume", "ls", "--json")) == []
    assert json.loads(served("snapshot", "ls", "--json")) == []
    assert "local" in served("doctor")
    served("wait", "--timeout", "0.2s", "box", code=124)
    served("pause", "box", code=125)
    assert "pause" in served.errors
    served("image", "ls", code=125)
    served("pool", "run", code=125)
    assert served.url in served.errors
    assert served("rm", "box").strip() == "box"
    served("exec", "box", "--", "true", code=125)
    assert "removed" in served("prune")


def test_a_fleet_is_brought_up_and_down(served: Place, tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    assert "3 to create" in served("fleet", "plan", str(file))
    served("fleet", "up", str(file))
    assert len(json.loads(served("fleet", "status", "-f", str(file), "--json"))) == 3
    said = served("fleet", "exec", "-f", str(file), "web", "--", "echo", "here")
    assert said.count("here") == 2
    served("fleet", "scale", "-f", str(file), "web=1")
    assert json.loads(served("fleet", "ls", "--json"))[0]["members"] == 2
    assert len(served("fleet", "down", "--fleet", "crew").split()) == 2


def test_a_terminal_is_on_the_server(
    served: Place, open_screen: Callable[..., Screen], monkeypatch: pytest.MonkeyPatch
) -> None:
    served("create", "--name", "box")
    for name, value in served.env.items():
        monkeypatch.setenv(name, value)
    screen = open_screen("exec", "-it", "box", "--", "sh")
    screen.type("stty size\n")
    screen.wait_for("30 100")
    screen.resize(40, 120)
    screen.process.send_signal(signal.SIGWINCH)
    screen.type("sleep 0.2; stty size\n")
    screen.wait_for("40 120")
    screen.type("exit 3\n")
    assert screen.wait() == 3


def test_what_a_token_may_not_is_told(served: Place, skerry: Run) -> None:
    assert skerry("tenant", "add", "acme").returncode == 0
    token = skerry("token", "create", "--tenant", "acme", "--scope", "sandbox:read").stdout.decode().strip()
    served("create", "--name", "secret")
    served.env["SKERRY_TOKEN"] = token
    assert json.loads(served("ps", "--json")) == []
    served("create", code=125)
    assert "sandbox:create" in served.errors
    served("inspect", "secret", code=125)
    served("doctor", code=125)
    served.env["SKERRY_TOKEN"] = served.token


def test_tenants_and_tokens_are_the_servers(served: Place) -> None:
    assert (
        served("tenant", "add", "acme", "--sandboxes", "1", "--memory", "1G", "--note", "the build farm").strip()
        == "acme"
    )
    served("tenant", "add", "acme", code=125)
    served("tenant", "set", "acme", "--memory", "none")
    (acme,) = json.loads(served("tenant", "ls", "--json"))
    assert (acme["quota"]["sandboxes"], acme["quota"]["memory"], acme["note"]) == (1, None, "the build farm")
    made = json.loads(served("token", "create", "--tenant", "acme", "--expires", "1h", "--note", "ci", "--json"))
    (listed,) = json.loads(served("token", "ls", "--tenant", "acme", "--json"))
    assert listed["id"] == made["id"]
    assert listed["created_by"].startswith("token:")
    assert made["token"] not in served("token", "ls")
    served.env["SKERRY_TOKEN"] = made["token"]
    served("create", "--name", "box")
    served("tenant", "ls", code=125)
    assert "admin" in served.errors
    served.env["SKERRY_TOKEN"] = served.token
    served("tenant", "rm", "acme", code=125)
    assert "1 sandboxes" in served.errors
    own = next(each["id"] for each in json.loads(served("token", "ls", "--json")) if each["tenant"] is None)
    assert served("tenant", "rm", "acme", "--destroy").strip() == "acme"
    assert served("token", "ls", "-q").split() == [own]
    served("token", "rm", "0" * 12, code=125)
    other = json.loads(served("token", "create", "--scope", "sandbox:read", "--json"))["id"]
    assert served("token", "rm", other).strip() == other


def test_contexts_are_kept_for_their_user_alone(served: Place, skerry: Run, own_settings: Path) -> None:
    def run(*args: str, code: int = 0, input: bytes | None = None) -> str:
        done = skerry(*args, input=input)
        assert done.returncode == code, done.stderr
        return done.stdout.decode()

    file = own_settings.with_name("contexts.json")
    run("context", "add", "prod", served.url, "--token-file", "-", "--use", input=served.token.encode() + b"\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    listed = run("context", "ls")
    assert served.url in listed
    assert served.token not in listed
    assert served.token not in run("config")
    assert run("run", "--", "echo", "there").strip() == "there"
    made = run("create").strip()
    assert [each["id"] for each in json.loads(served("ps", "--json"))] == [made]
    # the variable goes before, and takes no other server's token along
    done = skerry("ps", env={"SKERRY_URL": served.url})
    assert done.returncode == 125
    assert b"token" in done.stderr
    run("context", "use", "here")
    assert "*" in run("context", "ls").splitlines()[1]
    run("context", "use", "missing", code=125)
    file.chmod(0o644)
    run("context", "ls", code=125)
    file.chmod(0o600)
    run("context", "rm", "prod")
    assert served.token.encode() not in file.read_bytes()
    assert os.path.exists(file)


@pytest.mark.parametrize("args", [("here", "http://x"), ("a b", "http://x"), ("x", "ftp://x"), ("x", "nothing")])
def test_what_is_no_context_is_refused(skerry: Run, args: tuple[str, str]) -> None:
    assert skerry("context", "add", *args, "--no-token").returncode != 0
