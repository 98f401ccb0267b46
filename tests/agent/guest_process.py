"""The real agent as an ordinary process of this host, with no box around it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from skerry.agent.bundle import GUEST
from skerry.agent.client import AgentClient
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.net.stream import FdStream, Stream
from skerry.sandbox.sandbox import AsyncSandbox

from .no_boxes import NoBoxes

OLDEST = (3, 8)
PATIENCE_S = 10.0


def interpreters() -> dict[str, str]:
    """One Python of each version on this machine that the agent must run on."""
    places = [Path(sys.executable), *Path("/usr/bin").glob("python3.*"), *Path("/usr/local/bin").glob("python3.*")]
    places += Path("~/.pyenv/versions").expanduser().glob("*/bin/python3")
    found: dict[tuple[int, int], str] = {}
    for path in places:
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            ask = [str(path), "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"]
            major, minor = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()
            if (int(major), int(minor)) >= OLDEST:
                found.setdefault((int(major), int(minor)), str(path))
    return {f"{major}.{minor}": found[major, minor] for major, minor in sorted(found)}


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Look again in small steps until it is so."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.005)


class Wire:
    """The host's end of a stream, spoken by hand."""

    def __init__(self, connection: socket.socket, *, greet: bool = True) -> None:
        self.socket = connection
        self.socket.settimeout(PATIENCE_S)
        self._kept = b""
        if greet:
            self.send({"id": 0, "method": "hello", "params": {"protocol": 1}})
            assert self.answer(0)["result"]["protocol"] == 1

    def send(self, message: Mapping[str, Any], attachment: bytes = b"") -> None:
        if attachment:
            message = {**message, "bytes": len(attachment)}
        self.socket.sendall(json.dumps(message).encode() + b"\n" + attachment)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next frame and its attachment; an empty one at the end of the stream."""
        while b"\n" not in self._kept:
            if not self._more():
                return {}, b""
        line, _, self._kept = self._kept.partition(b"\n")
        message = json.loads(line)
        count = message.get("bytes", 0)
        while len(self._kept) < count:
            assert self._more()
        attachment, self._kept = self._kept[:count], self._kept[count:]
        return message, attachment

    def _more(self) -> bool:
        try:
            data = self.socket.recv(1 << 18)
        except ConnectionResetError:
            data = b""
        self._kept += data
        return bool(data)

    def answer(self, id: int) -> dict[str, Any]:
        """The answer to a request; what else comes before it is passed over."""
        while True:
            message, _ = self.receive()
            assert message, "the agent closed the stream"
            if message.get("id") == id:
                return message

    def call(self, id: int, method: str, **params: Any) -> dict[str, Any]:
        self.send({"id": id, "method": method, "params": params})
        return self.answer(id)

    def is_closed(self) -> bool:
        while True:
            message, _ = self.receive()
            if not message:
                return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


class Guest:
    """An agent that listens on a socket; its home is a folder of its own."""

    around: tuple[str, ...] = ()
    """Command that runs the agent's."""
    program = GUEST
    """Folder of the agent."""

    def __init__(self, python: str = sys.executable, **config: Any) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="skerry-guest-"))
        self.path = f"{self.home}.sock"
        self._config = {"home": str(self.home), "env": {"PATH": "/usr/bin:/bin"}, **config}
        self._python = python
        self.log = Path(f"{self.home}.log")

    def __enter__(self) -> Self:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(100)
            self.process = self.start({"listen": {"fd": listener.fileno()}, **self._config}, listener.fileno())
        return self

    def start(self, config: dict[str, Any], *fds: int, **options: Any) -> subprocess.Popen[bytes]:
        argv = [*self.around, self._python, "-I", "-S", "-B", str(self.program / "start.py"), "id"]
        config_fd = os.memfd_create("config", 0)
        os.write(config_fd, json.dumps(config).encode())
        os.lseek(config_fd, 0, os.SEEK_SET)
        options.setdefault("stdin", subprocess.DEVNULL)
        try:
            with self.log.open("ab") as log:
                return subprocess.Popen([*argv, str(config_fd)], pass_fds=[config_fd, *fds], stderr=log, **options)
        finally:
            os.close(config_fd)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            shutil.rmtree(self.home, ignore_errors=True)
            complaints = self.log.read_text()
            for path in (Path(self.path), self.log):
                path.unlink(missing_ok=True)
        assert "Traceback" not in complaints, complaints[-1500:]

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        return connection

    def wire(self, *, greet: bool = True) -> Wire:
        return Wire(self.connect(), greet=greet)

    def stream(self) -> Stream:
        fd = self.connect().detach()
        return FdStream(fd, fd)

    async def client(self) -> AgentClient:
        return await AgentClient.greet(self.stream())

    def sandbox(self) -> AsyncSandbox:
        return AsyncSandbox.of_box(new_id(), Spec(provider="guest"), _GuestProvider(self))

    # what the host sees of it

    def fds(self) -> list[str]:
        if os.geteuid() != 0:
            pytest.skip("an agent shows its descriptors to root alone")
        folder = f"/proc/{self.process.pid}/fd"
        found = []
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"{folder}/{name}").partition(":")[0])
        return sorted(found)

    def children(self) -> list[int]:
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in text.split()]

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/status").read_text().split("VmRSS:")[1].split()[0]) << 10


class _GuestProvider(NoBoxes):
    name = "guest"

    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    async def dial(self, id: SandboxId) -> Stream:
        return self._guest.stream()
