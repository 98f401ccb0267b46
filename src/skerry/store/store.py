"""The registry of sandboxes: reservations, compare-and-set changes, and the one order of all events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from skerry.errors import ConfigError, Conflict, InvalidSpec, LimitReached, NotFound, WrongState
from skerry.lifecycle import State, move
from skerry.records import Cause, Event, Filter, Owner, Record
from skerry.spec import SandboxId, Spec
from skerry.store import rows
from skerry.store.base import Database, Transaction
from skerry.store.schema import LIVE, prepare

TIMEOUT_S = 10.0
"""How long another process, or the database, is waited for."""
_FREEING = frozenset({State.DESTROYED, State.ERROR, State.LOST})
_SETTLED = frozenset({State.READY, State.PAUSED, State.STOPPED})
_CANDIDATES = 10
_ALL_LIVE = Filter()


class Store:
    """What is known of every sandbox. Many processes may use one at once; `instance` is their installation's id."""

    def __init__(self, database: Database, instance: str) -> None:
        self._database = database
        self.instance = instance

    @classmethod
    async def open(cls, url: str, *, timeout_s: float = TIMEOUT_S) -> Store:
        """Open, and make or migrate where needed, the registry at a path, `sqlite:///path` or `postgresql://...`."""
        database = _database(url, timeout_s)
        try:
            return cls(database, await prepare(database))
        except BaseException:
            await database.aclose()
            raise

    async def aclose(self) -> None:
        await self._database.aclose()

    async def reserve(
        self,
        id: SandboxId,
        spec: Spec,
        *,
        owner: Owner,
        boot_id: str,
        ephemeral: bool = False,
        key: str | None = None,
        max_sandboxes: int = 0,
        state: State = State.CREATING,
        enforced: dict[str, Any] | None = None,
    ) -> tuple[Record, bool]:
        """Take a place, a name and a cid before any box exists; the record, and whether it was newly made."""
        if key is not None and not (0 < len(key) <= 256 and key.isprintable()):
            raise InvalidSpec("key: an idempotency key is 1 to 256 printable characters", field="key")
        asked = rows.fingerprint(spec, self.instance)

        def work(tx: Transaction) -> tuple[Record, bool]:
            if key is not None and (held := _held_by_key(tx, spec.project, key, asked)):
                return held, False
            if tx.rows("SELECT 1 FROM sandboxes WHERE id = ?", id):
                raise Conflict(f"the id {id} is taken by another sandbox")
            _refuse_taken_name(tx, spec, id)
            _refuse_beyond(tx, max_sandboxes)
            now = time.time()
            record = Record(
                id=id,
                spec=rows.without_secrets(spec),
                state=state,
                version=1,
                created_at=now,
                updated_at=now,
                owner=owner,
                ephemeral=ephemeral,
                key=key,
                cid=_next(tx, "cid"),
                boot_id=boot_id,
                enforced=enforced or {},
            )
            seq = _next(tx, "event")
            _insert(tx, record, seq, asked if key is not None else None)
            _emit(tx, record, seq, "created")
            return record, True

        return await self._database.transact(work)

    async def get(self, id: SandboxId) -> Record:
        return await self._database.transact(lambda tx: _get(tx, id), write=False)

    async def find(self, reference: str) -> Record:
        """The sandbox with that whole id, else that name, else the only one whose id begins so (live ones first)."""
        reference = rows.clean(reference)

        def work(tx: Transaction) -> Record:
            prefix = f"substr(id, 1, {len(reference)}) = ?"
            for condition in ("id = ?", f"name = ? AND {LIVE}", f"{prefix} AND {LIVE}", prefix):
                found = _select(tx, f"{condition} ORDER BY seq LIMIT {_CANDIDATES + 1}", reference)
                if len(found) == 1:
                    return found[0]
                if found:
                    raise Conflict(_ambiguous(reference, found))
            raise NotFound(f"no sandbox has the id or name {reference!r}")

        if not reference:
            raise NotFound("no sandbox has an empty id or name: give an id, the beginning of one, or a name")
        return await self._database.transact(work, write=False)

    async def change(
        self,
        record: Record,
        *,
        to: State | None = None,
        kind: str | None = None,
        cause: Cause | None = None,
        detail: str | None = None,
        doomed: bool | None = None,
        enforced: dict[str, Any] | None = None,
        spec: Spec | None = None,
        owner: Owner | None = None,
        ephemeral: bool | None = None,
        volumes: bool | None = None,
        remaker: Owner | None = None,
        boot_id: str | None = None,
    ) -> Record:
        """Change what is given, and tell it as one event; Conflict if somebody else changed the record first.

        A sandbox that was lost and is found again has no cause of end any more, unless one is given; one that is ready,
        paused or stopped from here on is no longer being made anew.
        """
        wanted: dict[str, Any] = {
            "cause": cause,
            "detail": rows.clean(detail) if detail is not None else None,
            "doomed": doomed,
            "enforced": msgspec.to_builtins(enforced),
            "spec": rows.without_secrets(spec) if spec is not None else None,
            "owner": owner,
            "ephemeral": ephemeral,
            "volumes": volumes,
            "remaker": remaker,
            "boot_id": boot_id,
        }
        given = {field: value for field, value in wanted.items() if value is not None}
        told = kind or (to.value if to is not None else "doomed" if doomed else None)

        def work(tx: Transaction) -> Record:
            current = _get(tx, record.id)
            if current.version != record.version:
                raise Conflict(
                    f"sandbox {record.id} was changed by somebody else and is {current.state} now: look again"
                )
            state = move(current.state, to) if to is not None else current.state
            found_again = {"cause": None, "detail": ""} if current.state is State.LOST and state not in _FREEING else {}
            settled = {"remaker": None} if to in _SETTLED else {}
            fields = {
                **found_again,
                **settled,
                **given,
                "state": state,
                "version": current.version + 1,
                "updated_at": time.time(),
            }
            changed = msgspec.structs.replace(current, **fields)
            if spec is not None and changed.is_live:
                _refuse_taken_name(tx, spec, record.id)
            _update(tx, changed)
            _emit(tx, changed, _next(tx, "event"), told or state.value, detail=given.get("detail"))
            return changed

        return await self._database.transact(work, frees=bool(doomed or record.doomed or to in _FREEING))

    async def boot_slot(self, id: SandboxId, *, max_boots: int, owner_alive: Callable[[Owner], bool]) -> bool:
        """Mark a creating sandbox as booting, if fewer than `max_boots` (0: no limit) others of living owners are.

        The mark is gone when it leaves `creating`.
        """
        booting = await self._database.transact(_booting, write=False)
        dead = {other for other in booting if not owner_alive(rows.owner_of(other[1]))}

        def has_room(booting: set[tuple[str, str]]) -> bool:
            return max_boots == 0 or sum(other[0] != id for other in booting - dead) < max_boots

        if not has_room(booting):  # one that waits asks often: it takes no turn among the writers
            return False

        def work(tx: Transaction) -> bool:
            record = _get(tx, id)
            if record.state is not State.CREATING:
                raise WrongState(f"sandbox {id} is {record.state}: only one that is creating can boot")
            return has_room(_booting(tx)) and tx.execute("UPDATE sandboxes SET booting = 1 WHERE id = ?", id) == 1

        return await self._database.transact(work)

    async def events(self, *, after: int = 0, sandbox: SandboxId | None = None, limit: int = 1000) -> list[Event]:
        """What happened after `after`, in order. Whoever asks again with the last `seq` misses nothing."""
        condition, params = ("seq > ?", [after]) if sandbox is None else ("seq > ? AND sandbox = ?", [after, sandbox])
        sql = f"SELECT {rows.EVENT} FROM events WHERE {condition} ORDER BY seq LIMIT ?"
        return await self._database.transact(
            lambda tx: [rows.to_event(row) for row in tx.rows(sql, *params, limit)], write=False
        )

    async def last_event(self) -> int:
        """The `seq` of the newest event; 0 if nothing ever happened."""
        return await self._database.transact(lambda tx: _counter(tx, "event"), write=False)

    async def prune(self, *, before: float) -> int:
        """Forget what ended, and what happened, before that time; how many sandboxes that were."""

        def work(tx: Transaction) -> int:
            tx.execute("DELETE FROM events WHERE time < ?", before)
            return tx.execute(f"DELETE FROM sandboxes WHERE NOT ({LIVE}) AND updated_at < ?", before)

        return await self._database.transact(work, frees=True)

    async def list(self, filter: Filter = _ALL_LIVE) -> list[Record]:
        """Those that fit, oldest first."""
        condition, params = rows.where(filter)
        found = await self._database.transact(lambda tx: _select(tx, f"{condition} ORDER BY seq", *params), write=False)
        return [record for record in found if filter.fits(record)] if filter.labels else found

    async def count(self, filter: Filter = _ALL_LIVE) -> int:
        if filter.labels:
            return len(await self.list(filter))
        condition, params = rows.where(filter)
        return await self._database.transact(lambda tx: _count(tx, condition, *params), write=False)


