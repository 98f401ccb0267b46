"""How many machines come up at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Turns:
    """A machine that comes up needs a processor for itself. More of them at once than there are processors would all be
    late together; one after the other, most are early and none is later. Who takes too long goes on, and the next one
    begins all the same."""

    def __init__(self, count: int, longest_s: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._longest_s = longest_s

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Waits for a turn: whoever asks has a deadline."""
        await self._free.acquire()
        taken = [self._free]

        def give_back() -> None:
            if taken:
                taken.pop().release()

        too_long = asyncio.get_running_loop().call_later(self._longest_s, give_back)
        try:
            yield
        finally:
            too_long.cancel()
            give_back()
