"""The registry of sandboxes: reservations, compare-and-set changes, and the one order of all events."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from skerry import clock
from skerry.aio import backoff
from skerry.clock import End, Moment
from skerry.errors import ConfigError, Conflict, InvalidSpec, LimitReached, NotFound, WrongState
from skerry.ledger import facts
from skerry.ledger.ledger import OFF
from skerry.model.records import Cause, Event, Filter, Owner, Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State, move
from skerry.store import rows
from skerry.store.base import Database, Transaction
from skerry.store.schema import LIVE, prepare

TIMEOUT_S = 10.0  # how long another process, or the database, is waited for
_FREEING = frozenset({State.DESTROYED, State.LOST})
_SETTLED = frozenset({State.READY, State.PAUSED, State.STOPPED})
_CANDIDATES = 10
_TRIES = 20
_FIRST_CID = 1 << 17
"""Smaller ones are for machines without a record: templates, probes, those with a Docker in them."""
_CIDS = 1 << 31
_RETRY_S = (0.001, 0.05)
_ALL_LIVE = Filter()
_log = logging.getLogger("skerry.store")


class Changes(TypedDict, total=False):
    """Fields of a record that change together, in one event; None leaves one as it is."""

    to: State | None
    kind: str | None
    cause: Cause | None
    detail: str | None
    doomed: bool | None
    enforced: dict[str, Any] | None
    spec: Spec | None
    owner: Owner | None
    ephemeral: bool | None
    volumes: bool | None
    remaker: Owner | None
    boot_id: str | None
    restart_lifetime: bool


class Store:
    """Records and events of all sandboxes, for many processes at once; `instance` is their installation's id, and `now`
    the clock by which everything of theirs ends."""

    def __init__(self, database: Database, instance: str, now: Callable[[], Moment] = clock.now) -> None:
        self._database = database
        self.instance = instance
        self.now = now
        self.ledger = OFF
        """The ledger that is told of every change."""

    @classmethod
    async def open(cls, url: str, *, timeout_s: float = TIMEOUT_S, now: Callable[[], Moment] = clock.now) -> Store:
        """Open, and make or migrate where needed, the registry at a path, `sqlite:///path` or `postgresql://...`."""
        database = _database(url, timeout_s)
        try:
            return cls(database, await prepare(database), now)
        except BaseException:
            await database.aclose()
            raise

    @classmethod
    async def in_memory(cls) -> Store:
        """Make a registry that no other process sees, of no installation; it ends with the object."""
        from skerry.store.sqlite import InMemory

        database = InMemory()
        await database.prepare()
        return cls(database, instance="")

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
        told: Mapping[str, str] | None = None,
    ) -> tuple[Record, bool]:
        """Reserve a place, a name and a CID before any box exists; the record, and whether it is new. `told` are
        variables that the box has beside those of its spec, for `vouched`. Raises Conflict, LimitReached or
        InvalidSpec."""
        if key is not None and not (0 < len(key) <= 256 and key.isprintable()):
            raise InvalidSpec("key: an idempotency key is 1 to 256 printable characters", field="key")
        asked = rows.fingerprint(spec, self.instance)

        def work(tx: Transaction) -> tuple[Record, bool]:
            if key is not None and (held := _held_by_key(tx, spec.project, key, asked)):
                return held, False
            if tx.rows("SELECT 1 FROM sandboxes WHERE id = ?", id):
                raise Conflict(f"the id {id} is taken by another sandbox")
            _refuse_taken_name(tx, spec, id)
            if max_sandboxes and (count := _count(tx, LIVE)) >= max_sandboxes:
                advice = "destroy some, retry later, or raise the limit"
                raise LimitReached(f"max_sandboxes is {max_sandboxes} and {count} exist: {advice}")
            now, moment, seq = time.time(), self.now(), _next(tx, "event")
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
                cid=_cid(self.instance, seq) if self.instance else None,
                boot_id=boot_id,
                enforced=enforced or {},
                written=moment,
                end=End(moment, spec.lifetime_s) if spec.lifetime_s else None,
            )
            env = self._digests(id, {**(told or {}), **spec.env})
            _insert(tx, record, seq, asked=asked if key is not None else None, env=rows.to_json(env))
            _emit(tx, record, seq, "created")
            return record, True

        return await self._database.transact(work)

    async def get(self, id: SandboxId) -> Record:
        return await self._database.transact(lambda tx: _get(tx, id), write=False)

    async def find(self, reference: str) -> Record:
        """The sandbox with that id, else that name, else the only one whose id begins so (live ones first). Raises
        NotFound or Conflict."""
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

    async def update(self, record: Record, change: Callable[[Record], Awaitable[Changes | None]]) -> Record:
        """Make the changes that `change` decides on, and decide again if others changed the record first. None leaves
        it as it is. Raises NotFound, and Conflict if its name is taken or others do not stop."""
        for _, delay_s in zip(range(_TRIES), backoff(*_RETRY_S), strict=False):
            changes = await change(record)
            if changes is None:
                return record
            try:
                return await self.change(record, **changes)
            except Conflict:
                current = await self.get(record.id)
                if current.version == record.version:
                    raise  # it is not the record that is in the way, but its name
            _log.debug("sandbox %s was changed by others meanwhile: retry", record.id)
            record = current
            await asyncio.sleep(delay_s)
        raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")

    async def change(self, record: Record, **changes: Unpack[Changes]) -> Record:
        """Change the fields that are given, as one event. Raises Conflict if others changed the record first.

        The lifetime counts from when the sandbox is first ready, or with `restart_lifetime` from now. A lost sandbox
        that is found again loses its cause of end, unless one is given; one that becomes ready, paused or stopped is no
        longer being rebuilt."""
        given: dict[str, Any] = {field: value for field, value in changes.items() if value is not None}
        to: State | None = given.pop("to", None)
        kind: str | None = given.pop("kind", None)
        restart: bool = given.pop("restart_lifetime", False)
        if "detail" in given:
            given["detail"] = rows.clean(given["detail"])
        if "enforced" in given:
            given["enforced"] = msgspec.to_builtins(given["enforced"])
        spec: Spec | None = given.get("spec")
        if spec is not None:
            given["spec"] = rows.without_secrets(spec)
        doomed = given.get("doomed", False)
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
            is_made = to is State.READY and current.state is State.CREATING and current.remaker is None
            now = self.now()
            fields = {
                **found_again,
                **settled,
                **given,
                "state": state,
                "version": current.version + 1,
                "updated_at": time.time(),
                "written": now,
                "end": _end(current, spec or current.spec, now, is_made=is_made, restart=restart),
            }
            changed = msgspec.structs.replace(current, **fields)
            if spec is not None and changed.is_live:
                _refuse_taken_name(tx, spec, record.id)
            _update(tx, changed)
            _emit(tx, changed, _next(tx, "event"), told or state.value, detail=given.get("detail"))
            return changed

        facts.tell_before(self.ledger, record, told, given)
        changed = await self._database.transact(work, frees=doomed or record.doomed or to in _FREEING)
        facts.tell_after(self.ledger, record, told, changed)
        return changed

    async def note_env(self, id: SandboxId, env: Mapping[str, str]) -> None:
        """Note digests of the values that a box is about to be told, for `vouched`."""
        if env:
            await self._database.transact(lambda tx: _add_env(tx, id, self._digests(id, env)))

    async def vouched(self, id: SandboxId, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of an environment, told by a box, that have the values noted for it."""
        noted = await self._database.transact(lambda tx: _noted_env(tx, id), write=False)
        return {name: env[name] for name, digest in self._digests(id, env).items() if noted.get(name) == digest}

    def _digests(self, id: SandboxId, env: Mapping[str, str]) -> dict[str, str]:
        return rows.digests(env, f"{self.instance}{id}")

    async def note_ends(self, records: Iterable[Record]) -> None:
        """Note the rest of their lifetimes, for a restart of the host; without event or conflict with changes."""
        now = self.now()

        def work(tx: Transaction) -> None:
            for record in records:
                end = rows.to_json(_end(record, record.spec, now))
                tx.execute("UPDATE sandboxes SET ends = ? WHERE id = ? AND version = ?", end, record.id, record.version)

        await self._database.transact(work)

    async def boot_slot(self, id: SandboxId, *, max_boots: int, owner_alive: Callable[[Owner], bool]) -> bool:
        """Mark a creating sandbox as booting, if fewer than `max_boots` (0: no limit) others of living owners are. It
        loses the mark with the state. Raises NotFound or WrongState."""
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
        """Events after the one with the `seq` of `after`, in order."""
        condition, params = ("seq > ?", [after]) if sandbox is None else ("seq > ? AND sandbox = ?", [after, sandbox])
        sql = f"SELECT {rows.EVENT} FROM events WHERE {condition} ORDER BY seq LIMIT ?"
        return await self._database.transact(
            lambda tx: [rows.to_event(row) for row in tx.rows(sql, *params, limit)], write=False
        )

    async def last_event(self) -> int:
        """The `seq` of the newest event; 0 if nothing ever happened."""
        return await self._database.transact(lambda tx: _counter(tx, "event"), write=False)

    async def prune(self, *, before: float) -> int:
        """Delete sandboxes that ended, and events, before that time; how many sandboxes."""

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