def _database(url: str, timeout_s: float) -> Database:
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        from skerry.store.postgres import PostgreSQL

        return PostgreSQL(url, timeout_s=timeout_s)
    if separator and (scheme != "sqlite" or not rest.startswith("/")):
        raise ConfigError(f"a registry is a path, sqlite:///path or postgresql://...; not {scheme}://...")
    from skerry.store.sqlite import SQLite

    return SQLite(rest if separator else url, timeout_s=timeout_s)


def _select(tx: Transaction, condition: str, *params: Any) -> list[Record]:
    return [rows.to_record(row) for row in tx.rows(f"SELECT {rows.RECORD} FROM sandboxes WHERE {condition}", *params)]


def _get(tx: Transaction, id: SandboxId) -> Record:
    for record in _select(tx, "id = ?", rows.clean(id)):
        return record
    raise NotFound(f"no sandbox has the id {id!r}")


def _count(tx: Transaction, condition: str, *params: Any) -> int:
    return int(tx.rows(f"SELECT count(*) FROM sandboxes WHERE {condition}", *params)[0][0])


def _counter(tx: Transaction, name: str) -> int:
    return int(tx.rows("SELECT value FROM counters WHERE name = ?", name)[0][0])


def _next(tx: Transaction, counter: str) -> int:
    tx.execute("UPDATE counters SET value = value + 1 WHERE name = ?", counter)
    return _counter(tx, counter)


