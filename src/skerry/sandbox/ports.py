"""Ports of a sandbox, reached through its agent: no network is needed for it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from contextlib import suppress
from typing import Any, Self

from skerry.agent.call import WINDOW
from skerry.agent.tunnel import AsyncTunnel
from skerry.errors import Conflict, InvalidSpec
from skerry.sandbox.connection import Connect

_CHUNK = 1 << 16
_LOOPBACK = "127.0.0.1"
_CLOSE_S = 1.0
_log = logging.getLogger("skerry.sandbox")


class AsyncForward:
    """A port on this host's loopback that leads to a port in the sandbox."""

    def __init__(self, connect: Connect, port: int, local_port: int = 0) -> None:
        self._connect = connect
        self._port = port
        self._local_port = local_port
        self._most: int | None = None
        self._window = WINDOW
        self._server: asyncio.Server | None = None
        self._closed = False
        self._links: set[asyncio.Task[Any]] = set()

    @property
    def address(self) -> tuple[str, int]:
        """The address to connect to."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return host, port

    async def serve(self, listener: socket.socket, *, most: int, window: int) -> None:
        """Take connections of a socket that listens already: `most` at once, each with so many bytes on their way."""
        self._most, self._window = most, window
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_CHUNK)

    @property
    def links(self) -> int:
        """Number of open connections."""
        return len(self._links)

    async def __aenter__(self) -> Self:
        try:
            self._server = await asyncio.start_server(self._accept, _LOOPBACK, self._local_port)
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
        self._closed = True
        self._server.close()
        for link in self._links:
            link.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)
        with suppress(TimeoutError):  # a connection that came meanwhile is closed as well
            async with asyncio.timeout(_CLOSE_S):
                await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closed or len(self._links) == self._most:
            writer.transport.abort()
            return
        link = asyncio.create_task(self._serve(reader, writer))
        self._links.add(link)

        def end(_: object) -> None:
            """Also of a link that was cancelled before it began, or before all was written."""
            self._links.discard(link)
            if writer.transport.get_protocol() is not None:  # else it is closed, and asyncio fails to abort it
                writer.transport.abort()

        link.add_done_callback(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with await self._open() as tunnel, asyncio.TaskGroup() as group:
                group.create_task(_up(reader, tunnel))
                group.create_task(_down(tunnel, writer))
        # the client sees its connection close, as with any server
        except* (Exception, asyncio.CancelledError) as group:
            _log.debug("a connection to port %d ended: %s", self._port, group.exceptions[0])
        if not self._closed:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _open(self) -> AsyncTunnel:
        return await AsyncTunnel.open(self._connect, self._port, window=self._window)


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
