"""The registry in one SQLite file, shared by all processes of a host without a daemon."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sqlite3
import sys
import tempfile
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import ClassVar, TypeVar

from skerry.errors import StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from skerry.store.base import Database, Transaction
from skerry.store.schema import META, prepare

T = TypeVar("T")
_log = logging.getLogger("skerry.store")

BALLAST_BYTES = 256 * 1024  # room kept for when the disk is full: SQLite needs some even to delete
_OF_NO_SANDBOX = {"meta", "counters"}  # tables
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_NOT_MADE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR_SHMOPEN)
_UNUSABLE = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL)


class SQLite(Database):
    """A file in WAL mode. It comes into being whole, so an empty or headless file is damage, not a new registry."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__()
        self.name = os.path.abspath(path)
        self._path = Path(self.name)
        self._ballast = Path(f"{self.name}-ballast")
        self._spare = Path(f"{self.name}-spare")
        """An empty file, for its inode: SQLite makes two files when it opens a registry, the ballast is but one."""
        self._had_need = False
        self._timeout_s = timeout_s
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] = (0, 0)

    def _run(self, work: Callable[[Transaction], T], write: bool, frees: bool) -> T:
        try:
            connection = self._connect()
            if write and not frees:
                self._keep_ballast()
            return self._transact_in_need(connection, work) if frees else _transact(connection, work, write)
        except (sqlite3.Error, OSError) as error:
            raise self._explain(error) from error

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self._path.exists():
                self._make()
            try:
                self._connection = self._open()
            except sqlite3.Error as error:
                if not self._is_full(error):
                    raise
                self._drop_ballast()  # even a reader needs room for the shared index
                self._connection = self._open()
        elif self._identity != self._look():
            raise StoreUnavailable(f"the registry {self.name} was replaced while it was in use: start again")
        return self._connection

    def _look(self) -> tuple[int, int]:
        """Identity of the file: SQLite would go on writing to one that was removed, and nobody would see it."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            raise StoreUnavailable(f"the registry {self.name} was removed while it was in use: put it back") from None
        if found.st_size == 0:
            raise self._corrupt("it is empty")
        return found.st_dev, found.st_ino

    def _open(self) -> sqlite3.Connection:
        self._identity = self._look()
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchall():
                raise self._corrupt("it is a database, but not skerry's")
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self) -> None:
        """Put an empty registry in place in one step: of several processes that do so at once, one wins."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{self._path.name}-", dir=self._path.parent) as folder:
            draft = Path(folder, "draft")
            draft.touch(0o600)
            with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(META)
            with suppress(FileExistsError):
                os.link(draft, self._path)

    def _keep_ballast(self) -> None:
        """Make the ballast if it is missing: writers that free things may need it."""
        with suppress(FileNotFoundError):
            if self._ballast.stat().st_size == BALLAST_BYTES and self._spare.exists():
                return
        self._spare.touch(mode=0o600)
        descriptor = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if sys.platform == "darwin":  # which has no call for it
                os.pwrite(descriptor, os.urandom(BALLAST_BYTES), 0)
            else:
                os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        except OSError:
            self._ballast.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _restore_ballast(self) -> None:
        try:
            self._keep_ballast()
        except OSError as error:
            _log.debug("no room is kept for the registry %s: %s", self.name, error)

    def _drop_ballast(self) -> None:
        _log.warning("the disk of the registry %s is full: the room that was kept for that is used", self.name)
        self._had_need = True
        for path in (self._ballast, self._spare):
            path.unlink(missing_ok=True)

    def _transact_in_need(self, connection: sqlite3.Connection, work: Callable[[Transaction], T]) -> T:
        """Use the ballast if there is no other room; until it is back, the log may not grow into its place."""
        try:
            result = _transact(connection, work, write=True)
        except sqlite3.Error as error:
            if not self._is_full(error):
                raise
            self._drop_ballast()
            _empty_log(connection)
            result = _transact(connection, work, write=True)
        if not self._ballast.exists():
            _empty_log(connection)
            self._restore_ballast()
        return result

    def _explain(self, error: sqlite3.Error | OSError) -> StoreError:
        primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        number = getattr(error, "errno", None)
        if number in (errno.ENOSPC, errno.EDQUOT) or self._is_full(error):
            room = "free some on its disk (destroying sandboxes still works)"
            return StoreFull(f"no room to write the registry {self.name}: {room}")
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable(
                f"another process has held the registry {self.name} for {self._timeout_s:g} s: retry"
            )
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._corrupt(str(error))
        is_writable = all(os.access(path, os.W_OK, effective_ids=True) for path in (self._path, self._path.parent))
        is_locked = primary == sqlite3.SQLITE_CANTOPEN and not is_writable
        if is_locked or primary == sqlite3.SQLITE_READONLY or number in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnly(
                f"the registry {self.name} cannot be written to: its file, folder or file system is read-only for this "
                "user; look who owns it, or set SKERRY_STATE_DIR to a folder of yours"
            )
        if number in (errno.EEXIST, errno.ENOTDIR):
            return StoreUnavailable(f"the registry {self.name} cannot be used: {self._path.parent} is no folder")
        if number is not None or primary in _UNUSABLE:
            return StoreUnavailable(f"the registry {self.name} cannot be used: {getattr(error, 'strerror', error)}")
        return StoreError(f"the registry {self.name} refused what skerry asked of it: {error}")

    def _corrupt(self, why: str) -> StoreCorrupt:
        return StoreCorrupt(
            f"the registry {self.name} is damaged ({why}): restore it from a backup, or move it away, and its "
            "sandboxes end by their lifetimes; it was left as it is"
        )

    def _is_full(self, error: sqlite3.Error | OSError) -> bool:
        code = getattr(error, "sqlite_errorcode", None)
        if code not in _NOT_MADE:
            return code in _FULL
        disk = os.statvfs(self._path.parent)
        return disk.f_files > 0 and disk.f_favail == 0  # some file systems do not count them

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
            if self._had_need:  # the log and its index, which are gone, had the ballast's place
                self._restore_ballast()