def _held_by_key(tx: Transaction, project: str, key: str, asked: str) -> Record | None:
    """The live sandbox that was asked for with this key; what was asked counts, not what it was changed to since."""
    for row in tx.rows(
        f"SELECT asked, {rows.RECORD} FROM sandboxes WHERE project = ? AND key = ? AND {LIVE}", project, key
    ):
        if row[0] != asked:
            raise Conflict(f"the key {key!r} was used for sandbox {row[1]}, which was asked for with another spec")
        return rows.to_record(row[1:])
    return None


def _refuse_taken_name(tx: Transaction, spec: Spec, id: SandboxId) -> None:
    taken = f"SELECT id FROM sandboxes WHERE project = ? AND name = ? AND id <> ? AND {LIVE}"
    for (holder,) in tx.rows(taken, spec.project, spec.name, id):
        raise Conflict(f"the name {spec.name!r} is taken by sandbox {holder} in project {spec.project!r}")


def _refuse_beyond(tx: Transaction, max_sandboxes: int) -> None:
    count = _count(tx, LIVE) if max_sandboxes else 0
    if max_sandboxes and count >= max_sandboxes:
        raise LimitReached(
            f"max_sandboxes is {max_sandboxes} and {count} exist: destroy some, retry later, or raise the limit"
        )


def _booting(tx: Transaction) -> set[tuple[str, str]]:
    """Id and maker of each sandbox that boots now."""
    sql = f"SELECT id, COALESCE(remaker, owner) FROM sandboxes WHERE {LIVE} AND booting = 1"
    return {(id, maker) for id, maker in tx.rows(sql)}


def _insert(tx: Transaction, record: Record, seq: int, asked: str | None) -> None:
    columns = rows.to_columns(record) | {
        "id": record.id,
        "seq": seq,
        "key": record.key,
        "asked": asked,
        "cid": record.cid,
        "created_at": record.created_at,
        "booting": 0,
    }
    places = ", ".join("?" for _ in columns)
    tx.execute(f"INSERT INTO sandboxes ({', '.join(columns)}) VALUES ({places})", *columns.values())


def _update(tx: Transaction, record: Record) -> None:
    columns = rows.to_columns(record)
    changes = ", ".join(f"{column} = ?" for column in columns)
    boots_on = "booting" if record.state is State.CREATING else "0"
    tx.execute(f"UPDATE sandboxes SET {changes}, booting = {boots_on} WHERE id = ?", *columns.values(), record.id)


def _emit(tx: Transaction, record: Record, seq: int, kind: str, *, detail: str | None = None) -> None:
    cause = record.cause.value if record.cause is not None else None
    tx.execute(
        f"INSERT INTO events ({rows.EVENT}) VALUES (?, ?, ?, ?, ?, ?, ?)",
        *(seq, record.updated_at, record.id, kind, record.state.value, cause),
        rows.to_json({"detail": detail} if detail else {}),
    )


def _ambiguous(reference: str, found: Sequence[Record]) -> str:
    names = [f"{record.id} ({record.name})" if record.name else record.id for record in found[:_CANDIDATES]]
    more = " and more" if len(found) > _CANDIDATES else ""
    return f"{reference!r} fits {', '.join(names)}{more}: give more of the id"
