"""The leader: of several servers on one registry the one that does the background work.

It holds a lease, a document in the registry that it renews every second. Nobody's clock is compared with another's: a
server that is not the leader takes the lease over when it has not seen it renewed for `EXPIRY_S` by its own monotonic
clock, or at once when the holder was a process of this machine that is dead. A leader that could not renew it for less
than that has stopped its work before.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable

import msgspec

from skerry import aio
from skerry.errors import Conflict, NotFound, SkerryError
from skerry.manager import identity
from skerry.model.records import Owner
from skerry.store import Store
from skerry.store.documents import Document

RENEW_S = 1.0
EXPIRY_S = 5.0
_GIVE_UP_S = 3.0
"""Seconds without a renewal after which a leader is none any more: less than others wait."""
_ANSWER_S = 2.0
"""Seconds that the registry has for an answer."""
_RETRY_S = (0.5, 30.0)
_ID = "server"
_log = logging.getLogger("skerry.server")
Work = Callable[[], Awaitable[None]]


async def keep_up(name: str, work: Work) -> None:
    """Until cancelled: do work, and begin it again when it ends or fails, whatever it fails with."""
    waits = aio.backoff(*_RETRY_S)
    while True:
        began = time.monotonic()
        try:
            await work()
            _log.debug("background work %s has ended, and begins again", name)
        except Exception:
            _log.exception("background work %s failed, and begins again", name)
        if time.monotonic() - began > _RETRY_S[1]:
            waits = aio.backoff(*_RETRY_S)
        await asyncio.sleep(next(waits))


class Lease(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lease of the leader; without a holder it is free."""

    holder: Owner | None = None
    server: str = ""
    """The one server of that process."""


class Leader:
    """This server's part in who is the leader, and the work that it does while it is."""

    def __init__(self, store: Store, me: Owner | None = None) -> None:
        self._leases = store.documents("lease", Lease)
        self._mine = Lease(holder=me or identity.this_process(), server=secrets.token_hex(8))
        self._works: dict[str, Work] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._seen: tuple[int, float] = (-1, 0.0)
        """Version of the lease when it was read last, and since when it has been that one."""
        self.is_leader = False

    def background(self, name: str, work: Work) -> None:
        """Have work done for as long as this server is the leader: it is begun when it becomes one, begun again when it
        fails or ends, and cancelled when it is the leader no more."""
        self._works[name] = work
        if self.is_leader:
            self._begin(name)

    async def run(self) -> None:
        """Until it is cancelled: be the leader, or wait to become one."""
        renewed_at = 0.0
        try:
            while True:
                asked_at = time.monotonic()
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        holds = await self._hold()
                except (SkerryError, OSError) as error:  # a timeout is an OSError too
                    _log.debug("the lease of the leader is not known: %s", error or type(error).__name__)
                    holds = self.is_leader and asked_at - renewed_at < _GIVE_UP_S - _ANSWER_S
                else:
                    renewed_at = asked_at if holds else renewed_at
                await self._become(holds)
                await asyncio.sleep(RENEW_S)
        finally:
            await aio.run_to_end(self._leave())

    async def _hold(self) -> bool:
        """Renew the lease, or take it if it is free; whether it is ours now."""
        try:
            found = await self._leases.get(_ID)
        except NotFound:
            return await self._write(None)
        if found.body == self._mine or self._is_free(found):
            return await self._write(found)
        return False

    def _is_free(self, found: Document[Lease]) -> bool:
        holder, now = found.body.holder, time.monotonic()
        if holder is None or identity.is_alive(holder) is False:
            return True
        version, since = self._seen
        if version != found.version:
            self._seen = found.version, now
            return False
        return now - since >= EXPIRY_S

    async def _write(self, found: Document[Lease] | None) -> bool:
        try:
            if found is None:
                await self._leases.add(_ID, self._mine)
            else:
                await self._leases.replace(_ID, self._mine, version=found.version)
        except Conflict:  # another was quicker
            return False
        return True

    async def _become(self, leader: bool) -> None:
        if leader == self.is_leader:
            return
        self.is_leader = leader
        _log.info("this server is the leader" if leader else "this server is no longer the leader")
        if leader:
            for name in self._works:
                self._begin(name)
        else:
            await self._end()

    def _begin(self, name: str) -> None:
        self._tasks[name] = asyncio.create_task(keep_up(name, self._works[name]), name=f"skerry-{name}")

    async def _end(self) -> None:
        tasks, self._tasks = self._tasks, {}
        await aio.end(*tasks.values())

    async def _leave(self) -> None:
        """End the work, and let another be the leader at once."""
        was_leader, self.is_leader = self.is_leader, False
        await self._end()
        if not was_leader:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await self._leases.get(_ID)
                if found.body == self._mine:
                    await self._leases.replace(_ID, Lease(), version=found.version)
        except (SkerryError, OSError) as error:
            _log.debug("the lease of the leader ends by itself: %s", error or type(error).__name__)
