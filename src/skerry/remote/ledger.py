"""The ledger of a server, read by calls to it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from skerry.config import Config
from skerry.ledger.line import NO_HASH, Line
from skerry.ledger.reading import ALL_LINES, AsyncLedger, LineFilter
from skerry.ledger.verify import Verified
from skerry.remote.api import LONG_S, Api

_PAGE = 1000


class _Page(msgspec.Struct):
    items: list[Line]
    next: str | None = None


class _Verified(msgspec.Struct):
    found: Verified


class RemoteLedger(AsyncLedger):
    """The ledger of a server: of it, what the token may see."""

    def __init__(self, config: Config, api: Api) -> None:
        super().__init__(config)
        self._api = api

    async def show(self, filter: LineFilter = ALL_LINES, *, tail: int | None = None) -> AsyncIterator[Line]:
        if tail is not None:
            newest: deque[Line] = deque()
            async for line in self._pages(filter, newest=True):
                if len(newest) >= tail:
                    break
                newest.appendleft(line)
            for line in newest:
                yield line
            return
        async for line in self._pages(filter):
            yield line

    async def page(
        self,
        filter: LineFilter = ALL_LINES,
        *,
        after: int | None = None,
        limit: int = 100,
        newest: bool = False,
        timeout_s: float = 30.0,
    ) -> list[Line]:
        asked = {**_asked(filter), "after": after, "limit": limit, "newest": newest}
        return (await self._api.get("/ledger", _Page, asked, timeout_s=timeout_s)).items

    async def _pages(self, filter: LineFilter, *, newest: bool = False) -> AsyncIterator[Line]:
        after: str | None = None
        while True:
            asked = {**_asked(filter), "after": after, "limit": _PAGE, "newest": newest}
            page = await self._api.get("/ledger", _Page, asked)
            for line in page.items:
                yield line
            after = page.next
            if after is None:
                return

    async def follow(self, filter: LineFilter = ALL_LINES, *, after: int | None = None) -> AsyncIterator[Line]:
        asked = {name: value for name, value in _asked(filter).items() if name not in ("since", "until")}
        async with aclosing(self._api.follow("/ledger/follow", {**asked, "after": after})) as events:
            async for each in events:
                yield each.read(Line)

    async def verify(self, head: str | None = None) -> Verified:
        return (await self._api.get("/ledger/verify", _Verified, {"head": head}, timeout_s=LONG_S)).found

    async def head(self) -> str:
        newest = await self.page(limit=1, newest=True)
        return newest[0].hash if newest else NO_HASH


def _asked(filter: LineFilter) -> dict[str, Any]:
    return {
        "sandbox": filter.sandbox,
        "kind": sorted(filter.kinds),
        "since": filter.since,
        "until": filter.until,
        "tool": filter.tool,
        "name": filter.name,
        "actor": filter.actor,
    }