def _noted_env(tx: Transaction, id: SandboxId) -> dict[str, str]:
    for (text,) in tx.rows("SELECT env FROM sandboxes WHERE id = ?", id):
        return rows.digests_of(text)
    return {}


def _add_env(tx: Transaction, id: SandboxId, digests: dict[str, str]) -> None:
    if digests:
        env = rows.to_json({**_noted_env(tx, id), **digests})
        tx.execute("UPDATE sandboxes SET env = ? WHERE id = ?", env, id)


def _count(tx: Transaction, condition: str, *params: Any) -> int:
    return int(tx.rows(f"SELECT count(*) FROM sandboxes WHERE {condition}", *params)[0][0])


def _counter(tx: Transaction, name: str) -> int:
    return int(tx.rows("SELECT value FROM counters WHERE name = ?", name)[0][0])


def _next(tx: Transaction, counter: str) -> int:
    tx.execute("UPDATE counters SET value = value + 1 WHERE name = ?", counter)
    return _counter(tx, counter)


def _cid(instance: str, seq: int) -> int:
    """CID of the sandbox whose first event is `seq`. Installations begin at places of their own: the kernel of a host
    that several share knows a number once."""
    return _FIRST_CID + (zlib.crc32(instance.encode()) + seq) % _CIDS


def _held_by_key(tx: Transaction, project: str, key: str, asked: str) -> Record | None:
    """The live sandbox of this key. Raises Conflict if it was asked for with another spec, whatever it is now."""
    for row in tx.rows(
        f"SELECT asked, {rows.RECORD} FROM sandboxes WHERE project = ? AND key = ? AND {LIVE}", project, key
    ):
        if row[0] != asked:
            raise Conflict(f"the key {key!r} was used for sandbox {row[1]}, which was asked for with another spec")
        return rows.to_record(row[1:])
    return None


