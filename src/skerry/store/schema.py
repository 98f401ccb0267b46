"""The tables of the registry as a list of migrations."""

from __future__ import annotations

import logging
import uuid

from skerry.errors import StoreTooNew
from skerry.store.base import Database, Transaction

_log = logging.getLogger("skerry.store")
LIVE = "state <> 'destroyed'"  # written exactly as in the partial indexes, so that they are used

META = "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)"
"""The one table that a database makes by itself: without it, it is not ours."""

_INDEXES = (
    f"CREATE INDEX sandboxes_live ON sandboxes (seq) WHERE {LIVE}",
    f"CREATE UNIQUE INDEX sandboxes_name ON sandboxes (project, name) WHERE {LIVE}",
    f"CREATE UNIQUE INDEX sandboxes_key ON sandboxes (project, key) WHERE {LIVE}",
)
_EVENTS = """CREATE TABLE events (
    seq BIGINT PRIMARY KEY,
    time DOUBLE PRECISION NOT NULL,
    sandbox TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    cause TEXT,
    data TEXT NOT NULL
)"""
_EVENTS_INDEX = "CREATE INDEX events_sandbox ON events (sandbox, seq)"
_SANDBOXES = """CREATE TABLE sandboxes (
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
    detail TEXT NOT NULL,{cid}
    boot_id TEXT NOT NULL,
    created_at DOUBLE PRECISION NOT NULL,
    updated_at DOUBLE PRECISION NOT NULL,
    ephemeral SMALLINT NOT NULL,
    doomed SMALLINT NOT NULL,
    booting SMALLINT NOT NULL{added}
)"""
_ADDED = (
    "volumes SMALLINT NOT NULL DEFAULT 0",
    "remaker TEXT",
    "env TEXT NOT NULL DEFAULT '{}'",
    "written TEXT",
    "ends TEXT",
)
_VOLUMES, _REMAKER, _ENV, _WRITTEN, _ENDS = (f"ALTER TABLE sandboxes ADD COLUMN {column}" for column in _ADDED)
_WITHOUT_CID = (
    "id, seq, version, state, project, provider, name, key, asked, spec, owner, enforced, cause, detail, boot_id, "
    "created_at, updated_at, ephemeral, doomed, booting, volumes, remaker, env, written, ends"
)

MIGRATIONS: list[tuple[str, ...]] = [
    (
        "CREATE TABLE counters (name TEXT PRIMARY KEY, value BIGINT NOT NULL)",
        "INSERT INTO counters (name, value) VALUES ('event', 0), ('cid', 2)",
        _SANDBOXES.format(cid=" cid BIGINT NOT NULL UNIQUE,", added=""),
        *_INDEXES,
        _EVENTS,
        _EVENTS_INDEX,
    ),
    (_VOLUMES, _REMAKER),
    (_ENV,),
    (_WRITTEN, _ENDS),
    (  # without the column cid: a database that cannot drop a unique column copies its table
        "DELETE FROM counters WHERE name = 'cid'",
        *(f"DROP INDEX {name}" for name in ("sandboxes_live", "sandboxes_name", "sandboxes_key", "events_sandbox")),
        "ALTER TABLE events RENAME TO old_events",
        "ALTER TABLE sandboxes RENAME TO old_sandboxes",
        _SANDBOXES.format(cid="", added="".join(f", {column}" for column in _ADDED)),
        f"INSERT INTO sandboxes ({_WITHOUT_CID}) SELECT {_WITHOUT_CID} FROM old_sandboxes",
        *_INDEXES,
        _EVENTS,
        "INSERT INTO events (seq, time, sandbox, kind, state, cause, data) "
        "SELECT seq, time, sandbox, kind, state, cause, data FROM old_events",
        _EVENTS_INDEX,
        "DROP TABLE old_events",
        "DROP TABLE old_sandboxes",
    ),
    (  # the number that a machine gets, given out with the record
        "ALTER TABLE sandboxes ADD COLUMN cid BIGINT",
        "CREATE UNIQUE INDEX sandboxes_cid ON sandboxes (cid)",
    ),
    (  # what a server keeps beside sandboxes
        """CREATE TABLE documents (
            kind TEXT NOT NULL,
            id TEXT NOT NULL,
            project TEXT NOT NULL,
            version BIGINT NOT NULL,
            created_at DOUBLE PRECISION NOT NULL,
            body TEXT NOT NULL,
            PRIMARY KEY (kind, id)
        )""",
        "CREATE INDEX documents_project ON documents (kind, project, id)",
    ),
    ("ALTER TABLE sandboxes ADD COLUMN memory BIGINT NOT NULL DEFAULT 0",),  # what it may take of its host's
]
"""Only ever added to; the place of an entry, counted from 1, is the version that it leads to."""


async def prepare(database: Database) -> str:
    """Migrate the database if it is not up to date; the id of its installation. Raises StoreTooNew."""

    def look(tx: Transaction) -> tuple[int, str]:
        meta = dict(tx.rows("SELECT name, value FROM meta"))
        version = int(meta.get("version", 0))
        if version > len(MIGRATIONS):
            raise StoreTooNew(
                f"the registry {database.name} was made by a newer skerry (its schema is {version}, this one knows up "
                f"to {len(MIGRATIONS)}): upgrade skerry, or use another state folder"
            )
        return version, meta.get("instance", "")

    def migrate(tx: Transaction) -> tuple[int, str]:
        version = look(tx)[0]  # writers run one after the other: the second finds it done
        for statement in (statement for statements in MIGRATIONS[version:] for statement in statements):
            tx.execute(statement)
        if version == 0:
            tx.execute("INSERT INTO meta (name, value) VALUES ('instance', ?), ('version', '0')", uuid.uuid4().hex)
        tx.execute("UPDATE meta SET value = ? WHERE name = 'version'", str(len(MIGRATIONS)))
        return look(tx)

    version, instance = await database.transact(look, write=False)
    if version < len(MIGRATIONS):
        _log.info("the registry %s is migrated from schema %d to %d", database.name, version, len(MIGRATIONS))
        version, instance = await database.transact(migrate)
    return instance
