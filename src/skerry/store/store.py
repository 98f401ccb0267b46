"""The registry of sandboxes: reservations, compare-and-set changes, and the one order of all events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack

import msgspec

from skerry import clock
from skerry.aio import backoff
from skerry.clock import End, Moment
from skerry.errors import ConfigError, Conflict, HostFull, InvalidSpec, LimitReached, NotFound, WrongState
from skerry.ledger import facts
from skerry.ledger.ledger import OFF
from skerry.model.records import Cause, Event, Filter, Owner, Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State, move
from skerry.model.tenants import NO_QUOTA, Quota
from skerry.store import rows, statements
from skerry.store.base import Database, Transaction
from skerry.store.documents import Collection
from skerry.store.schema import LIVE, prepare
from skerry.units import format_size

TIMEOUT_S = 10.0  # how long another process, or the database, is waited for
_FREEING = frozenset({State.DESTROYED, State.LOST})
_SETTLED = frozenset({State.READY, State.PAUSED, State.ASLEEP, State.STOPPED})
_TRIES = 20
_RETRY_S = (0.001, 0.05)
_ALL_LIVE = Filter()
_log = logging.getLogger("skerry.store")
T = TypeVar("T")


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
        self.project: str | None = None
        """The one project whose sandboxes are there, as if there were no others; None is all."""
        self.quota = NO_QUOTA
        """What all sandboxes of the project keep to together."""

    def of_project(self, project: str, quota: Quota = NO_QUOTA) -> Store:
        """The same registry, in which there is nothing but what is that project's; its sandboxes keep to the quota."""
        scoped = Store(self._database, self.instance, self.now)
        scoped.ledger, scoped.project, scoped.quota = self.ledger, project, quota
        return scoped

    def documents(self, kind: str, type: type[T]) -> Collection[T]:
        """Documents of a kind, which the registry keeps beside sandboxes."""
        return Collection(self._database, kind, type, self.project)

    async def forget_documents(self, project: str) -> None:
        """Forget all that is kept for a project beside its sandboxes, of whatever kind."""
        sql = "DELETE FROM documents WHERE project = ? AND project <> ''"
        await self._database.transact(lambda tx: tx.execute(sql, project), frees=True)

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
        memory: int = 0,
        max_memory: int = 0,
        state: State = State.CREATING,
        enforced: dict[str, Any] | None = None,
        told: Mapping[str, str] | None = None,
    ) -> tuple[Record, bool]:
        """Reserve a place, a name and a CID before any box exists; the record, and whether it is new. `told` are
        variables that the box has beside those of its spec, for `vouched`. `memory` is what it may take of this host's,
        of which all may have no more than `max_memory` together, if there is one. Raises Conflict, LimitReached,
        HostFull or InvalidSpec."""
        if key is not None and not (0 < len(key) <= 256 and key.isprintable()):
            raise InvalidSpec("key: an idempotency key is 1 to 256 printable characters", field="key")
        if self.project not in (None, spec.project):
            raise InvalidSpec(f"project: it can be {self.project!r} alone, not {spec.project!r}", field="project")
        asked = "" if key is None else rows.fingerprint(spec, self.instance)

        def work(tx: Transaction) -> tuple[Record, bool]:
            if key is not None and (known := statements.held_by_key(tx, spec.project, key, asked)):
                return known, False
            if tx.rows("SELECT 1 FROM sandboxes WHERE id = ?", id):
                raise Conflict(f"the id {id} is taken by another sandbox")
            statements.refuse_taken_name(tx, spec, id)
            if max_sandboxes and (count := statements.count(tx, LIVE)) >= max_sandboxes:
                advice = "destroy some, retry later, or raise the limit"
                raise LimitReached(f"max_sandboxes is {max_sandboxes} and {count} exist: {advice}")
            if max_memory and memory and (held := statements.promised_memory(tx, boot_id)) + memory > max_memory:
                raise HostFull(
                    f"sandboxes of this host may be promised {format_size(max_memory)} of memory together "
                    f"(admission.overcommit), {format_size(held)} is promised and {format_size(memory)} was asked for: "
                    "destroy some, ask for less, raise the setting, or retry later"
                )
            if self.quota != NO_QUOTA:
                self.quota.admit(
                    spec, [each.spec for each in statements.select(tx, f"project = ? AND {LIVE}", spec.project)]
                )
            now, moment, seq = time.time(), self.now(), statements.next(tx, "event")
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
                cid=statements.cid(self.instance, seq) if self.instance else None,
                boot_id=boot_id,
                memory=memory,
                enforced=enforced or {},
                written=moment,
                end=End(moment, spec.lifetime_s) if spec.lifetime_s else None,
            )
            env = self._digests(id, {**(told or {}), **spec.env})
            statements.insert(tx, record, seq, asked=asked or None, env=rows.to_json(env))
            statements.emit(tx, record, seq, "created")
            return record, True

        return await self._database.transact(work)

    async def promised_memory(self) -> int:
        """The most memory that the sandboxes of this host can take together, of whatever project."""
        boot = self.now().boot
        return await self._database.transact(lambda tx: statements.promised_memory(tx, boot), write=False)

    async def get(self, id: SandboxId) -> Record:
        return await self._database.transact(lambda tx: statements.get(tx, id, self.project), write=False)

    async def find(self, reference: str) -> Record:
        """The sandbox with that id, else that name, else the only one whose id begins so (live ones first). Raises
        NotFound or Conflict."""
        reference = rows.clean(reference)

        def work(tx: Transaction) -> Record:
            prefix = f"substr(id, 1, {len(reference)}) = ?"
            mine, params = ("", ()) if self.project is None else (" AND project = ?", (self.project,))
            for condition in ("id = ?", f"name = ? AND {LIVE}", f"{prefix} AND {LIVE}", prefix):
                order = f"ORDER BY seq LIMIT {statements.CANDIDATES + 1}"
                found = statements.select(tx, f"{condition}{mine} {order}", reference, *params)
                if len(found) == 1:
                    return found[0]
                if found:
                    raise Conflict(statements.ambiguous(reference, found))
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
            current = statements.get(tx, record.id, self.project)
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
                "end": statements.end(current, spec or current.spec, now, is_made=is_made, restart=restart),
            }
            changed = msgspec.structs.replace(current, **fields)
            if spec is not None and changed.is_live:
                statements.refuse_taken_name(tx, spec, record.id)
            statements.update(tx, changed)
            statements.emit(tx, changed, statements.next(tx, "event"), told or state.value, detail=given.get("detail"))
            return changed

        facts.tell_before(self.ledger, record, told, given)
        changed = await self._database.transact(work, frees=doomed or record.doomed or to in _FREEING)
        facts.tell_after(self.ledger, record, told, changed)
        return changed

    async def note_env(self, id: SandboxId, env: Mapping[str, str]) -> None:
        """Note digests of the values that a box is about to be told, for `vouched`."""
        if env:
            await self._database.transact(lambda tx: statements.add_env(tx, id, self._digests(id, env)))

    async def vouched(self, id: SandboxId, env: Mapping[str, str]) -> dict[str, str]:
        """The variables of an environment, told by a box, that have the values noted for it."""
        noted = await self._database.transact(lambda tx: statements.noted_env(tx, id), write=False)
        return {name: env[name] for name, digest in self._digests(id, env).items() if noted.get(name) == digest}

    def _digests(self, id: SandboxId, env: Mapping[str, str]) -> dict[str, str]:
        return rows.digests(env, f"{self.instance}{id}")

    async def note_ends(self, records: Iterable[Record]) -> None:
        """Note the rest of their lifetimes, for a restart of the host; without event or conflict with changes."""
        now = self.now()

        def work(tx: Transaction) -> None:
            for record in records:
                end = rows.to_json(statements.end(record, record.spec, now))
                tx.execute("UPDATE sandboxes SET ends = ? WHERE id = ? AND version = ?", end, record.id, record.version)

        await self._database.transact(work)

    async def boot_slot(self, id: SandboxId, *, max_boots: int, owner_alive: Callable[[Owner], bool]) -> bool:
        """Mark a creating sandbox as booting, if fewer than `max_boots` (0: no limit) others of living owners are. It
        loses the mark with the state. Raises NotFound or WrongState."""

        def work(dead: Iterable[tuple[str, str]]) -> Callable[[Transaction], set[tuple[str, str]] | None]:
            def take(tx: Transaction) -> set[tuple[str, str]] | None:
                record = statements.get(tx, id)
                if record.state is not State.CREATING:
                    raise WrongState(f"sandbox {id} is {record.state}: only one that is creating can boot")
                others = {other for other in statements.booting(tx) if other[0] != id}
                if max_boots and len(others.difference(dead)) >= max_boots:
                    return others
                tx.execute("UPDATE sandboxes SET booting = 1 WHERE id = ?", id)
                return None

            return take

        if (others := await self._database.transact(work(()))) is None:
            return True
        dead = {other for other in others if not owner_alive(rows.owner_of(other[1]))}
        return len(others) - len(dead) < max_boots and await self._database.transact(work(dead)) is None

    async def events(self, *, after: int = 0, sandbox: SandboxId | None = None, limit: int = 1000) -> list[Event]:
        """Events after the one with the `seq` of `after`, in order."""
        condition = "seq > ?"
        params: list[Any] = [after]
        if sandbox is not None:
            condition += " AND sandbox = ?"
            params.append(sandbox)
        if self.project is not None:
            condition += " AND sandbox IN (SELECT id FROM sandboxes WHERE project = ?)"
            params.append(self.project)
        sql = f"SELECT {rows.EVENT} FROM events WHERE {condition} ORDER BY seq LIMIT ?"
        return await self._database.transact(
            lambda tx: [rows.to_event(row) for row in tx.rows(sql, *params, limit)], write=False
        )

    async def last_event(self) -> int:
        """The `seq` of the newest event; 0 if nothing ever happened."""
        return await self._database.transact(lambda tx: statements.counter(tx, "event"), write=False)

    async def prune(self, *, before: float) -> int:
        """Delete sandboxes that ended, and events, before that time; how many sandboxes."""
        mine, params = ("", ()) if self.project is None else (" AND project = ?", (self.project,))

        def work(tx: Transaction) -> int:
            if self.project is None:
                tx.execute("DELETE FROM events WHERE time < ?", before)
            return tx.execute(f"DELETE FROM sandboxes WHERE NOT ({LIVE}) AND updated_at < ?{mine}", before, *params)

        return await self._database.transact(work, frees=True)

    async def list(self, filter: Filter = _ALL_LIVE, *, after: str = "", limit: int | None = None) -> list[Record]:
        """Those that fit, oldest first: all, or the first `limit` of those that were made after the one with the id
        `after`, which may have ended. Raises InvalidSpec if nobody knows that one any more."""
        filter = self._mine(filter)
        condition, params = rows.where(filter)

        def work(tx: Transaction) -> list[Record]:
            sql, given = f"{condition} ORDER BY seq", list[Any](params)
            if after:
                sql, given = f"seq > ? AND {sql}", [statements.place(tx, after, self.project), *given]
            if limit is not None and not filter.labels:
                sql, given = f"{sql} LIMIT ?", [*given, limit]
            return statements.select(tx, sql, *given)

        found = await self._database.transact(work, write=False)
        return [record for record in found if filter.fits(record)][:limit] if filter.labels else found

    async def count(self, filter: Filter = _ALL_LIVE) -> int:
        if filter.labels:
            return len(await self.list(filter))
        condition, params = rows.where(self._mine(filter))
        return await self._database.transact(lambda tx: statements.count(tx, condition, *params), write=False)

    def _mine(self, filter: Filter) -> Filter:
        """The filter, for sandboxes of our project; one for another project fits none."""
        if self.project is None or filter.project == self.project:
            return filter
        return msgspec.structs.replace(filter, project=self.project if filter.project is None else "")


def _database(url: str, timeout_s: float) -> Database:
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("postgresql", "postgres"):
        from skerry.store.postgres import PostgreSQL

        return PostgreSQL(url, timeout_s=timeout_s)
    if separator and (scheme != "sqlite" or not rest.startswith("/")):
        raise ConfigError(f"a registry is a path, sqlite:///path or postgresql://...; not {scheme}://...")
    from skerry.store.sqlite import SQLite

    return SQLite(rest if separator else url, timeout_s=timeout_s)
