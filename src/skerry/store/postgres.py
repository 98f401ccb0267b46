"""The registry in PostgreSQL, so that several hosts can share one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from skerry.errors import ConfigError, StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreUnavailable
from skerry.store.base import Database, Transaction
from skerry.store.schema import META

try:
    import psycopg
    from psycopg import conninfo
except ImportError as error:
    raise ConfigError(
        f"a PostgreSQL registry needs psycopg, which cannot be loaded ({error}): "
        "pip install 'skerry[postgres]', or scripts/bootstrap in a checkout"
    ) from None

T = TypeVar("T")
_log = logging.getLogger("skerry.store")

_WRITERS = 0x736B65727279
"""The advisory lock that writers hold until they have committed, so that there is one at a time."""
_ATTEMPTS = 5
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_FULL = (StoreFull, "no room to write the registry {}: free some on the database's disk ({})")
_READ_ONLY = (StoreReadOnly, "the registry {} cannot be written to: {}")
_CORRUPT = (StoreCorrupt, "the registry {} is damaged: restore it from a backup ({})")
_BUSY = (StoreUnavailable, "the registry {} was busy for too long: retry ({})")
_GONE = (StoreUnavailable, "the registry {} does not answer: {}")
_REFUSED = (StoreError, "the registry {} refused what skerry asked of it: {}")
_MEANINGS: Mapping[str | None, tuple[type[StoreError], str]] = {
    "53100": _FULL,
    "25006": _READ_ONLY,  # a standby
    "42501": _READ_ONLY,  # no right to write
    **dict.fromkeys(("XX001", "XX002"), _CORRUPT),
    **dict.fromkeys(("57014", "55P03", "25P03"), _BUSY),  # a statement, a lock, a writer that did nothing for too long
}


class PostgreSQL(Database):
    """One connection, made when it is needed and made again when it is lost."""

    def __init__(self, url: str, *, timeout_s: float) -> None:
        super().__init__()
        try:
            settings = {key: str(value) for key, value in conninfo.conninfo_to_dict(url).items()}
        except psycopg.Error:  # its message repeats the URL, and with it the password
            raise ConfigError(
                "the database URL is not understood: write postgresql://user:password@host:port/database"
            ) from None
        self._secrets = [settings[key] for key in ("password", "sslpassword") if settings.get(key)]
        where = settings.get("host") or settings.get("hostaddr") or "localhost"
        port = f":{settings['port']}" if settings.get("port") else ""
        self.name = f"postgresql://{where}{port}/{settings.get('dbname', '')}"
        self._settings = _with_deadlines(settings, timeout_s)
        self._connection: psycopg.Connection | None = None

    def _run(self, work: Callable[[Transaction], T], write: bool, frees: bool) -> T:
        try:
            for _ in range(_ATTEMPTS - 1):
                try:
                    return self._survive(work, write)
                except psycopg.Error as error:
                    if error.sqlstate not in _CONFLICTS:
                        raise
                    _log.debug("the registry %s: a transaction is retried (%s)", self.name, error.sqlstate)
            return self._survive(work, write)
        except psycopg.Error as error:
            raise self._explain(error) from None  # the cause may repeat the URL's secrets

    def _survive(self, work: Callable[[Transaction], T], write: bool) -> T:
        """Run `work` on a connection; once more on another one if it was lost, unless it had been committed."""
        connection = self._connect()
        attempt = _Attempt(connection)
        try:
            return attempt.run(work, write)
        except psycopg.Error:
            if not connection.closed:
                raise
        _log.info("the connection to the registry %s was lost: a new one is made", self.name)
        self._disconnect()
        connection = self._connect()
        if attempt.was_committed(connection):
            return cast("T", attempt.result)
        return _Attempt(connection).run(work, write)

    def _connect(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            connection = psycopg.connect(**cast("dict[str, Any]", self._settings))
            try:
                _ensure_meta(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _explain(self, error: psycopg.Error) -> StoreError:
        message = " ".join(str(error).split())
        for secret in self._secrets:
            message = message.replace(secret, "***")
        is_gone = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
        kind, text = _MEANINGS.get(error.sqlstate, _GONE if is_gone else _REFUSED)
        return kind(text.format(self.name, message))

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


class _Attempt(msgspec.Struct):
    """One run of some work on one connection; it can tell afterwards whether it was committed."""

    _connection: psycopg.Connection
    _id: int | None = None
    _is_committing: bool = False
    result: Any = None

    def run(self, work: Callable[[Transaction], T], write: bool) -> T:
        try:
            if write:
                sql = "SELECT txid_current(), pg_advisory_xact_lock(%s)"
                self._id = self._connection.execute(sql, (_WRITERS,)).fetchall()[0][0]
            tx = Transaction(lambda sql, params: self._connection.execute(_dialect(sql), params))
            result = self.result = work(tx)
            self._is_committing = write
            self._connection.commit()
            return result
        except BaseException:
            with suppress(psycopg.Error):
                self._connection.rollback()
            raise

    def was_committed(self, connection: psycopg.Connection) -> bool:
        """Ask another connection: the answer to a COMMIT may have been lost on its way."""
        if not self._is_committing:
            return False
        with connection.transaction():
            # Whoever has the lock knows that no other writer is still about to commit.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_WRITERS,))
            status = connection.execute("SELECT txid_status(%s)", (self._id,)).fetchall()[0][0]
        return bool(status == "committed")


@lru_cache(maxsize=128)
def _dialect(sql: str) -> str:
    return sql.replace("?", "%s")


def _ensure_meta(connection: psycopg.Connection) -> None:
    exists = "SELECT to_regclass('meta') IS NOT NULL"
    with connection.transaction():
        if not connection.execute(exists).fetchall()[0][0]:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_WRITERS,))
            if not connection.execute(exists).fetchall()[0][0]:
                connection.execute(META)


def _with_deadlines(settings: dict[str, str], timeout_s: float) -> dict[str, str]:
    """Add an end to every wait: for the server, for other writers, and for a network that is gone."""
    milliseconds = str(int(timeout_s * 1000))
    limits = f"-c statement_timeout={milliseconds} -c idle_in_transaction_session_timeout={milliseconds}"
    defaults = {
        "connect_timeout": str(max(2, round(timeout_s))),
        "tcp_user_timeout": milliseconds,
        "keepalives_idle": "5",
        "keepalives_interval": "2",
        "keepalives_count": "3",
        "application_name": "skerry",
    }
    return defaults | settings | {"options": f"{settings.get('options', '')} {limits}".strip()}
