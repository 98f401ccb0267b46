"""Servers on the loopback that leave nothing open behind a test."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
_FIRST, _COUNT = 20_000, 1_000


def _own_ports() -> Iterator[int]:
    """Ports that no other process of tests is given as long as this one lives: a name without a file holds them.

    A start by chance would not do: all workers of a run have the same seed.
    """
    for block in range(12):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0skerry-tests-ports-{block}")
        except OSError:
            holder.close()
            continue
        holder.detach()  # it is closed when the process ends
        first = _FIRST + block * _COUNT
        return itertools.cycle(range(first, first + _COUNT))
    raise RuntimeError("twelve runs of tests at once have all the ports there are for them")


_ports = _own_ports()


def free_port() -> int:
    """A port that nobody has or gets before it is used: the kernel begins connections from higher ones."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError


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
