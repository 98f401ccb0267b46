"""The byte stream between host and agent: push in, buffered out, no copy in between."""

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
HIGH_WATER = 1 << 20
"""Buffered bytes from which `drained` waits."""


class Receiver(Protocol):
    def received(self, data: memoryview) -> None:
        """Some bytes came. The view is only valid during the call."""

    def closed(self, error: Exception | None) -> None:
        """The stream ended, once: by the other side, by an error, or by `close`."""


class Stream(ABC):
    """An ordered, reliable byte stream to an agent."""

    is_open = True
    """False once its end was seen."""

    @abstractmethod
    def start(self, receiver: Receiver) -> None:
        """Begin to deliver, from the running loop; whoever calls it again takes over from the one before."""

    @abstractmethod
    def write(self, *parts: Buffer) -> None:
        """Send, never blocking; what the stream cannot take now is kept. Parts must not change afterwards."""

    @abstractmethod
    async def drained(self) -> None:
        """Wait until little enough is buffered to write more."""

    @abstractmethod
    def close(self) -> None:
        """End it now; what is buffered is lost. Quiet when already closed."""


class _Buffers(threading.local):
    """One to read into for all streams of a thread: what is in it is used up before the next read."""

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
        self._buffered = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiver: Receiver | None = None
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
                self._buffered += view.nbytes
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
                self._buffered -= sent
                while self._out and sent >= self._out[0].nbytes:
                    sent -= self._out.popleft().nbytes
                if sent:
                    self._out[0] = self._out[0][sent:]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._end(error)
            return
        if self._buffered < HIGH_WATER:
            self._wake_drainers()

    async def drained(self) -> None:
        if self.is_open and self._buffered >= HIGH_WATER:
            waiter = asyncio.get_running_loop().create_future()
            self._drainers.append(waiter)
            await waiter

    def _wake_drainers(self) -> None:
        for waiter in self._drainers:
            if not waiter.done():
                waiter.set_result(None)
        self._drainers.clear()

    def close(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self._out.clear()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._read_fd)
            self._loop.remove_writer(self._write_fd)
        for fd in {self._read_fd, self._write_fd}:
            os.close(fd)
        self._wake_drainers()
        if self._receiver is not None:
            self._receiver.closed(error)
