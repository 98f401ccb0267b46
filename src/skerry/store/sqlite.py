"""The registry in one SQLite file, shared by all processes of a host without a daemon."""

from __future__ import annotations

import errno
import os
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, TypeVar

from skerry.errors import StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from skerry.store.base import Database, Transaction
from skerry.store.schema import META

T = TypeVar("T")

BALLAST_BYTES = 256 * 1024
"""Room kept for when the disk is full: SQLite needs some even to delete."""
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)


class SQLite(Database):
    """A file in WAL mode. It comes into being whole, so an empty or headless file is damage, not a new registry."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        super().__init__()
        self.name = os.path.abspath(path)
        self._path = Path(self.name)
        self._ballast = Path(f"{self.name}-ballast")
        self._timeout_s = timeout_s
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] = (0, 0)

    def _run(self, work: Callable[[Transaction], T], write: bool, frees: bool) -> T:
        try:
            connection = self._connect()
            if write and not frees:
                self._keep_ballast()
            return self._transact_in_need(connection, work) if frees else _transact(connection, work, write)
        except sqlite3.Error as error:
            raise self._explain(error) from error
        except OSError as error:
            raise self._explain_os(error) from error

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self._path.exists():
                self._make()
            try:
                self._connection = self._open()
            except sqlite3.Error as error:
                if not _is_full(error):
                    raise
                self._ballast.unlink(missing_ok=True)  # even a reader needs room for the shared index
                self._connection = self._open()
        elif self._identity != self._look():
            raise StoreUnavailable(f"the registry {self.name} was replaced while it was in use: start again")
        return self._connection

    def _look(self) -> tuple[int, int]:
        """Which file this is: SQLite would go on writing to one that was removed, and nobody would see it."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            raise StoreUnavailable(f"the registry {self.name} was removed while it was in use: put it back") from None
        if found.st_size == 0:
            raise StoreCorrupt(_corrupt(self.name, "it is empty"))
        return found.st_dev, found.st_ino

    def _open(self) -> sqlite3.Connection:
        self._identity = self._look()
        connection = sqlite3.connect(self._path, timeout=self._timeout_s, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA foreign_keys = ON")
            if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchall():
                raise StoreCorrupt(_corrupt(self.name, "it is a database, but not skerry's"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _make(self) -> None:
        """Put a registry without content in place at once: whoever else does so at this moment, one file wins."""
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
        """What makes things must leave the ballast in place, so that what frees them can use it."""
        with suppress(FileNotFoundError):
            if self._ballast.stat().st_size == BALLAST_BYTES:
                return
        descriptor = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, BALLAST_BYTES)
        except OSError:
            self._ballast.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _transact_in_need(self, connection: sqlite3.Connection, work: Callable[[Transaction], T]) -> T:
        """Use the ballast if there is no other room; until it is back, the log may not grow into its place."""
        try:
            result = _transact(connection, work, write=True)
        except sqlite3.Error as error:
            if not _is_full(error):
                raise
            self._ballast.unlink(missing_ok=True)
            _empty_log(connection)
            result = _transact(connection, work, write=True)
        if not self._ballast.exists():
            _empty_log(connection)
            with suppress(OSError):
                self._keep_ballast()
        return result

    def _explain(self, error: sqlite3.Error) -> StoreError:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
        primary = code & 0xFF
        if _is_full(error):
            return StoreFull(_full(self.name))
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailable(
                f"another process has held the registry {self.name} for {self._timeout_s:g} s: retry"
            )
        if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return StoreCorrupt(_corrupt(self.name, str(error)))
        if primary == sqlite3.SQLITE_READONLY or (primary == sqlite3.SQLITE_CANTOPEN and not self._is_writable()):
            return StoreReadOnly(_read_only(self.name))
        if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL):
            return StoreUnavailable(f"the registry {self.name} cannot be used: {error}")
        return StoreError(f"the registry {self.name} refused what skerry asked of it: {error}")

    def _explain_os(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreFull(_full(self.name))
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return StoreReadOnly(_read_only(self.name))
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            return StoreUnavailable(f"the registry {self.name} cannot be used: {self._path.parent} is no folder")
        return StoreUnavailable(f"the registry {self.name} cannot be used: {error.strerror}")

    def _is_writable(self) -> bool:
        return all(os.access(path, os.W_OK, effective_ids=True) for path in (self._path, self._path.parent))

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


class _Transaction(Transaction):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, *params: Any) -> int:
        return self._connection.execute(sql, params).rowcount

    def rows(self, sql: str, *params: Any) -> Sequence[tuple[Any, ...]]:
        return self._connection.execute(sql, params).fetchall()


def _transact(connection: sqlite3.Connection, work: Callable[[Transaction], T], write: bool) -> T:
    connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
    try:
        result = work(_Transaction(connection))
        connection.execute("COMMIT")
        return result
    except BaseException:
        with suppress(sqlite3.Error):
            connection.rollback()
        raise


def _empty_log(connection: sqlite3.Connection) -> None:
    """Move what is in the log to its place, and give the log's room back; not if there is no room for that either."""
    with suppress(sqlite3.Error):
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _is_full(error: sqlite3.Error) -> bool:
    return getattr(error, "sqlite_errorcode", None) in _FULL


def _full(name: str) -> str:
    return f"no room to write the registry {name}: free some on its disk (destroying sandboxes still works)"


def _read_only(name: str) -> str:
    return (
        f"the registry {name} cannot be written to: its file, folder or file system is read-only for this "
        "user; look who owns it, or set SKERRY_STATE_DIR to a folder of yours"
    )


def _corrupt(name: str, why: str) -> str:
    return (
        f"the registry {name} is damaged ({why}): restore it from a backup, or move it away, and its sandboxes end by "
        "their lifetimes; it was left as it is"
    )
