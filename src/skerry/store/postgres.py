"""The registry in PostgreSQL, so that several hosts can share one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar, cast

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

_WRITERS = 0x736B65727279
"""The advisory lock that writers hold until they have committed, so that there is one at a time."""
_ATTEMPTS = 5
_CONFLICTS = ("40001", "40P01")  # serialization failure, deadlock
_FULL = ("53100",)
_READ_ONLY = ("25006", "42501")  # a standby; no right to write
_CORRUPT = ("XX001", "XX002")
_TIMEOUT = ("57014", "55P03", "25P03")  # a statement, a lock, a writer that did nothing for too long


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
            return self._survive(work, write)
        except psycopg.Error as error:
            raise self._explain(error) from None  # the cause may repeat the URL's secrets

    def _survive(self, work: Callable[[Transaction], T], write: bool) -> T:
        """Run `work` on a connection; once more on another one if it was lost, unless it had been committed."""
        attempt = _Attempt(self._connect())
        try:
            return attempt.run(work, write)
        except psycopg.Error:
            if not attempt.is_lost():
                raise
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
        if error.sqlstate in _FULL:
            return StoreFull(f"no room to write the registry {self.name}: free some on the database's disk ({message})")
        if error.sqlstate in _READ_ONLY:
            return StoreReadOnly(f"the registry {self.name} cannot be written to: {message}")
        if error.sqlstate in _CORRUPT:
            return StoreCorrupt(f"the registry {self.name} is damaged: restore it from a backup ({message})")
        if error.sqlstate in _TIMEOUT:
            return StoreUnavailable(f"the registry {self.name} was busy for too long: retry ({message})")
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return StoreUnavailable(f"the registry {self.name} does not answer: {message}")
        return StoreError(f"the registry {self.name} refused what skerry asked of it: {message}")

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()
            self._connection = None


class _Attempt:
    """One run of some work on one connection; it can tell afterwards whether it was committed."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection
        self._id: int | None = None
        self._is_committing = False
        self.result: Any = None

    def run(self, work: Callable[[Transaction], T], write: bool) -> T:
        try:
            if write:
                sql = "SELECT txid_current(), pg_advisory_xact_lock(%s)"
                self._id = self._connection.execute(sql, (_WRITERS,)).fetchall()[0][0]
            result = self.result = work(_Transaction(self._connection))
            self._is_committing = write
            self._connection.commit()
            return result
        except BaseException:
            with suppress(psycopg.Error):
                self._connection.rollback()
            raise

    def is_lost(self) -> bool:
        return bool(self._connection.closed)

    def was_committed(self, connection: psycopg.Connection) -> bool:
        """Ask another connection: the answer to a COMMIT may have been lost on its way."""
        if not self._is_committing:
            return False
        with connection.transaction():
            # Whoever has the lock knows that no other writer is still about to commit.
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_WRITERS,))
            status = connection.execute("SELECT txid_status(%s)", (self._id,)).fetchall()[0][0]
        return bool(status == "committed")


class _Transaction(Transaction):
    def __init__(self, connection: psycopg.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, *params: Any) -> int:
        return self._connection.execute(_dialect(sql), params).rowcount

    def rows(self, sql: str, *params: Any) -> Sequence[tuple[Any, ...]]:
        return self._connection.execute(_dialect(sql), params).fetchall()


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
    """The settings, with an end to every wait: for the server, for other writers, and for a network that is gone."""
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
