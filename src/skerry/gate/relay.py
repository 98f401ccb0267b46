"""Bytes from one side of a connection to the other, and turns between those who move many."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from skerry.aio import end
from skerry.errors import SkerryError
from skerry.gate.base import Duplex

_TURN = 1 << 20
"""Bytes that one sandbox moves in a turn of the event loop, however many connections it has."""
_MOST_IN_TURN = 4
LINGER_S = 2.0


class Turns:
    """The share of one sandbox in the event loop, which all of them use: whoever has moved more than that waits for the
    next turn, so that many connections of one sandbox are no quicker than a few of another."""

    def __init__(self) -> None:
        self._left = _TURN
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def count(self, moved: int) -> None:
        """Take bytes that were moved off the share."""
        self._left -= moved
        if self._left <= 0 and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    async def mine(self) -> None:
        """Wait for a turn, in the order in which that was asked for."""
        if self._left <= 0:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def _next(self) -> None:
        self._left = min(self._left + _TURN, _TURN)
        woken = 0
        while self._left > 0 and self._waiting and woken < _MOST_IN_TURN:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                woken += 1
        self._is_due = self._left <= 0 or bool(self._waiting)
        if self._is_due:
            asyncio.get_running_loop().call_soon(self._next)


class Ahead:
    """A connection of which some bytes were read ahead, or are being read."""

    def __init__(self, inner: Duplex, first: bytes = b"", reading: asyncio.Task[bytes] | None = None) -> None:
        self._inner = inner
        self._first = first
        self._reading = reading
        self._is_ended = False

    async def read(self) -> bytes:
        if self._first:
            first, self._first = self._first, b""
            return first
        if self._reading is not None:
            reading, self._reading = self._reading, None
            return await reading
        return await self._inner.read()

    async def write(self, data: bytes) -> None:
        await self._inner.write(data)

    async def close_write(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            await self._inner.close_write()

    async def close(self) -> None:
        if self._reading is not None:
            await end(self._reading)
        await self._inner.close()


async def carry(client: Duplex, server: Duplex) -> None:
    """Carry bytes both ways until both sides have ended. Raises what either breaks with."""
    await both(pump(client, server), pump(server, client))


async def pump(source: Duplex, sink: Duplex) -> None:
    """Carry bytes one way to their end, and tell of that."""
    while data := await source.read():
        await sink.write(data)
    await sink.close_write()


async def finish(client: Duplex, timeout_s: float = LINGER_S) -> None:
    """End our side, and give the other a moment to end its own, so that it gets all that was written."""
    await client.close_write()
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while await client.read():
                pass


async def last_word(client: Duplex, data: bytes) -> None:
    """Tell a client something before its end, if it still hears it in a moment."""
    with suppress(OSError, SkerryError):  # a timeout is an OSError too
        async with asyncio.timeout(LINGER_S):
            await client.write(data)


async def both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Run two to their ends. The first error ends both, and is raised as it is."""
    tasks = (asyncio.create_task(one), asyncio.create_task(other))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await end(*tasks)
