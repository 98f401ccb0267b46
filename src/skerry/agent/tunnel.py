"""Tunnels: connections in a box, to its ports or from its programs, as the host holds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Self

from skerry.agent.call import WINDOW, Call
from skerry.agent.client import AgentClient

_LOOPBACK = "127.0.0.1"


class AsyncTunnel:
    """One connection to a port in the sandbox."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._chunks = call.chunks()

    @classmethod
    async def open(
        cls, connect: Callable[[], Awaitable[AgentClient]], port: int, host: str = _LOOPBACK, window: int = WINDOW
    ) -> Self:
        client = await connect()
        return cls(client.open("connect", {"port": port, "host": host}, window=window))

    async def read(self) -> bytes:
        """The next bytes; empty at the end. Raises NotFound if nothing listens on the port."""
        async for _, data in self._chunks:
            return data
        return b""

    async def write(self, data: bytes) -> None:
        """Send to the port, as fast as it takes it."""
        await self._call.send(data)

    async def close_write(self) -> None:
        """Say that no more will be written; the other side may still answer."""
        self._call.end()

    async def close(self) -> None:
        """End the connection, both ways."""
        self._call.abandon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
