"""The bell of a server: one look at the registry for all who follow its events, however many they are."""

from __future__ import annotations

import asyncio
import logging

from skerry.aio import backoff, end
from skerry.errors import SkerryError
from skerry.store import Store

_POLL_S = (0.01, 0.25)
"""First and longest wait between two looks."""
_log = logging.getLogger("skerry.server")


class Bell:
    """Rings when something was written to the registry, by whichever server or program. It looks while any wait."""

    def __init__(self, store: Store) -> None:
        """`store` is that of all projects."""
        self._store = store
        self._waiting: list[tuple[int, asyncio.Future[int]]] = []
        self._looking: asyncio.Task[None] | None = None

    async def last(self) -> int:
        """The place of the newest event."""
        return await self._store.last_event()

    async def after(self, place: int) -> int:
        """Wait until there is an event after this place; the place of the newest one."""
        rung: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = (place, rung)
        self._waiting.append(waiting)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            return await rung
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    async def _look(self) -> None:
        try:
            known, waits = -1, backoff(*_POLL_S)
            while self._waiting:
                last = await self._see(known)
                if last != known:
                    known, waits = last, backoff(*_POLL_S)
                self._ring(last)
                await asyncio.sleep(next(waits))
        finally:
            self._looking = None

    async def _see(self, known: int) -> int:
        try:
            return await self.last()
        except SkerryError as error:
            _log.debug("the registry is asked again later: %s", error)
            return known

    def _ring(self, last: int) -> None:
        for place, waiting in self._waiting:
            if last > place and not waiting.done():
                waiting.set_result(last)

    async def aclose(self) -> None:
        """Look no more."""
        if self._looking is not None:
            await end(self._looking)
