"""Terminal, standard streams and ending signals of this process."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from skerry.config import variable

T = TypeVar("T")

STDIN = 0
_CHUNK = 1 << 18
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def raw_mode() -> Iterator[None]:
    """Pass every key on to the box, Ctrl-C included; restore the terminal's mode at the end."""
    before = termios.tcgetattr(STDIN)
    try:
        tty.setraw(STDIN, termios.TCSANOW)  # what was typed ahead is kept
        yield
    finally:
        with suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(STDIN, termios.TCSANOW, before)


def size() -> tuple[int, int]:
    """Rows and columns of the terminal."""
    columns, rows = os.get_terminal_size(STDIN)
    return rows or 24, columns or 80


def environment() -> dict[str, str]:
    """Variables that tell a program in the box its kind of terminal."""
    found = {name: variable(name) for name in ("TERM", "COLORTERM")}
    return {name: value for name, value in found.items() if value}


async def read_chunk(fd: int) -> bytes:
    """Read the next bytes; none is the end."""
    try:
        return await _in_thread(lambda: os.read(fd, _CHUNK))
    except OSError:
        return b""  # a terminal that has gone


async def write_all(fd: int, data: bytes) -> None:
    """Write all of it, waiting for a slow reader. Raises BrokenPipeError when the reader has gone."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    if len(data) <= select.PIPE_BUF and poll.poll(0):  # so much never blocks
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
    """Await a call that may block for ever, without holding up the event loop.

    The thread is a daemon: when cancelled it is left to end with us, which an executor's thread would not do, and the
    file keeps its flags, which it shares with other programs.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: T | OSError) -> None:
        if not future.done():
            set_outcome(outcome)

    def run() -> None:
        try:
            settled: tuple[Callable[[Any], None], T | OSError] = (future.set_result, work())
        except OSError as error:
            settled = (future.set_exception, error)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, *settled)

    threading.Thread(target=run, daemon=True).start()
    return await future


@contextmanager
def on_signals(handle: Callable[[int], None], numbers: Sequence[int] = ENDING) -> Iterator[None]:
    """Handle these signals meanwhile."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def run_until_signal(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` to its end or until a signal cancels it, which cleans up first; give the exit code."""
    ended_by: list[int] = []

    async def main() -> None:
        task = asyncio.ensure_future(work)

        def end(number: int) -> None:
            if not ended_by:  # the next one does not disturb the cleaning up
                ended_by.append(number)
                task.cancel()

        with on_signals(end):
            await task

    try:
        asyncio.run(main())
    except asyncio.CancelledError:
        if not ended_by:
            raise
        return 128 + ended_by[0]
    return 0
