"""Packaging: the systemd unit, the image and the compose file say what the server knows. They are read, not run."""

from __future__ import annotations

import configparser
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from skerry import config
from skerry.cli import serve
from skerry.cli.serve import tell_systemd

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "packaging"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class _Unit(configparser.RawConfigParser):
    def optionxform(self, optionstr: str) -> str:
        return optionstr


def unit() -> _Unit:
    """The unit; of a name that comes again the last value."""
    parser = _Unit(strict=False, interpolation=None, delimiters=("=",), comment_prefixes=("#",))
    parser.read_string((FOLDER / "skerry.service").read_text())
    return parser


def variables(text: str) -> set[str]:
    return set(re.findall(r"\bSKERRY_[A-Z_]+(?=[=:] ?)", text))


def test_the_unit_starts_reloads_and_ends_the_server_and_leaves_sandboxes_alone() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["ExecStart"].split()[1:] == ["serve", "--no-link"]
    assert service["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert service["KillMode"] == "process"
    assert float(service["TimeoutStopSec"]) > config.ServerSettings().drain_s
    assert service["StateDirectory"] == "skerry"


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, each with its arguments."""
    text = re.sub(r"\\\n\s*", " ", (FOLDER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_image_serves_as_nobody_of_importance() -> None:
    found = dict(dockerfile())
    assert {word for word, _ in dockerfile()} <= {
        "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "ENTRYPOINT",
        "CMD",
    }  # fmt: skip
    assert found["USER"] == "10001:10001"
    assert (found["ENTRYPOINT"], found["CMD"]) == ('["skerry"]', '["serve", "--no-link"]')
    (extras,) = re.findall(r"'\.\[([a-z,]+)\]'", (FOLDER / "Dockerfile").read_text())
    assert set(extras.split(",")) <= set(EXTRAS)
    for _, sources in (each for each in dockerfile() if each[0] == "COPY" and "--from" not in each[1]):
        assert all((ROOT / source).exists() for source in sources.split()[:-1])


def compose() -> dict[str, Any]:
    found: dict[str, Any] = YAML(typ="safe").load((FOLDER / "compose.yaml").read_text())
    return found


def test_the_compose_file_has_two_servers_on_one_registry() -> None:
    services = compose()["services"]
    assert set(services) == {"first", "second", "registry"}
    for name in ("first", "second"):
        server = services[name]
        assert server["cap_drop"] == ["ALL"]
        assert server["read_only"]
        assert (ROOT / "packaging" / server["build"]["context"] / server["build"]["dockerfile"]).exists()
        assert {volume.partition(":")[0] for volume in server["volumes"]} >= {name, "/var/run/docker.sock"}
    assert services["first"]["environment"] == services["second"]["environment"]
    assert set(compose()["volumes"]) == {"first", "second", "registry"}


@pytest.mark.parametrize("name", ["skerry.service", "Dockerfile", "compose.yaml"])
def test_all_settings_that_are_named_are_there(name: str) -> None:
    known = {f"SKERRY_{key.upper().replace('.', '__')}" for key in config._KEYS}
    assert variables((FOLDER / name).read_text()) - {"SKERRY_TLS", "SKERRY_HOST"} <= known


def test_the_flags_that_are_named_are_there() -> None:
    shown = CliRunner().invoke(serve.serve, ["--help"]).output
    for flag in compose()["services"]["first"]["command"]:
        assert not flag.startswith("--") or flag in shown


def test_systemd_is_told_how_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    tell_systemd("READY=1")
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(os.fspath(path))
        listening.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        tell_systemd("READY=1")
        assert listening.recv(100) == b"READY=1"
