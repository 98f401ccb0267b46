"""Two ends of a byte stream in memory; what one writes the other receives in the next turn of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skerry.agent.stream import HIGH_WATER, Buffer, Receiver, Stream


class MemoryStream(Stream):
    def __init__(self, on_traffic: Callable[[], None]) -> None:
        self._on_traffic = on_traffic
        self._peer: MemoryStream | None = None
        self._receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: list[bytes] = []
        self._inbox_size = 0
        self._ended: tuple[Exception | None] | None = None
        self._scheduled = False
        self._drainers: list[asyncio.Future[None]] = []

    @classmethod
    def pair(cls, on_traffic: Callable[[], None]) -> tuple[MemoryStream, MemoryStream]:
        near, far = cls(on_traffic), cls(on_traffic)
        near._peer, far._peer = far, near
        return near, far

    def start(self, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._schedule()

    def write(self, *parts: Buffer) -> None:
        peer = self._peer
        if not self.is_open or peer is None or not peer.is_open:
            return
        data = b"".join(bytes(part) for part in parts)
        peer._inbox.append(data)
        peer._inbox_size += len(data)
        self._on_traffic()
        peer._schedule()

    async def drained(self) -> None:
        peer = self._peer
        if self.is_open and peer is not None and peer.is_open and peer._inbox_size >= HIGH_WATER:
            waiter = asyncio.get_running_loop().create_future()
            peer._drainers.append(waiter)
            await waiter

    def close(self) -> None:
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Close both ends now; the other side gets what was sent before, and then sees `error`."""
        if not self.is_open:
            return
        self.is_open = False
        self._inbox.clear()
        self._wake_drainers()
        if self._peer is not None and self._peer._ended is None:
            self._peer._ended = (error,)
            if self._peer._receiver is not None:
                self._peer._deliver()
        if self._receiver is not None:
            self._receiver.closed(error)

    def _schedule(self) -> None:
        waiting = not self._scheduled and (self._inbox or self._ended)
        if waiting and self._loop is not None and not self._loop.is_closed():
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        chunks, self._inbox, self._inbox_size = self._inbox, [], 0
        self._wake_drainers()
        for chunk in chunks:
            if self.is_open and self._receiver is not None:
                self._receiver.received(memoryview(chunk))
        if self.is_open and self._ended is not None:
            self.end(self._ended[0])

    def _wake_drainers(self) -> None:
        for waiter in self._drainers:
            if not waiter.done():
                waiter.set_result(None)
        self._drainers.clear()
