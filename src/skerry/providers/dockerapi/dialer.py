"""Dials the agents in containers: at their sockets where this host sees them, else by the stdio of an exec."""

from __future__ import annotations

import asyncio
import os
import struct
from typing import Any

import msgspec

from skerry.errors import AgentUnreachable, Conflict, ProviderError
from skerry.host import uids
from skerry.model.spec import SandboxId
from skerry.net.stream import Buffer, Receiver, Stream
from skerry.providers.base import log
from skerry.providers.dockerapi import containers, image_config
from skerry.providers.dockerapi.api import Engine
from skerry.providers.dockerapi.volumes import EngineAgentVolume
from skerry.providers.shared import layout, proc_socket
from skerry.providers.shared.dialer import Dialer

_HEADER = struct.Struct(">BxxxI")
_LAST_WORDS = 4096
_NOT_RUNNING = ("not running", "container state improper")
"""Words of Docker and of Podman."""
_ENDING_S = 1.0
"""How long an engine has to close a stream after the end of its container. For some runtimes it never does."""


class EngineDialer(Dialer[containers.Inspected]):
    def __init__(self, engine: Engine, agent: EngineAgentVolume, *, may_be_here: bool) -> None:
        super().__init__()
        self._engine = engine
        self._agent = agent
        self._may_be_here = may_be_here

    async def find(self, id: SandboxId) -> containers.Inspected:
        return await containers.inspect(self._engine, id)

    async def as_user(self, id: SandboxId, user: str) -> Stream:
        """Open a stream to an agent of another user, which ends with it. Raises UserNotFound."""
        box = await self.find(id)
        check_running(box)
        if not user.replace(":", "").isdecimal() and user != "root":  # an engine tells it only as the stream's end
            await image_config.find_user(self._engine, box.id, user)
        await self._agent.prepare(box.image)
        first = msgspec.json.decode((box.config.entrypoint or [""])[-1], type=dict[str, Any])
        argv = [*self._agent.argv, layout.START, id, uids.agent_config(first)]
        return await open_exec(self._engine, box.id, argv, user)

    async def open(self, box: containers.Inspected, timeout_s: float) -> Stream:
        check_running(box)
        if box.state.paused:
            raise AgentUnreachable("the box is paused: let it go on first")
        # A process of that number is on every machine.
        is_here = self._may_be_here and proc_socket.is_of(box.state.pid, box.id)
        if is_here:
            try:
                return await proc_socket.connect(box.state.pid, timeout_s)
            except proc_socket.NotShared as error:
                log.debug("%s: container %s is dialled by an exec: %s", self._engine.provider, box.id[:12], error)
        await self._agent.prepare(box.image)
        argv = [*self._agent.argv, layout.RELAY, layout.SOCKET, f"{timeout_s:g}"]
        process = proc_socket.process_of(box.state.pid, box.id) if is_here else None
        return await open_exec(self._engine, box.id, argv, process=process)


def check_running(box: containers.Inspected) -> None:
    if not box.state.running:
        raise AgentUnreachable(f"the box is {box.state.status or 'not running'}: start it first")


async def open_exec(
    engine: Engine, container: str, argv: list[str], user: str | None = None, *, process: int | None = None
) -> Stream:
    """Start a command whose stdio is the stream. It ends with the stream, and with `process`, a descriptor of the
    container's process on this host, if there is one; that becomes the stream's."""
    wanted: dict[str, Any] = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": argv}
    if user is not None:
        wanted["User"] = user
    try:
        made = await engine.post(f"/containers/{container}/exec", dict[str, Any], json=wanted)
        started = await engine.upgrade(f"/exec/{made['Id']}/start", json={"Detach": False, "Tty": False})
        return EngineExecStream(*started, process)
    except BaseException as error:
        if process is not None:
            os.close(process)
        has_ended = any(words in str(error) for words in _NOT_RUNNING)  # since we looked
        if isinstance(error, Conflict | ProviderError) and has_ended:
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
            pieces.append((self._kind == 2, piece))
        return pieces


class EngineExecStream(Stream):
    """The stdio of an exec. What it says on standard error is the reason of its end."""

    def __init__(self, socket: Stream, early: bytes, process: int | None = None) -> None:
        self._socket = socket
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
            if is_error or not (self._has_begun or piece[0] == ord("{")):
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
