"""The way to an agent in a container that an engine has: the stdio of an exec."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any

from skerry.agent.stream import Buffer, FdStream, Receiver, Stream
from skerry.errors import AgentUnreachable, Conflict, ProviderError
from skerry.providers.engine.api import Engine

_HEADER = struct.Struct(">BxxxI")
_STDERR = 2
_BRACE = ord("{")
_LAST_WORDS = 4096
_ENDING_S = 1.0
"""How long an engine has to close a stream after the end of its container. For some runtimes it never does."""


async def through_exec(
    engine: Engine, container: str, argv: list[str], user: str | None = None, *, process: int | None = None
) -> Stream:
    """The stdio of a command that the engine starts in the container, and that ends with the stream; and with the
    process that stands for the container on this host, if there is one (a descriptor, which is the stream's then)."""
    try:
        return ExecStream(*await _start(engine, container, argv, user), process)
    except BaseException:
        if process is not None:
            os.close(process)
        raise


async def _start(engine: Engine, container: str, argv: list[str], user: str | None) -> tuple[int, bytes]:
    wanted: dict[str, Any] = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": argv}
    if user is not None:
        wanted["User"] = user
    try:
        made = await engine.post(f"/containers/{container}/exec", dict[str, Any], json=wanted)
        return await engine.upgrade(f"/exec/{made['Id']}/start", json={"Detach": False, "Tty": False})
    except (Conflict, ProviderError) as error:
        if "not running" in str(error):  # it ended since we looked
            raise AgentUnreachable(str(error)) from error
        raise


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

    def __init__(self, fd: int, early: bytes, process: int | None = None) -> None:
        self._socket = FdStream(fd, fd)
        self._early = early
        self._process = process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames = Demultiplexer()
        self._last_words = b""
        self._has_begun = False
        self._receiver: Receiver | None = None
        self._is_ours = False

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._process is not None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._process, self._on_end_of_process)
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
        self._forget_process()

    def _on_end_of_process(self) -> None:
        self._forget_process()
        asyncio.get_running_loop().call_later(_ENDING_S, self._end_as_well)

    def _end_as_well(self) -> None:
        self._last_words = b"the box has ended"
        self._socket.close()

    def _forget_process(self) -> None:
        if self._process is not None:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(self._process)
            os.close(self._process)
            self._process = None

    def received(self, data: memoryview) -> None:
        for is_error, piece in self._frames.feed(data):
            # Why a command could not be started an engine says on its standard output; an agent begins with a brace.
            if is_error or not (self._has_begun or piece[0] == _BRACE):
                self._last_words = (self._last_words + bytes(piece))[-_LAST_WORDS:]
            elif self._receiver is not None:
                self._has_begun = True
                self._receiver.received(piece)

    def closed(self, error: Exception | None) -> None:
        self.is_open = False
        self._forget_process()
        if self._receiver is None:
            return
        if not self._is_ours and self._last_words:
            words = self._last_words.decode(errors="replace").strip()
            error = AgentUnreachable(f"the way to the agent ended: {words}")
        self._receiver.closed(error)
