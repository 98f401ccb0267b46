"""The way from ordinary code into the event loop: one loop in one thread, for all that is synchronous."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    """Runs coroutines from other threads; started on first use, ended with the program."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pid = 0

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._pid != os.getpid():  # threads do not survive a fork
                self._loop = asyncio.new_event_loop()
                self._pid = os.getpid()
                thread = threading.Thread(target=self._loop.run_forever, name="skerry", daemon=True)
                thread.start()
                atexit.register(self._loop.call_soon_threadsafe, self._loop.stop)
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Ctrl-C cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        """An async iterator as an ordinary one; it is closed when the loop over it is left."""

        async def take() -> tuple[bool, Any]:
            try:
                return True, await anext(items)
            except StopAsyncIteration:
                return False, None

        try:
            while True:
                more, item = self.run(take())
                if not more:
                    return
                yield item
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                self.run(close())


portal = Portal()
