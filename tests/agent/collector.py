"""A receiver that keeps what a stream delivers, for tests to wait on."""

from __future__ import annotations

import asyncio

from skerry.net.stream import Stream


class Collector:
    def __init__(self, stream: Stream) -> None:
        self.data = bytearray()
        self.error: Exception | None = None
        self.ended = asyncio.Event()
        self._changed = asyncio.Event()
        stream.start(self)

    def received(self, data: memoryview) -> None:
        self.data += data
        self._changed.set()

    def closed(self, error: Exception | None) -> None:
        self.error = error
        self.ended.set()

    async def wait_for(self, expected: bytes) -> None:
        async with asyncio.timeout(10):
            while bytes(self.data) != expected:
                assert len(self.data) < len(expected), bytes(self.data[-100:])
                self._changed.clear()
                await self._changed.wait()

    async def wait_for_end(self) -> None:
        async with asyncio.timeout(10):
            await self.ended.wait()
