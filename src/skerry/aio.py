"""Helpers for asynchronous code: work that is awaited to its end, and waits between attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from skerry.errors import WrongState

T = TypeVar("T")


def require_asyncio() -> None:
    """Raise WrongState where no event loop of asyncio runs, as under trio."""
    if asyncio._get_running_loop() is None:
        raise WrongState(
            "the asynchronous interface runs on asyncio, and no event loop of asyncio runs here: run it with "
            "asyncio.run or anyio.run(..., backend='asyncio'). From trio use the synchronous interface in a thread: "
            "await trio.to_thread.run_sync(sandbox.exec, [...])"
        )


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if we are cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends, whatever those are."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()


def backoff(first_s: float, longest_s: float, timeout_s: float | None = None) -> Iterator[float]:
    """Yield the waits between attempts, each twice as long as the one before, until `timeout_s` have passed. The caller
    sleeps, so that it serves threads and event loops alike."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    delay_s = first_s
    while end is None or time.monotonic() < end:
        yield delay_s
        delay_s = min(2 * delay_s, longest_s)
