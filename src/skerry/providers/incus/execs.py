"""The stdio of a command that Incus starts in a container, as the stream to an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from skerry.agent.stream import Buffer, Receiver, Stream
from skerry.errors import AgentUnreachable, ProviderError
from skerry.providers.incus.api import Api
from skerry.providers.incus.websocket import WebSocket

_LAST_WORDS = 4096
_CHANNELS = ("0", "1", "2", "control")


async def through_exec(api: Api, instance: str, argv: list[str], *, uid: int, gid: int) -> Stream:
    """A command that ends with the stream. Incus begins it once all of its channels are taken."""
    wanted: dict[str, Any] = {
        "command": argv,
        "wait-for-websocket": True,
        "interactive": False,
        "user": uid,
        "group": gid,
        "cwd": "/",
    }
    begun = await api.begin("POST", f"/1.0/instances/{instance}/exec", json=wanted)
    secrets = (begun.metadata or {}).get("fds") or {}
    if any(name not in secrets for name in _CHANNELS):
        raise ProviderError("incus: an exec without channels")
    path = f"/1.0/operations/{begun.id}/websocket"
    opening = [asyncio.ensure_future(api.websocket(path, query={"secret": secrets[name]})) for name in _CHANNELS]
    try:
        stdin, stdout, stderr, control = await asyncio.gather(*opening)
    except BaseException:
        for each in opening:
            each.cancel()
        for opened in await asyncio.gather(*opening, return_exceptions=True):
            if isinstance(opened, WebSocket):
                opened.close()
        raise
    return ExecStream(stdin, stdout, stderr, control)


class _Words:
    """Keeps the end of what is said."""

    def __init__(self) -> None:
        self.last = b""

    def received(self, data: memoryview) -> None:
        self.last = (self.last + bytes(data))[-_LAST_WORDS:]

    def closed(self, error: Exception | None) -> None:
        return


class ExecStream(Stream):
    """The stdio of an exec. What it says on standard error is the reason of its end."""

    def __init__(self, stdin: WebSocket, stdout: WebSocket, stderr: WebSocket, control: WebSocket) -> None:
        self._stdin = stdin
        self._stdout = stdout
        self._others = (stderr, control, stdin)
        self._words = _Words()
        self._receiver: Receiver | None = None

    def start(self, receiver: Receiver) -> None:
        is_first, self._receiver = self._receiver is None, receiver
        if is_first:
            for each in self._others:
                each.start(self._words)
            self._stdout.start(self)

    def write(self, *parts: Buffer) -> None:
        if self.is_open:
            self._stdin.write(*parts)

    async def drained(self) -> None:
        await self._stdin.drained()

    def close(self) -> None:
        self._end(None)

    def received(self, data: memoryview) -> None:
        if self._receiver is not None:
            self._receiver.received(data)

    def closed(self, error: Exception | None) -> None:
        if words := self._words.last.decode(errors="replace").strip():
            error = AgentUnreachable(f"the way to the agent ended: {words}")
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        for each in (*self._others, self._stdout):
            each.close()
        if self._receiver is not None:
            self._receiver.closed(error)