class InMemory(Database):
    """A registry of one sandbox, which ends with it. Work takes microseconds, so it runs in the event loop."""

    name = ":memory:"
    _prepared: ClassVar[bytes] = b""
    """A registry without content: to copy one is quicker than to make its tables."""
    _emptied: ClassVar[list[sqlite3.Connection]] = []
    """Those of sandboxes that are gone: SQLite takes longer to understand its statements than to run them."""
    _most_emptied: ClassVar[int] = 16

    def __init__(self) -> None:
        super().__init__()
        self._connection, self._is_prepared = self._take()
        self._close = weakref.finalize(self, _give_back, self._connection)

    def _take(self) -> tuple[sqlite3.Connection, bool]:
        with suppress(IndexError):
            return InMemory._emptied.pop(), True
        return sqlite3.connect(self.name, isolation_level=None, check_same_thread=False), False

    async def prepare(self) -> None:
        if self._is_prepared:
            return
        if not InMemory._prepared:
            self._connection.execute(META)
            await prepare(self)
            InMemory._prepared = self._connection.serialize()
        else:
            self._connection.deserialize(InMemory._prepared)

    async def transact(self, work: Callable[[Transaction], T], *, write: bool = True, frees: bool = False) -> T:
        if self._is_closed:
            raise StoreUnavailable("the registry of this sandbox was closed by this process")
        return self._run(work, write, frees)

    async def aclose(self) -> None:
        self._is_closed = True
        self._disconnect()

    def _run(self, work: Callable[[Transaction], T], write: bool, frees: bool) -> T:
        return _transact(self._connection, work, write)

    def _disconnect(self) -> None:
        self._close()


def _give_back(connection: sqlite3.Connection) -> None:
    """Keep a connection for another sandbox, with nothing of this one in it, or close it."""
    try:
        connection.rollback()
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        for table in tables - _OF_NO_SANDBOX:
            connection.execute(f"DELETE FROM {table}")
    except sqlite3.Error:
        tables = set()
    if tables and len(InMemory._emptied) < InMemory._most_emptied:  # without any it was never prepared
        InMemory._emptied.append(connection)
    else:
        connection.close()


@atexit.register
def _close_emptied() -> None:
    """Keep none from now on, whether or not those that are still in use have been given back before."""
    InMemory._most_emptied = 0
    while InMemory._emptied:
        InMemory._emptied.pop().close()


def _transact(connection: sqlite3.Connection, work: Callable[[Transaction], T], write: bool) -> T:
    connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
    try:
        result = work(Transaction(connection.execute))
        connection.execute("COMMIT")
        return result
    except BaseException:
        with suppress(sqlite3.Error):
            connection.rollback()
        raise


def _empty_log(connection: sqlite3.Connection) -> None:
    """Move the log's content to its place, and give its room back, if there is room to do so."""
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        _log.debug("the log of the registry could not be emptied: %s", error)
