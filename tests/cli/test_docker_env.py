"""`skerry docker-env` with machines that are none, and the real docker command."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator

import pytest
from engines.daemons import Daemon
from providers.vmdocker.fakes import FakeMachines

from skerry.config import Config
from skerry.providers.vmdocker import VmDocker, VmDockerConfig

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def state_dir() -> Iterator[str]:
    """Its name is one that a shell would take apart, and short, as it holds sockets."""
    with tempfile.TemporaryDirectory(prefix="skerry-", dir="/tmp") as folder:
        yield f"{folder}/it's $HERE"


@pytest.fixture
def machines(docker_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, state_dir: str) -> FakeMachines:
    """What the command's own provider has for machines."""
    machines = FakeMachines(docker_daemon.address)
    config = VmDockerConfig(state_dir=state_dir, idle_s=100)
    load = Config.load_provider

    def provider(self: Config, name: str) -> object:
        return VmDocker(config, machines=machines) if name == "vmdocker" else load(self, name)

    monkeypatch.setattr(Config, "load_provider", provider)
    return machines


def test_a_project_without_a_machine_is_an_error_that_says_how(call: Call, machines: FakeMachines) -> None:
    code, out, err = call("docker-env", "alpha")
    assert (code, out) == (125, "")
    assert "--start" in err
    assert not machines.starts


def test_it_starts_a_machine_if_asked_and_prints_what_a_shell_takes(
    call: Call, machines: FakeMachines, state_dir: str
) -> None:
    assert call("docker-env", "alpha", "--start")[0] == 0
    code, out, _ = call("docker-env", "alpha")
    assert code == 0
    assert machines.starts == ["alpha"]
    shell = subprocess.run(
        ["sh", "-c", 'eval "$1"; printf %s "$DOCKER_HOST"', "sh", out], capture_output=True, check=True, timeout=10
    )
    assert shell.stdout.decode() == shlex.split(out)[1].removeprefix("DOCKER_HOST=")
    assert shell.stdout.decode().startswith(f"unix://{state_dir}/")


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker command here")
def test_the_docker_command_speaks_with_it(call: Call, machines: FakeMachines) -> None:
    code, out, _ = call("docker-env", "alpha", "--start", "--json")
    assert code == 0
    told = json.loads(out)
    assert told["project"] == "alpha"
    asked = subprocess.run(
        ["docker", "info", "--format", "{{.OSType}}"],
        env={**os.environ, "DOCKER_HOST": told["docker_host"]},
        capture_output=True,
        timeout=30,
    )
    assert asked.stdout == b"linux\n", asked.stderr


def test_a_provider_without_such_machines_is_refused(call: Call) -> None:
    code, _, err = call("docker-env", "alpha", "--provider", "mock")
    assert code == 125
    assert "use vmdocker" in err
