"""The seam between the registry and a database: `Store` is written once, on anything that is a `Database`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from skerry.errors import StoreUnavailable

T = TypeVar("T")


class Transaction:
    """SQL inside one transaction. Placeholders are `?`; the dialect is what SQLite and PostgreSQL share."""

    def __init__(self, run: Callable[[str, Sequence[Any]], Any]) -> None:
        self._run = run

    def execute(self, sql: str, *params: Any) -> int:
        """Run a statement, and count the rows it changed."""
        return int(self._run(sql, params).rowcount)

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return cast("list[tuple[Any, ...]]", self._run(sql, params).fetchall())


class Database(ABC):
    """A database that may be shared by many processes. Work runs in a thread of its own, never in the event loop."""

    name: str
    """Its path, or its URL without secrets, for messages."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-store")
        self._is_closed = False

    async def transact(self, work: Callable[[Transaction], T], *, write: bool = True, frees: bool = False) -> T:
        """Run `work` whole or not at all, alone among all writers, to its end even if the await is cancelled. It may be
        run again after a conflict or a lost connection, so it must do nothing but SQL. Work that `frees` things may use
        the room kept for a full disk. Raises StoreUnavailable, StoreFull, StoreCorrupt, StoreReadOnly."""
        if self._is_closed:
            raise StoreUnavailable(f"the registry {self.name} was closed by this process: open it again")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work, write, frees)

    async def aclose(self) -> None:
        """Finish the work that has begun and disconnect. Quiet the second time."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        finally:
            self._thread.shutdown(wait=False)

    @abstractmethod
    def _run(self, work: Callable[[Transaction], T], write: bool, frees: bool) -> T:
        """`transact`, in the thread."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close the connection, if there is one, in the thread."""
