"""The engines of the tests run, and leave nothing behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from escape.host import control_groups

from . import leftovers
from .api import ask, ask_json
from .daemons import Daemon, NotStartable, running
from .images import load

_LIMITS = {
    "NetworkMode": "none",
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "SecurityOpt": ["no-new-privileges"],
    "Memory": 128 << 20,
    "MemorySwap": 128 << 20,
    "PidsLimit": 64,
    "Tmpfs": {"/tmp": "rw,nosuid,nodev,size=16m"},
}


def run(daemon: Daemon, image: str, *command: str, **host: Any) -> tuple[int, str]:
    """The exit code and the output of a container that is removed again."""
    wanted = {"Image": image, "Cmd": command, "Tty": True, "User": "1000:1000", "HostConfig": {**_LIMITS, **host}}
    id = ask_json(daemon.address, "POST", "/containers/create", json_body=wanted)["Id"]
    try:
        ask(daemon.address, "POST", f"/containers/{id}/start")
        code = ask_json(daemon.address, "POST", f"/containers/{id}/wait")["StatusCode"]
        output = ask(daemon.address, "GET", f"/containers/{id}/logs", {"stdout": "1", "stderr": "1"})
    finally:
        ask(daemon.address, "DELETE", f"/containers/{id}", {"force": "1", "v": "1"})
    return code, output.decode()


def sleeper(daemon: Daemon, image: str) -> str:
    wanted = {"Image": image, "Cmd": ["sleep", "1000"], "HostConfig": _LIMITS}
    id: str = ask_json(daemon.address, "POST", "/containers/create", json_body=wanted)["Id"]
    ask(daemon.address, "POST", f"/containers/{id}/start")
    return id


def state(daemon: Daemon, id: str) -> Any:
    return ask_json(daemon.address, "GET", f"/containers/{id}/json")["State"]


def is_alive(pid: int) -> bool:
    """A zombie is not: who reaps it is not ours to say."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] != "Z"


def test_docker_runs_a_container(docker_daemon: Daemon, docker_images: dict[str, str]) -> None:
    assert run(docker_daemon, docker_images["busybox"], "echo", "hello") == (0, "hello\r\n")


def test_docker_runs_a_container_with_gvisor(docker_daemon: Daemon, docker_images: dict[str, str], gvisor: str) -> None:
    code, output = run(docker_daemon, docker_images["busybox"], "dmesg", Runtime=gvisor)
    assert (code, "gVisor" in output) == (0, True)


def test_podman_runs_a_container(podman_daemon: Daemon, podman_images: dict[str, str]) -> None:
    code, output = run(podman_daemon, podman_images["busybox"], "echo", "hello")
    assert (code, output.split()) == (0, ["hello"])


def test_the_debian_image_has_python(docker_daemon: Daemon, docker_images: dict[str, str]) -> None:
    code, output = run(docker_daemon, docker_images["debian"], "python3", "-c", "import asyncio; print('ok')")
    assert (code, output) == (0, "ok\r\n")


def test_the_distroless_image_has_one_program(docker_daemon: Daemon, docker_images: dict[str, str]) -> None:
    assert run(docker_daemon, docker_images["distroless"], "/busybox", "ls", "/bin")[0] == 1


@pytest.mark.parametrize("name", ["docker", "podman"])
def test_a_stopped_engine_leaves_nothing(name: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"{name}_daemon")  # which skips where there is none
    with running(name) as daemon:
        folder = daemon.folder
        id = sleeper(daemon, load(daemon.address, "busybox"))
        ask(daemon.address, "POST", "/volumes/create", json_body={"Name": "kept"})
        before = state(daemon, id)["Pid"]
        daemon.kill()
        assert is_alive(before)
        daemon.start()
        assert state(daemon, id)["Pid"] == before
        daemon.kill()  # and with a daemon that is dead there is nobody to ask
    assert leftovers.processes(folder) == []
    assert leftovers.mounts(folder) == []
    assert not folder.exists()
    assert not is_alive(before)
    assert control_groups(id) == []


def test_an_engine_that_is_not_installed_says_how_to_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.daemons._PATH", "/nowhere")
    with pytest.raises(NotStartable, match="scripts/install"), running("docker"):
        pass
