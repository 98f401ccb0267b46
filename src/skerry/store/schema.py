"""The tables of the registry, as a list of migrations, and how a database is brought up to date."""

from __future__ import annotations

import uuid

from skerry.errors import StoreTooNew
from skerry.store.base import Database, Transaction

LIVE = "state <> 'destroyed'"
"""Written exactly as in the partial indexes, so that they are used."""

META = "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)"
"""The one table that a database makes by itself: without it, it is not ours."""

MIGRATIONS: list[tuple[str, ...]] = [
    (
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('event', 0), ('cid', 2)",
        """CREATE TABLE sandboxes (
            id TEXT PRIMARY KEY,
            seq BIGINT NOT NULL UNIQUE,
            version BIGINT NOT NULL,
            state TEXT NOT NULL,
            project TEXT NOT NULL,
            provider TEXT NOT NULL,
            name TEXT,
            key TEXT,
            asked TEXT,
            spec TEXT NOT NULL,
            owner TEXT NOT NULL,
            enforced TEXT NOT NULL,
            cause TEXT,
            detail TEXT NOT NULL,
            cid BIGINT NOT NULL UNIQUE,
            boot_id TEXT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            updated_at DOUBLE PRECISION NOT NULL,
            ephemeral SMALLINT NOT NULL,
            doomed SMALLINT NOT NULL,
            booting SMALLINT NOT NULL
        )""",
        f"CREATE INDEX sandboxes_live ON sandboxes (seq) WHERE {LIVE}",
        f"CREATE UNIQUE INDEX sandboxes_name ON sandboxes (project, name) WHERE {LIVE}",
        f"CREATE UNIQUE INDEX sandboxes_key ON sandboxes (project, key) WHERE {LIVE}",
        """CREATE TABLE events (
            seq BIGINT PRIMARY KEY,
            time DOUBLE PRECISION NOT NULL,
            sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            kind TEXT NOT NULL,
            state TEXT NOT NULL,
            cause TEXT,
            data TEXT NOT NULL
        )""",
        "CREATE INDEX events_sandbox ON events (sandbox, seq)",
    ),
    (
        "ALTER TABLE sandboxes ADD COLUMN volumes SMALLINT NOT NULL DEFAULT 0",
        "ALTER TABLE sandboxes ADD COLUMN remaker TEXT",
    ),
]
"""Only ever added to; the place of an entry, counted from 1, is the version that it leads to."""


async def prepare(database: Database) -> str:
    """Bring the database up to date, if it is not; the id of the installation that it belongs to."""

    def look(tx: Transaction) -> tuple[int, str]:
        return _look(tx, database.name)

    def migrate(tx: Transaction) -> tuple[int, str]:
        _migrate(tx, look(tx)[0])
        return look(tx)

    version, instance = await database.transact(look, write=False)
    if version < len(MIGRATIONS):
        version, instance = await database.transact(migrate)
    return instance


def _look(tx: Transaction, name: str) -> tuple[int, str]:
    meta = dict(tx.rows("SELECT name, value FROM meta"))
    version = int(meta.get("version", 0))
    if version > len(MIGRATIONS):
        raise StoreTooNew(
            f"the registry {name} was made by a newer skerry (its schema is {version}, this one knows up to "
            f"{len(MIGRATIONS)}): upgrade skerry, or use another state folder"
        )
    return version, meta.get("instance", "")


def _migrate(tx: Transaction, version: int) -> None:
    """Whoever comes second finds it done: writers run one after the other."""
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            tx.execute(statement)
    if version == 0:
        tx.execute("INSERT INTO meta (name, value) VALUES ('instance', ?), ('version', '0')", uuid.uuid4().hex)
    tx.execute("UPDATE meta SET value = ? WHERE name = 'version'", str(len(MIGRATIONS)))
