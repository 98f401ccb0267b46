"""The seam between the registry and a database: `Store` is written once, on anything that is a `Database`."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

from skerry.errors import SkerryError, StoreUnavailable

T = TypeVar("T")
_MOST_TOGETHER = 64
"""The most changes of one transaction: other processes wait for its end."""
_log = logging.getLogger("skerry.store")


class Transaction:
    """SQL inside one transaction. Placeholders are `?`; the dialect is what SQLite and PostgreSQL share."""

    def __init__(self, run: Callable[[str, Sequence[Any]], Any]) -> None:
        self._run = run

    def execute(self, sql: str, *params: Any) -> int:
        """Run a statement, and count the rows it changed."""
        return int(self._run(sql, params).rowcount)

    def rows(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        return cast("list[tuple[Any, ...]]", self._run(sql, params).fetchall())


class _Job(NamedTuple):
    """Work that waits for the thread, and whoever waits for what comes of it."""

    work: Callable[[Transaction], Any]
    write: bool
    frees: bool
    told: Future[Any]

    def goes_with(self, other: _Job) -> bool:
        return self.write and other.write and self.frees == other.frees

    def attempt(self, tx: Transaction) -> tuple[Any, SkerryError | None]:
        """Do it whole or not at all within a larger transaction; its result, or its own refusal."""
        tx.execute("SAVEPOINT one")
        try:
            outcome: tuple[Any, SkerryError | None] = self.work(tx), None
        except SkerryError as error:
            tx.execute("ROLLBACK TO SAVEPOINT one")
            outcome = None, error
        tx.execute("RELEASE SAVEPOINT one")
        return outcome


class Database(ABC):
    """A database that may be shared by many processes. Work runs in a thread of its own, never in the event loop."""

    name: str
    """Its path, or its URL without secrets, for messages."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="skerry-store")
        self._jobs: deque[_Job] = deque()
        self._is_closed = False

    async def transact(self, work: Callable[[Transaction], T], *, write: bool = True, frees: bool = False) -> T:
        """Run `work` whole or not at all, alone among all writers, to its end even if the await is cancelled. It may be
        run again after a conflict or a lost connection, so it must do nothing but SQL. Work that `frees` things may use
        the room kept for a full disk. Raises StoreUnavailable, StoreFull, StoreCorrupt, StoreReadOnly.

        Writes that wait for the thread at the same moment are committed together, each in a savepoint of its own."""
        if self._is_closed:
            raise StoreUnavailable(f"the registry {self.name} was closed by this process: open it again")
        job = _Job(work, write, frees, Future())
        self._jobs.append(job)
        self._thread.submit(self._work_off)
        result: T = await asyncio.wrap_future(job.told)
        return result

    def _work_off(self) -> None:
        """Do what has waited longest, in the thread, and with a write those that come right after it; nothing if that
        was done with another."""
        jobs: list[_Job] = []
        while self._jobs and len(jobs) < _MOST_TOGETHER and (not jobs or jobs[0].goes_with(self._jobs[0])):
            job = self._jobs.popleft()
            if job.told.set_running_or_notify_cancel():
                jobs.append(job)
        if len(jobs) > 1 and self._run_together(jobs):
            return
        for job in jobs:
            try:
                job.told.set_result(self._run(job.work, job.write, job.frees))
            except BaseException as error:
                job.told.set_exception(error)

    def _run_together(self, jobs: Sequence[_Job]) -> bool:
        """Do them in one transaction, and tell each what came of it; or nothing, if that cannot be and each has to be
        tried alone."""
        try:
            outcomes = self._run(lambda tx: [job.attempt(tx) for job in jobs], True, jobs[0].frees)
        except StoreUnavailable as error:  # each alone would wait as long as all of them have now
            outcomes = [(None, error) for _ in jobs]
        except BaseException as error:
            _log.debug("%d changes of the registry %s are made one by one: %s", len(jobs), self.name, error)
            return False
        for job, (result, failure) in zip(jobs, outcomes, strict=True):
            if failure is None:
                job.told.set_result(result)
            else:
                job.told.set_exception(failure)
        return True

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
