"""Our own standard streams, read and written without ever holding up the event loop."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

_CHUNK = 1 << 18
_NEVER_BLOCKS = select.PIPE_BUF


async def read_chunk(fd: int) -> bytes:
    """The next bytes, or none at the end."""
    try:
        return await _in_thread(lambda: os.read(fd, _CHUNK))
    except OSError:
        return b""  # a terminal that has gone


async def write_all(fd: int, data: bytes) -> None:
    """Write all of it, waiting for a slow reader. Raises BrokenPipeError when the reader has gone."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if len(data) <= _NEVER_BLOCKS and poll.poll(0):
        _write(fd, data)
    else:
        await _in_thread(lambda: _write(fd, data))


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # someone who shares the file has made it non-blocking
            select.select([], [fd], [])


async def _in_thread(work: Callable[[], T]) -> T:
    """Await a call that may block for ever. The thread is a daemon: when cancelled it is left to end with us,
    which an executor's thread would not do, and the file keeps its flags, which it shares with other programs."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: OSError | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        failure: OSError | None = None
        try:
            result = work()
        except OSError as error:
            failure = error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await future
