"""Progress of a call, told to a client that asked for it: what a command says as it says it, and that time goes by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from skerry.aio import end

_PAUSE_S = 0.25
"""Between one message and the next."""
_BEAT_S = 5.0
"""After so long without news it is told how long it has taken, so that no client thinks that we died."""
_MOST = 4096

Send = Callable[[float, float | None, str | None], Awaitable[None]]


class Progress:
    """Messages about one call. What comes faster than they may be sent is joined, and of that the end is kept."""

    def __init__(self, send: Send | None = None) -> None:
        """Without `send` nobody listens."""
        self._send = send
        self._news = asyncio.Event()
        self._waiting = ""
        self._count = 0

    @property
    def is_heard(self) -> bool:
        return self._send is not None

    def say(self, text: str) -> None:
        if self._send is not None and text:
            self._waiting = (self._waiting + text)[-_MOST:]
            self._news.set()

    def line(self, text: str) -> None:
        self.say(f"{text}\n")

    def output(self, data: bytes) -> None:
        """Tell a piece of a command's output."""
        self.say(data.decode(errors="replace"))

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """Tell it while the block runs; nothing is told after it. A client that reads slowly holds up nothing else."""
        if self._send is None:
            yield
            return
        task = asyncio.create_task(self._tell(self._send))
        try:
            yield
        finally:
            await end(task)  # a client that is gone is told by the call itself

    async def _tell(self, send: Send) -> None:
        began = time.monotonic()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_BEAT_S):
                    await self._news.wait()
            self._news.clear()
            text, self._waiting = self._waiting, ""
            self._count += 1
            await send(self._count, None, text.rstrip("\n") or f"{time.monotonic() - began:.0f} s so far")
            await asyncio.sleep(_PAUSE_S)
