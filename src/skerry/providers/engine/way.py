"""The way to an agent in a container: straight to its socket where we share its kernel, else through an exec."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from contextlib import ExitStack
from typing import Any

from skerry.agent.stream import Buffer, FdStream, Receiver, Stream
from skerry.errors import AgentUnreachable
from skerry.providers.engine.api import Engine
from skerry.providers.engine.layout import SOCKET

_WAIT_S = (0.001, 0.002)
"""First and longest wait between two looks for a socket."""
_HEADER = struct.Struct(">BxxxI")
_STDERR = 2
_LAST_WORDS = 4096


class NotShared(Exception):
    """We cannot see the container's files: another host, another kernel, or not our right."""


async def straight(pid: int, timeout_s: float) -> Stream:
    """Connect to the socket in the files of a process of this host; an agent that is just starting is waited for."""
    try:
        async with asyncio.timeout(timeout_s):
            wait, longest = _WAIT_S
            while (sock := _connect(pid)) is None:
                await asyncio.sleep(wait)
                wait = min(wait * 2, longest)
    except TimeoutError:
        raise AgentUnreachable(f"no agent listens in the box after {timeout_s:g} s") from None
    fd = sock.detach()
    return FdStream(fd, fd)


def _connect(pid: int) -> socket.socket | None:
    """None while nobody listens. No link is followed: all behind the first step is the box's to choose."""
    *folders, name = SOCKET.strip("/").split("/")
    flags = os.O_PATH | os.O_CLOEXEC
    with ExitStack() as opened:

        def step(name: str, flags: int, at: int | None = None) -> int:
            fd = os.open(name, flags, dir_fd=at)
            opened.callback(os.close, fd)
            return fd

        try:
            at = step(f"/proc/{pid}/root", flags | os.O_DIRECTORY)
            for folder in folders:
                at = step(folder, flags | os.O_DIRECTORY | os.O_NOFOLLOW, at)
        except OSError as error:
            raise NotShared(error) from error
        try:
            at = step(name, flags | os.O_NOFOLLOW, at)
        except FileNotFoundError:
            return None  # the folder is there, so this is the right place
        if not stat.S_ISSOCK(os.fstat(at).st_mode):
            raise AgentUnreachable("something else is in the place of the agent's socket")
        return _connect_to(at)


def _connect_to(fd: int) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"/proc/self/fd/{fd}")
        return sock
    except (ConnectionRefusedError, BlockingIOError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise NotShared(error) from error


async def through_exec(engine: Engine, container: str, argv: list[str], user: str | None = None) -> Stream:
    """The stdio of a command that the engine starts in the container, and that ends with the stream."""
    wanted: dict[str, Any] = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": argv}
    if user is not None:
        wanted["User"] = user
    made = await engine.post(f"/containers/{container}/exec", dict[str, Any], json=wanted)
    fd, early = await engine.upgrade(f"/exec/{made['Id']}/start", json={"Detach": False, "Tty": False})
    return ExecStream(fd, early)


class Demultiplexer:
    """Takes an engine's frames apart: standard output and standard error on one connection."""

    def __init__(self) -> None:
        self._header = b""
        self._kind = 0
        self._left = 0

    def feed(self, data: memoryview) -> list[tuple[bool, memoryview]]:
        """Pieces in order, each with whether it is of standard error."""
        pieces = []
        while data.nbytes:
            if not self._left:
                need = _HEADER.size - len(self._header)
                self._header += bytes(data[:need])
                data = data[need:]
                if len(self._header) == _HEADER.size:
                    self._kind, self._left = _HEADER.unpack(self._header)
                    self._header = b""
                continue
            piece, data = data[: self._left], data[self._left :]
            self._left -= piece.nbytes
            pieces.append((self._kind == _STDERR, piece))
        return pieces


class ExecStream(Stream):
    """The stdio of an exec. What it says on standard error is the reason of its end."""

    def __init__(self, fd: int, early: bytes) -> None:
        self._socket = FdStream(fd, fd)
        self._early = early
        self._frames = Demultiplexer()
        self._last_words = b""
        self._receiver: Receiver | None = None
        self._is_ours = False

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._socket.start(self)
        early, self._early = self._early, b""
        if early:
            self.received(memoryview(early))

    def write(self, *parts: Buffer) -> None:
        self._socket.write(*parts)

    async def drained(self) -> None:
        await self._socket.drained()

    def close(self) -> None:
        self._is_ours = True
        self._socket.close()

    def received(self, data: memoryview) -> None:
        for is_error, piece in self._frames.feed(data):
            if is_error:
                self._last_words = (self._last_words + bytes(piece))[-_LAST_WORDS:]
            elif self._receiver is not None:
                self._receiver.received(piece)

    def closed(self, error: Exception | None) -> None:
        self.is_open = False
        if self._receiver is None:
            return
        if not self._is_ours and self._last_words:
            words = self._last_words.decode(errors="replace").strip()
            error = AgentUnreachable(f"the way to the agent ended: {words}")
        self._receiver.closed(error)
