"""A byte stream under TLS, for an agent that is reached through a daemon elsewhere."""

from __future__ import annotations

import asyncio

from .stream import Buffer, Receiver, Stream

_READ_SIZE = 1 << 18


class TlsStream(Stream):
    """On a connection that asyncio holds, since only it speaks TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._receiver: Receiver | None = None
        self._reading: asyncio.Task[None] | None = None

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            while data := await self._reader.read(_READ_SIZE):
                if self._receiver is not None:
                    self._receiver.received(memoryview(data))
        except OSError as failure:
            error = failure
        self._end(error)

    def write(self, *parts: Buffer) -> None:
        if self.is_open:
            self._writer.write(b"".join(parts))

    async def drained(self) -> None:
        if self.is_open:
            try:
                await self._writer.drain()
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        if self._reading is not None and self._reading is not asyncio.current_task():
            self._reading.cancel()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._writer.transport.abort()
        if self._receiver is not None:
            self._receiver.closed(error)
