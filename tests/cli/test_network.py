"""`skerry network`, and rules in the options of a new sandbox."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import click
import pytest
from gate.own_gate import end_gates, gates, kill_gate

from skerry.errors import InvalidSpec
from skerry.model.secrets import Secret

from .conftest import Run
from .screen import PROGRAM
from .test_options import spec_of
from .test_registry import complete

FETCH = (
    "import sys, urllib.request as u;"
    "print(u.build_opener(u.ProxyHandler({})).open(sys.argv[1], timeout=10).read().decode())"
)


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a web server that says hello."""
    with HTTPServer(("127.0.0.1", 0), _Hello) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch, boxes: Path, own_settings: Path) -> Iterator[Path]:
    """A state folder whose gate goes with the test; the names of the tests are this host."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-", dir="/tmp"))
    monkeypatch.setenv("SKERRY_STATE_DIR", str(folder))
    own_settings.write_text(
        '[network]\nhosts = {"web.test" = "127.0.0.1"}\nsets = {corp = ["web.test:81", "*.corp.example"]}\n'
    )
    yield folder
    end_gates(folder)
    shutil.rmtree(folder)


def test_rules_and_secrets_are_options() -> None:
    spec = spec_of("--allow", "PyPI.org, github.com:22", "--allow", "python", "--deny", "upload.pypi.org")
    assert (spec.allow, spec.deny) == (("pypi.org", "github.com:22", "python"), ("upload.pypi.org",))
    assert spec.network == "rules"
    assert spec_of("--allow", "python", "--egress", "1.5M").egress == 3 << 19
    with pytest.raises(InvalidSpec, match="egress: a box on the network host"):
        spec_of("--network", "host", "--egress", "1M")
    secrets = spec_of(
        "--secret", "A=api.test", "--secret", "B=api.test,*.b.test:8443,env=OTHER", "--secret", "C=c.test,file=x",
        "--secret", "D=d.test,hook=sign:it,command=print 'a,b' c",
    ).secrets  # fmt: skip
    assert secrets["A"] == Secret(hosts=("api.test",))
    assert secrets["B"] == Secret(hosts=("api.test", "*.b.test:8443"), env="OTHER")
    assert secrets["C"] == Secret(hosts=("c.test",), file=str(Path.cwd() / "x"))
    assert secrets["D"] == Secret(hosts=("d.test",), hook="sign:it", command=("print", "a,b", "c"))
    mistakes = {
        "A": "which hosts",
        "A=": "which hosts",
        "=api.test": "which hosts",
        "A=env=B": "which hosts",
        "A=api.test,value=x": "no value=; there are env=, file=, command= and hook=$",
        "A=api.test,file=": "file= is empty",
        "A=api.test,command=": "command= is empty",
        "A=api.test,command='x": "No closing quotation",
    }
    for wrong, reason in mistakes.items():
        with pytest.raises(click.UsageError, match=reason):
            spec_of("--secret", wrong)
    with pytest.raises(InvalidSpec, match="bridge does not need the gate"):
        spec_of("--allow", "pypi.org", "--network", "bridge")


def test_a_value_in_place_of_a_secret_is_not_told_to_anybody() -> None:
    with pytest.raises(click.UsageError) as raised:
        spec_of("--secret", "TOKEN=value=hunter2")
    assert "hunter2" not in str(raised.value)


def test_run_reaches_what_it_is_allowed_to(skerry: Run, state: Path, port: int) -> None:
    fetch = ("--", "python3", "-c", FETCH, f"http://web.test:{port}/")
    done = skerry("run", "--allow", f"web.test:{port}", *fetch)
    assert (done.returncode, done.stdout) == (0, b"hello\n"), done.stderr
    done = skerry("run", "--network", "rules", *fetch)
    assert done.returncode == 1, done.stderr
    assert b"Error" in done.stderr or b"error" in done.stderr


def test_programs_that_begin_at_once_start_one_gate(state: Path) -> None:
    argv = [*PROGRAM, "create", "--network", "rules"]
    programs = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(6)]
    made = [program.communicate(timeout=60) for program in programs]
    assert [program.returncode for program in programs] == [0] * 6, made
    assert len(gates(state)) == 1
    ids = [out.decode().strip() for out, _ in made]
    subprocess.run([*PROGRAM, "rm", "-f", *ids], check=True, stdout=subprocess.DEVNULL, timeout=60)


def test_rules_are_shown_and_changed(skerry: Run, state: Path, port: int) -> None:
    made = skerry("create", "--name", "it", "--allow", "corp", "--deny", "bad.corp.example")
    assert made.returncode == 0, made.stderr
    fetch = ("exec", "it", "--", "python3", "-c", FETCH, f"http://web.test:{port}/")
    assert skerry(*fetch).returncode == 1
    shown = skerry("network", "show", "it").stdout.decode()
    assert shown.split("\n")[:3] == ["network  rules", "allow    corp", "deny     bad.corp.example"]
    told = json.loads(skerry("network", "allow", "it", f"web.test:{port},pypi.org", "--json").stdout)
    assert told == {
        "network": "rules",
        "allow": ["corp", f"web.test:{port}", "pypi.org"],
        "deny": ["bad.corp.example"],
        "reach": [],
        "secrets": {},
    }
    assert skerry(*fetch).stdout == b"hello\n"
    assert skerry("network", "deny", "it", f"web.test:{port}").returncode == 0
    assert skerry(*fetch).returncode == 1
    told = json.loads(skerry("network", "set", "it", "--allow", "python", "--deny", "", "--json").stdout)
    assert (told["allow"], told["deny"]) == (["python"], [])
    assert b"REACHES" in (listed := skerry("ps").stdout)
    assert b"python" in listed
    assert json.loads(skerry("inspect", "it").stdout)[0]["spec"]["allow"] == ["python"]
    assert skerry("rm", "-f", "it").returncode == 0


def test_mistakes_are_told_with_their_codes(skerry: Run, state: Path) -> None:
    assert skerry("create", "--name", "it").returncode == 0
    done = skerry("network", "allow", "it", "pypi.org", "--json")
    assert done.returncode == 125
    assert json.loads(done.stdout)["error"]["code"] == "wrong_state"
    assert skerry("network", "set", "it").returncode == 125
    assert b"no rule is given" in skerry("network", "allow", "it", "").stderr
    assert skerry("network", "show", "nobody").returncode == 125
    assert skerry("rm", "-f", "it").returncode == 0


def test_the_shell_completes_sets_networks_and_secrets(skerry: Run, state: Path) -> None:
    assert complete(skerry, "skerry run --allow corp,py") == ["corp,python"]
    assert complete(skerry, "skerry network deny it cor") == ["corp"]
    assert complete(skerry, "skerry network set it --allow no") == ["node"]
    assert complete(skerry, "skerry create --network r") == ["rules"]
    assert complete(skerry, "skerry ledger show --kind ref") == ["refuse"]
    made = skerry("create", "--name", "it", "--secret", "TOKEN=api.test", env={"TOKEN": "hunter2hunter2"})
    assert made.returncode == 0, made.stderr
    assert complete(skerry, "skerry network provide it ") == ["TOKEN"]
    assert skerry("rm", "it").returncode == 0


def test_sets_are_listed_those_of_the_file_too(call: Callable[..., tuple[int, str, str]], own_settings: Path) -> None:
    own_settings.write_text('[network.sets]\ncorp = ["*.corp.example"]\n')
    code, out, _ = call("network", "sets", "--json")
    assert (code, json.loads(out)["corp"]) == (0, ["*.corp.example"])
    assert "pypi.org" in json.loads(out)["python"]
    code, out, _ = call("network", "sets")
    assert [line.split()[0] for line in out.splitlines()][:3] == ["NAME", "alpine", "anthropic"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("network = 3", "must hold tables"),
        ("[network]\nhost = {}", "unknown key 'network.host'"),
        ('[network.hosts]\n"db.internal" = "10.1.0.300"', "does not appear to be an IPv4"),
        ('[network.hosts]\n"db.internal" = []', "must be a text, or a list of texts"),
        ('[network.hosts]\n"DB.internal" = "10.1.0.3"', "the name is written db.internal"),
        ('[network.sets]\n"corp.example" = ["a.example"]', "the name of a set"),
        ('[network.sets]\ncorp = ["http://a.example"]', "no URL; write a.example"),
    ],
)
def test_settings_that_are_wrong_are_errors_that_name_the_file(
    call: Callable[..., tuple[int, str, str]], own_settings: Path, text: str, said: str
) -> None:
    own_settings.write_text(text)
    code, _, err = call("config")
    assert code == 125
    assert said in err
    assert str(own_settings) in err


def test_the_settings_are_shown(call: Callable[..., tuple[int, str, str]], own_settings: Path) -> None:
    own_settings.write_text('[network.hosts]\n"db.internal" = ["10.1.0.5", "fd00:0::1"]\n')
    shown = json.loads(call("config", "--json")[1])["network.hosts.db.internal"]
    assert shown == {"value": ["10.1.0.5", "fd00::1"], "origin": str(own_settings)}


def test_the_doctor_tells_of_the_gate(skerry: Run, state: Path) -> None:
    def gate() -> dict[str, object]:
        found: dict[str, object] = json.loads(skerry("doctor", "--json").stdout)["gate"]
        return found

    assert gate() == {
        "running": False, "answers": False, "pid": None, "needed_by": 0, "serves": 0, "down": {}, "error": "",
    }  # fmt: skip
    assert skerry("create", "--name", "it", "--network", "rules").returncode == 0
    (process,) = gates(state)
    assert gate().items() >= {"running": True, "pid": process.pid, "needed_by": 1, "serves": 1, "down": {}}.items()
    kill_gate(state)
    assert gate().items() >= {"running": False, "needed_by": 1}.items()
    assert b"`skerry ps` starts it" in skerry("doctor").stdout
    assert skerry("ps").returncode == 0
    assert gate()["running"] is True
    assert skerry("rm", "-f", "it").returncode == 0
