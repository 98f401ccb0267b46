"""Byte streams between host and agent: push in, buffered out, no copy in between."""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

Buffer = bytes | bytearray | memoryview

_READ_SIZE = 1 << 18
_IOV_MAX = 64
HIGH_WATER = 1 << 20  # buffered bytes from which `drained` waits


class Receiver(Protocol):
    def received(self, data: memoryview) -> None:
        """Take some bytes. The view is only valid during the call."""

    def closed(self, error: Exception | None) -> None:
        """Hear, once, that the stream ended: by the other side, by an error, or by `close`."""


class Stream(ABC):
    """An ordered, reliable byte stream to an agent."""

    is_open = True  # false once its end was seen
    greeted_until = 0.0  # until then, by the loop's clock, whoever takes it over need not greet its agent again
    token: str | None = None  # secret that its agent demands in the greeting, where others can reach that agent too
    is_relayed = False  # a server of ours is at its other end, whose errors are told by their codes
    buffered = 0  # bytes that were written and have not gone out
    _receiver: Receiver | None = None

    @abstractmethod
    def start(self, receiver: Receiver) -> None:
        """Begin to deliver, from the running loop; whoever calls it again takes over from the one before."""

    @abstractmethod
    def write(self, *parts: Buffer) -> None:
        """Send, never blocking; what the stream cannot take now is kept. Parts must not change afterwards."""

    @abstractmethod
    async def drained(self) -> None:
        """Wait until little enough is buffered to write more."""

    def close(self) -> None:
        """End it now; what is buffered is lost. Quiet when already closed."""
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self.is_open:
            self.is_open = False
            self._release()
            if self._receiver is not None:
                self._receiver.closed(error)

    def _release(self) -> None:
        """Close what it holds."""
        raise NotImplementedError


def wake(waiters: list[asyncio.Future[None]]) -> None:
    """Let all go on that wait."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_result(None)
    waiters.clear()


class _Buffers(threading.local):
    """Read buffer of all streams of a thread: its content is used up before the next read."""

    def __init__(self) -> None:
        self.mine = bytearray(_READ_SIZE)


_buffers = _Buffers()


class FdStream(Stream):
    """A stream on file descriptors: a socket, a pair of pipes, a character device. It owns them."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        for fd in {read_fd, write_fd}:
            os.set_blocking(fd, False)
        self._out: deque[memoryview] = deque()
        self.buffered = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drainers: list[asyncio.Future[None]] = []

    def start(self, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._loop.add_reader(self._read_fd, self._on_readable)
        if self._out:
            self._loop.add_writer(self._write_fd, self._on_writable)

    def _on_readable(self) -> None:
        view = memoryview(_buffers.mine)
        try:
            count = os.readv(self._read_fd, [view])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if count == 0:
            self._end(None)
        elif self._receiver is not None:
            self._receiver.received(view[:count])

    def write(self, *parts: Buffer) -> None:
        if not self.is_open:
            return
        idle = not self._out
        for part in parts:
            view = memoryview(part)
            if view.nbytes:
                self._out.append(view)
                self.buffered += view.nbytes
        if idle and self._loop is not None:
            self._flush()
            if self._out and self.is_open:
                self._loop.add_writer(self._write_fd, self._on_writable)

    def _on_writable(self) -> None:
        self._flush()
        if not self._out and self.is_open and self._loop is not None:
            self._loop.remove_writer(self._write_fd)

    def _flush(self) -> None:
        try:
            while self._out:
                head = [self._out[i] for i in range(min(len(self._out), _IOV_MAX))]
                sent = os.writev(self._write_fd, head)
                self.buffered -= sent
                while self._out and sent >= self._out[0].nbytes:
                    sent -= self._out.popleft().nbytes
                if sent:
                    self._out[0] = self._out[0][sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._end(error)
            return
        if self.buffered < HIGH_WATER:
            wake(self._drainers)

    async def drained(self) -> None:
        if self.is_open and self.buffered >= HIGH_WATER:
            waiter = asyncio.get_running_loop().create_future()
            self._drainers.append(waiter)
            await waiter

    def _release(self) -> None:
        self._out.clear()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._read_fd)
            self._loop.remove_writer(self._write_fd)
        for fd in {self._read_fd, self._write_fd}:
            os.close(fd)
        wake(self._drainers)


class TlsStream(Stream):
    """Stream under TLS, to an agent behind a daemon elsewhere; asyncio holds it, as only that speaks TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._reading: asyncio.Task[None] | None = None

    @property
    def buffered(self) -> int:  # type: ignore[override]
        return self._writer.transport.get_write_buffer_size()

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

    def _release(self) -> None:
        self._writer.transport.abort()
