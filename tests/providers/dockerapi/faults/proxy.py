"""A way to a daemon on which the n-th request of a kind is its last."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple


class When(StrEnum):
    BEFORE = "before"
    """The daemon never sees the request."""
    WITHIN = "within"
    """It has the request, and no time to answer."""
    AFTER = "after"
    """It has done it, and nobody hears the answer."""


class Strike(NamedTuple):
    request: str
    """A pattern of `METHOD /path`."""
    when: When
    occurrence: int = 1


class Failing:
    """Hands requests on, but the first of a kind, which it answers by itself."""

    def __init__(self, daemon: Path, request: str, answer: bytes) -> None:
        self._daemon = daemon
        self._request = request
        self._answer = answer
        self.has_failed = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if not self.has_failed and re.match(self._request, head.decode()):
            self.has_failed = True
            writer.write(self._answer)
            return
        there, to_daemon = await asyncio.open_unix_connection(str(self._daemon))
        to_daemon.write(head)
        sending = asyncio.create_task(_copy(reader, to_daemon))
        try:
            await _copy(there, writer)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
            to_daemon.close()


class Proxy:
    """Hands requests on, one for each connection, until one fits; then the daemon is struck."""

    def __init__(self, daemon: Path, strike: Callable[[], None], *, hangs: bool) -> None:
        self._daemon = daemon
        self._do_strike = strike
        self._hangs = hangs
        self._strike: Strike | None = None
        self.seen: list[str] = []
        self.has_struck = asyncio.Event()

    def arm(self, strike: Strike) -> None:
        self._strike = strike
        self.has_struck.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError, asyncio.IncompleteReadError):
                await self._pass_on(reader, writer)
        finally:
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked = head.partition(b" HTTP/")[0].decode()
        self.seen.append(asked)
        when = self._when(asked)
        if when is When.BEFORE:
            return await self._end()
        there, to_daemon = await asyncio.open_unix_connection(str(self._daemon))
        try:
            to_daemon.write(head)
            sending = asyncio.create_task(_copy(reader, to_daemon))
            try:
                if when is When.WITHIN:
                    await to_daemon.drain()
                    return await self._end()
                if when is When.AFTER:
                    await there.readuntil(b"\r\n")
                    return await self._end()
                await _copy(there, writer)
            finally:
                sending.cancel()
                await asyncio.wait([sending])
        finally:
            to_daemon.close()

    def _when(self, asked: str) -> When | None:
        if self._strike is None or not re.match(self._strike.request, asked):
            return None
        left = self._strike.occurrence - 1
        if left:
            self._strike = self._strike._replace(occurrence=left)
            return None
        when, self._strike = self._strike.when, None
        return when

    async def _end(self) -> None:
        await asyncio.to_thread(self._do_strike)
        self.has_struck.set()
        if self._hangs:
            await asyncio.Event().wait()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()


@asynccontextmanager
async def proxied(
    daemon: Path, folder: Path, strike: Callable[[], None], *, hangs: bool = False
) -> AsyncIterator[tuple[Proxy, str]]:
    """The proxy and its address. A connection that saw a strike is closed, or with `hangs` is silent."""
    proxy = Proxy(daemon, strike, hangs=hangs)
    async with serving(folder, proxy._serve) as address:
        yield proxy, address


@asynccontextmanager
async def serving(
    folder: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
) -> AsyncIterator[str]:
    """Whatever answers on a socket, at this address."""
    path = folder / "proxy.sock"
    path.unlink(missing_ok=True)
    tasks: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            return  # the test is over
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, str(path))
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
