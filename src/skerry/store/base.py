"""The seam between the registry and a database: `Store` is written once, on any database that `Database` speaks to."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from skerry.errors import StoreUnavailable

T = TypeVar("T")


class Transaction(ABC):
    """SQL inside one transaction. Placeholders are `?`; the dialect is what SQLite and PostgreSQL share."""

    @abstractmethod
    def execute(self, sql: str, *params: Any) -> int:
        """Run a statement; how many rows it changed."""

    @abstractmethod
    def rows(self, sql: str, *params: Any) -> Sequence[tuple[Any, ...]]:
        """The rows of a query."""


class Database(ABC):
    """A database that may be shared by many processes. Work runs in a thread of its own, never in the event loop."""

    name: str
    """What messages call it: a path, or a URL without its secrets."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-store")
        self._is_closed = False

    async def transact(self, work: Callable[[Transaction], T], *, write: bool = True, frees: bool = False) -> T:
        """Run `work` whole or not at all, alone among all writers. It may be run again after a conflict or a lost
        connection, so it must do nothing but SQL. Raises StoreUnavailable, StoreFull, StoreCorrupt, StoreReadOnly.

        Work that `frees` things may use the room that is kept for when the disk is full. If the await is cancelled,
        work that has begun is still finished.
        """
        if self._is_closed:
            raise StoreUnavailable(f"the registry {self.name} was closed by this process: open it again")
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, work, write, frees)

    async def aclose(self) -> None:
        """Finish what has begun and let go. Quiet the second time."""
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
