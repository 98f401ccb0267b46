"""Ports of a sandbox, reached through its agent: no network is needed for it."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, Self

from skerry.agent.call import Call
from skerry.errors import Conflict, InvalidSpec
from skerry.processes import Connect

_CHUNK = 1 << 16
_LOOPBACK = "127.0.0.1"


class AsyncTunnel:
    """One connection to a port in the sandbox."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._chunks = call.chunks()

    @classmethod
    async def open(cls, connect: Connect, port: int, host: str = "127.0.0.1") -> Self:
        client = await connect()
        return cls(client.open("connect", {"port": port, "host": host}))

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


class AsyncForward:
    """A port on this host's loopback that leads to a port in the sandbox."""

    def __init__(self, connect: Connect, port: int, local_port: int = 0) -> None:
        self._connect = connect
        self._port = port
        self._local_port = local_port
        self._server: asyncio.Server | None = None
        self._closed = False
        self._links: set[asyncio.Task[Any]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """Where to connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._serve, _LOOPBACK, self._local_port)
        except OverflowError:
            raise InvalidSpec(f"local_port: {self._local_port} is no port", field="local_port") from None
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise Conflict(f"port {self._local_port} of this host is in use: choose another, or none") from None
            reason = error.strerror or error
            raise InvalidSpec(f"local_port: {self._local_port}: {reason}", field="local_port") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is None:
            return
        self._closed = True  # also for a connection that was taken, but whose task has not begun
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._closed:
            writer.close()
            return
        self._links.add(task)
        try:
            async with await AsyncTunnel.open(self._connect, self._port) as tunnel, asyncio.TaskGroup() as group:
                group.create_task(_up(reader, tunnel))
                group.create_task(_down(tunnel, writer))
        except* (Exception, asyncio.CancelledError):
            pass  # the client sees its connection close, as with any server that is not there
        finally:
            writer.close()
            self._links.discard(task)


class Exposed:
    """The ports of a sandbox that lead to it from this host's loopback until they are closed, all at once."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._forwards: dict[int, AsyncForward] = {}
        self._lock = asyncio.Lock()

    async def open(self, port: int, local_port: int) -> str:
        """The address of a port; the same again if it has one."""
        if not 0 < port < 65536:
            raise InvalidSpec(f"port: {port} is no port; 1 to 65535", field="port")
        async with self._lock:
            if port not in self._forwards:
                self._forwards[port] = await AsyncForward(self._connect, port, local_port).__aenter__()
            host, local = self._forwards[port].address
        if local_port not in (0, local):
            raise Conflict(f"port {port} is at {host}:{local} already")
        return f"{host}:{local}"

    async def close(self) -> None:
        async with self._lock:
            while self._forwards:
                _, forward = self._forwards.popitem()
                await forward.close()


async def _up(reader: asyncio.StreamReader, tunnel: AsyncTunnel) -> None:
    while data := await reader.read(_CHUNK):
        await tunnel.write(data)
    await tunnel.close_write()


async def _down(tunnel: AsyncTunnel, writer: asyncio.StreamWriter) -> None:
    while data := await tunnel.read():
        writer.write(data)
        await writer.drain()
    writer.write_eof()
