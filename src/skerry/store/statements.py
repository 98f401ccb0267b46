"""Statements on the tables of the registry, each within a transaction of its caller's."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from skerry.clock import End, Moment
from skerry.errors import Conflict, InvalidSpec, NotFound
from skerry.model.records import Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.store import rows
from skerry.store.base import Transaction
from skerry.store.schema import LIVE

CANDIDATES = 10
"""The most sandboxes that a message names."""
_FIRST_CID = 1 << 17
"""Smaller ones are for machines without a record: templates, probes, those with a Docker in them."""
_CIDS = 1 << 31


def select(tx: Transaction, condition: str, *params: Any) -> list[Record]:
    return [rows.to_record(row) for row in tx.rows(f"SELECT {rows.RECORD} FROM sandboxes WHERE {condition}", *params)]


def get(tx: Transaction, id: SandboxId, project: str | None = None) -> Record:
    mine, params = ("", ()) if project is None else (" AND project = ?", (project,))
    for record in select(tx, f"id = ?{mine}", rows.clean(id), *params):
        return record
    raise NotFound(f"no sandbox has the id {id!r}")


def place(tx: Transaction, id: str, project: str | None) -> int:
    """The place of a sandbox in the order of all lists. Raises InvalidSpec if there is none of that id."""
    mine, params = ("", ()) if project is None else (" AND project = ?", (project,))
    for (seq,) in tx.rows(f"SELECT seq FROM sandboxes WHERE id = ?{mine}", rows.clean(id), *params):
        return int(seq)
    raise InvalidSpec("after: that page is gone; begin again without it", field="after")


def noted_env(tx: Transaction, id: SandboxId) -> dict[str, str]:
    for (text,) in tx.rows("SELECT env FROM sandboxes WHERE id = ?", id):
        return rows.digests_of(text)
    return {}


def add_env(tx: Transaction, id: SandboxId, digests: dict[str, str]) -> None:
    if digests:
        env = rows.to_json({**noted_env(tx, id), **digests})
        tx.execute("UPDATE sandboxes SET env = ? WHERE id = ?", env, id)


def count(tx: Transaction, condition: str, *params: Any) -> int:
    return int(tx.rows(f"SELECT count(*) FROM sandboxes WHERE {condition}", *params)[0][0])


def promised_memory(tx: Transaction, boot_id: str) -> int:
    """Memory that the sandboxes of a host in this boot may take together."""
    sql = f"SELECT COALESCE(SUM(memory), 0) FROM sandboxes WHERE {LIVE} AND boot_id = ?"
    return int(tx.rows(sql, boot_id)[0][0])


def counter(tx: Transaction, name: str) -> int:
    return int(tx.rows("SELECT value FROM counters WHERE name = ?", name)[0][0])


def next(tx: Transaction, name: str) -> int:
    tx.execute("UPDATE counters SET value = value + 1 WHERE name = ?", name)
    return counter(tx, name)


def cid(instance: str, seq: int) -> int:
    """CID of the sandbox whose first event is `seq`. Installations begin at places of their own: the kernel of a host
    that several share knows a number once."""
    return _FIRST_CID + (zlib.crc32(instance.encode()) + seq) % _CIDS


def held_by_key(tx: Transaction, project: str, key: str, asked: str) -> Record | None:
    """The live sandbox of this key. Raises Conflict if it was asked for with another spec, whatever it is now."""
    for row in tx.rows(
        f"SELECT asked, {rows.RECORD} FROM sandboxes WHERE project = ? AND key = ? AND {LIVE}", project, key
    ):
        if row[0] != asked:
            raise Conflict(f"the key {key!r} was used for sandbox {row[1]}, which was asked for with another spec")
        return rows.to_record(row[1:])
    return None


def end(record: Record, spec: Spec, now: Moment, *, is_made: bool = False, restart: bool = False) -> End | None:
    """The end of its lifetime, noted now."""
    if not spec.lifetime_s:
        return None
    if restart or record.end is None:
        return End(now, spec.lifetime_s)
    if is_made:  # its agent has counted for a while already, but not for longer than it was in the making
        return End(now, spec.lifetime_s, spec.lifetime_s - (record.end.left_at(now) or 0.0))
    return record.end.noted_at(now)


def refuse_taken_name(tx: Transaction, spec: Spec, id: SandboxId) -> None:
    taken = f"SELECT id FROM sandboxes WHERE project = ? AND name = ? AND id <> ? AND {LIVE}"
    for (holder,) in tx.rows(taken, spec.project, spec.name, id):
        raise Conflict(f"the name {spec.name!r} is taken by sandbox {holder} in project {spec.project!r}")


def booting(tx: Transaction) -> set[tuple[str, str]]:
    """Id and maker of each sandbox that boots now."""
    sql = f"SELECT id, COALESCE(remaker, owner) FROM sandboxes WHERE {LIVE} AND booting = 1"
    return {(id, maker) for id, maker in tx.rows(sql)}


def insert(tx: Transaction, record: Record, seq: int, **more: str | None) -> None:
    made = {"id": record.id, "seq": seq, "key": record.key, "created_at": record.created_at, "memory": record.memory}
    columns = rows.to_columns(record) | made | {"cid": record.cid, "booting": 0} | more
    places = ", ".join("?" for _ in columns)
    tx.execute(f"INSERT INTO sandboxes ({', '.join(columns)}) VALUES ({places})", *columns.values())


def update(tx: Transaction, record: Record) -> None:
    columns = rows.to_columns(record)
    changes = ", ".join(f"{column} = ?" for column in columns)
    boots_on = "booting" if record.state is State.CREATING else "0"
    tx.execute(f"UPDATE sandboxes SET {changes}, booting = {boots_on} WHERE id = ?", *columns.values(), record.id)


def emit(tx: Transaction, record: Record, seq: int, kind: str, *, detail: str | None = None) -> None:
    cause = record.cause.value if record.cause is not None else None
    tx.execute(
        f"INSERT INTO events ({rows.EVENT}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        *(seq, record.updated_at, record.id, kind, record.state.value, cause),
        rows.to_json({"detail": detail} if detail else {}),
    )


def ambiguous(reference: str, found: Sequence[Record]) -> str:
    names = [f"{record.id} ({record.name})" if record.name else record.id for record in found[:CANDIDATES]]
    more = " and more" if len(found) > CANDIDATES else ""
    return f"{reference!r} fits {', '.join(names)}{more}: give more of the id"
