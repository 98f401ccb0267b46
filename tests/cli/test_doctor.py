"""What `skerry doctor` tells of container engines: of one that is there, of none, and of one that says nothing."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines.daemons import Daemon

Doctor = Callable[..., dict[str, Any]]


@pytest.fixture
def engine(call: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """What it finds of `docker` at an address."""
    monkeypatch.setenv("SKERRY_PROVIDER", "docker")

    def examine(address: str) -> dict[str, Any]:
        monkeypatch.setenv("DOCKER_HOST", address)
        code, out, _ = call("doctor", "--json")
        found: dict[str, Any] = next(each for each in json.loads(out)["providers"] if each["name"] == "docker")
        assert code == (0 if found["available"] else 125)
        return found

    return examine


def test_it_tells_where_a_daemon_is_and_how_limits_are_held(engine: Doctor, docker_daemon: Daemon) -> None:
    found = engine(docker_daemon.address)
    details = found["details"]
    assert found["isolation"] == "container"
    assert details["daemon"]["by"] == f"{docker_daemon.address}, on this machine"
    assert details["memory"]["by"] == "the engine's cgroup, without swap"
    assert "loop device" in details["disk"]["by"] or "tmpfs" in details["disk"]["by"]
    assert "runc" in details["runtimes"]["by"].split(", ")


def test_it_tells_that_docker_knows_gvisor(engine: Doctor, docker_daemon: Daemon, gvisor: str) -> None:
    assert engine(docker_daemon.address)["details"]["gvisor"]["by"] == f"runtime {gvisor}"


def test_it_tells_how_to_get_a_daemon_that_is_not_there(engine: Doctor, tmp_path: Path) -> None:
    found = engine(f"unix://{tmp_path}/none.sock")
    assert "No such file or directory" in found["reason"]
    assert found["fix"].startswith("install Docker")


def test_a_daemon_that_says_nothing_is_not_waited_for_long(
    engine: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.providers.engine.provider._CHECK_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/mute.sock")
        listener.listen()
        found = engine(f"unix://{tmp_path}/mute.sock")
    assert "did not answer within 0.05 s" in found["reason"]
    assert found["fix"].startswith("install Docker")
