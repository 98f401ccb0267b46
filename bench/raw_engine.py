"""A container engine without us in between: plain requests to its API, and nothing asked for that is not needed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.engines.api import Refused, ask, ask_json
from tests.engines.daemons import NotStartable, running
from tests.engines.images import load

__all__ = ["NotStartable", "RawEngine", "started"]

_ULIMITS = [{"Name": "nofile", "Soft": 1024, "Hard": 1024}, {"Name": "nproc", "Soft": 4096, "Hard": 4096}]
"""Podman's defaults are more than a root without CAP_SYS_RESOURCE may give."""


class RawEngine:
    """What anybody could do at best with the engine's own means."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address

    def run(self, image: str, runtime: str = "") -> str:
        """Create and start: the id of a container in which a process waits."""
        host = {"NetworkMode": "none", "Runtime": runtime, "Ulimits": _ULIMITS if self.name == "podman" else []}
        body = {"Image": image, "Cmd": ["sleep", "3600"], "HostConfig": host}
        id: str = ask_json(self.address, "POST", "/containers/create", json_body=body)["Id"]
        ask(self.address, "POST", f"/containers/{id}/start")
        return id

    def exec(self, id: str, argv: Sequence[str]) -> bytes:
        """Output and end of a command: create, start, read all, ask for the code."""
        body = {"Cmd": list(argv), "AttachStdout": True, "AttachStderr": True}
        exec_id = ask_json(self.address, "POST", f"/containers/{id}/exec", json_body=body)["Id"]
        output = ask(self.address, "POST", f"/exec/{exec_id}/start", json_body={"Detach": False, "Tty": False})
        code = ask_json(self.address, "GET", f"/exec/{exec_id}/json")["ExitCode"]
        if code != 0:
            raise RuntimeError(f"{argv} ended with code {code}: {output!r}")
        return output

    def put(self, id: str, folder: str, tar: bytes) -> None:
        ask(self.address, "PUT", f"/containers/{id}/archive", {"path": folder}, body=tar)

    def get(self, id: str, path: str) -> bytes:
        return ask(self.address, "GET", f"/containers/{id}/archive", {"path": path})

    def commit(self, id: str, name: str) -> None:
        ask(self.address, "POST", "/commit", {"container": id, "repo": name}, json_body={})

    def remove(self, id: str) -> None:
        with suppress(Refused):
            ask(self.address, "DELETE", f"/containers/{id}", {"force": "1", "v": "1"})


@contextmanager
def started(name: str, *images: str) -> Iterator[RawEngine]:
    """A daemon of our own with these images, for as long as this lasts."""
    with running(name) as daemon:
        for image in images:
            load(daemon.address, image)
        yield RawEngine(name, daemon.address)


def client_environment(engine: RawEngine) -> dict[str, str]:
    """For programs and libraries that find their daemon by the environment."""
    return {**os.environ, "DOCKER_HOST": engine.address}