def _end(record: Record, spec: Spec, now: Moment, *, is_made: bool = False, restart: bool = False) -> End | None:
    """The end of its lifetime, noted now."""
    if not spec.lifetime_s:
        return None
    if restart or record.end is None:
        return End(now, spec.lifetime_s)
    if is_made:  # its agent has counted for a while already, but not for longer than it was in the making
        return End(now, spec.lifetime_s, spec.lifetime_s - (record.end.left_at(now) or 0.0))
    return record.end.noted_at(now)


def _refuse_taken_name(tx: Transaction, spec: Spec, id: SandboxId) -> None:
    taken = f"SELECT id FROM sandboxes WHERE project = ? AND name = ? AND id <> ? AND {LIVE}"
    for (holder,) in tx.rows(taken, spec.project, spec.name, id):
        raise Conflict(f"the name {spec.name!r} is taken by sandbox {holder} in project {spec.project!r}")


def _booting(tx: Transaction) -> set[tuple[str, str]]:
    """Id and maker of each sandbox that boots now."""
    sql = f"SELECT id, COALESCE(remaker, owner) FROM sandboxes WHERE {LIVE} AND booting = 1"
    return {(id, maker) for id, maker in tx.rows(sql)}


def _insert(tx: Transaction, record: Record, seq: int, **more: str | None) -> None:
    made = {"id": record.id, "seq": seq, "key": record.key, "created_at": record.created_at}
    columns = rows.to_columns(record) | made | {"cid": record.cid, "booting": 0} | more
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
