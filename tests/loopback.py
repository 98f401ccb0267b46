"""Servers on the loopback that leave nothing open behind a test."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_FIRST, _COUNT = 20_000, 12_000
_numbers = itertools.count(random.randrange(_COUNT))


def free_port() -> int:
    """A port that nobody has or gets before it is used: the kernel begins connections from higher ones."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := _FIRST + next(_numbers) % _COUNT))
            except OSError:
                continue
            return port


@asynccontextmanager
async def served(serve: Serve) -> AsyncIterator[int]:
    """The port of a server; at the end its connections are over, to the last callback of the event loop."""
    connections: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        try:
            await serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            if writer.transport.get_protocol() is not None:  # else it is closed, and asyncio fails to abort it
                writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)  # one may be cancelled as it ends
        await asyncio.sleep(0)  # a transport is closed one turn after it was told to
