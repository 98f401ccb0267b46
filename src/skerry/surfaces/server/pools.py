"""Pools of a server: defined in the registry, kept full by the server that leads, and used through any of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Unpack

import msgspec

from skerry.aio import run_to_end
from skerry.errors import InvalidSpec, LimitReached, NotFound, SkerryError, WrongState
from skerry.ledger.line import ACTOR, Actor
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec
from skerry.model.tenants import Principal
from skerry.pool.claim import Binding, claim_or_create
from skerry.pool.pool import AsyncSandboxPool, PoolStats
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store
from skerry.store.documents import Document

_log = logging.getLogger("skerry.server")
KIND = "pool"
_LOOK_S = 2.0
"""How often the registry is asked for pools that another server has defined or removed."""
_LARGEST = 100
_MOST_BOOTS = 16
_MOST_INTERPRETERS = 8
_MOST_POOLS = 20
"""Of one project."""

ManagerFor = Callable[[Principal], Awaitable[AsyncSandboxManager]]


class PoolDefinition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a pool is to be. Its boxes have no environment: that is nowhere kept, and given to whoever acquires one."""

    name: str
    spec: Spec
    size: int = 4
    max_boots: int = 2
    max_age_s: float = 3600.0
    interpreters: tuple[str, ...] = ()
    """Languages of which each sandbox has an interpreter ready."""
    tenant: str | None = None
    created_by: str = ""
    created_at: float = msgspec.field(default_factory=time.time)

    def __post_init__(self) -> None:
        Spec(name=self.name)  # refuses what is no name
        for field in ("env", "name"):
            if getattr(self.spec, field):
                raise InvalidSpec(f"spec.{field}: give it to the one that you acquire", field=f"spec.{field}")
        for field, value, most in (("size", self.size, _LARGEST), ("max_boots", self.max_boots, _MOST_BOOTS)):
            if not 0 < value <= most:
                raise InvalidSpec(f"{field}: {value} is not 1 to {most}", field=field)
        if len(self.interpreters) > _MOST_INTERPRETERS:
            raise InvalidSpec(f"interpreters: more than {_MOST_INTERPRETERS}", field="interpreters")
        if not 1 <= self.max_age_s <= 7 * 86400:
            raise InvalidSpec(f"max_age: {self.max_age_s:g} s is not 1 s to 7 days", field="max_age")

    @property
    def project(self) -> str:
        return self.spec.project


class KeptPool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A pool as the registry has it."""

    definition: PoolDefinition
    stats: PoolStats | None = None
    """As the server that keeps it told them last; none until then."""
    error: str = ""
    """Why it cannot be opened."""


class OpenPool(NamedTuple):
    """A pool that this server keeps."""

    definition: PoolDefinition
    pool: AsyncSandboxPool


class Pools:
    """The pools of an installation."""

    def __init__(self, store: Store, manager_for: ManagerFor) -> None:
        """`store` sees everything."""
        self._all = store.documents(KIND, KeptPool)
        self._manager_for = manager_for
        self._open: dict[str, OpenPool] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # for calls: `store` and `manager` are those of whoever asks

    async def add(self, store: Store, definition: PoolDefinition) -> KeptPool:
        """Define a pool; whoever leads opens it. Raises Conflict if there is one of that name, and LimitReached."""
        documents, project = store.documents(KIND, KeptPool), definition.project
        held = [each for each in await documents.list(limit=10_000) if each.project == project]
        if len(held) >= _MOST_POOLS:
            raise LimitReached(f"project {project!r} has {len(held)} pools: remove one first")
        added = await documents.add(_id(project, definition.name), KeptPool(definition=definition), project=project)
        self._changed.set()
        return added.body

    async def list(self, store: Store) -> Sequence[KeptPool]:
        """The pools that `store` has, by project and name."""
        return [self._now(each.body) for each in await store.documents(KIND, KeptPool).list(limit=10_000)]

    async def get(self, store: Store, project: str, name: str) -> KeptPool:
        """A pool by its name. Raises NotFound."""
        try:
            return self._now((await store.documents(KIND, KeptPool).get(_id(project, name))).body)
        except NotFound:
            raise NotFound(f"there is no pool {name!r}") from None

    async def remove(self, store: Store, project: str, name: str) -> None:
        """Forget a pool; those of its sandboxes that nobody has go within seconds. Raises NotFound."""
        await self.get(store, project, name)
        await store.documents(KIND, KeptPool).remove(_id(project, name))
        self._changed.set()

    async def forget(self, project: str) -> None:
        """Remove all pools of a project, which is a tenant's no more, and those of their sandboxes that nobody has."""
        for each in await self._all.list(limit=10_000):
            if each.project == project:
                with suppress(NotFound):
                    await self._all.remove(each.id)
        mine = [id for id, opened in self._open.items() if opened.definition.project == project]
        closing = [self._close(self._open.pop(id).pool) for id in mine]
        if closing:
            await asyncio.wait(closing)
        self._changed.set()

    async def acquire(
        self, manager: AsyncSandboxManager, definition: PoolDefinition, **bind: Unpack[Binding]
    ) -> AsyncSandbox:
        """A warm sandbox of a pool, whichever server keeps it, else a new one."""
        opened = self._open.get(_id(definition.project, definition.name))
        if opened is not None:
            with suppress(WrongState):  # it is about to close
                return await opened.pool.acquire(**bind)
        return await claim_or_create(manager, definition.spec.but(**bind))

    def _now(self, kept: KeptPool) -> KeptPool:
        opened = self._open.get(_id(kept.definition.project, kept.definition.name))
        return kept if opened is None else msgspec.structs.replace(kept, stats=opened.pool.stats(), error="")

    # keeping them

    def stats(self) -> Sequence[PoolStats]:
        """How the pools do that this server keeps."""
        return [opened.pool.stats() for opened in self._open.values()]

    async def run(self) -> None:
        """Until cancelled: keep every pool that the registry has. At the end they are closed, and stay defined."""
        try:
            while True:
                self._changed.clear()
                try:
                    await self._look()
                except SkerryError as error:
                    _log.warning("pools: the registry cannot be read: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
        finally:
            await run_to_end(self._close_all())

    async def _look(self) -> None:
        """Open what was defined, close what is no longer, and write down how they are."""
        found = {each.id: each for each in await self._all.list(limit=10_000)}
        for id, opened in list(self._open.items()):
            if id not in found or found[id].body.definition != opened.definition:
                del self._open[id]
                self._close(opened.pool)
        for id, document in found.items():
            error = ""
            if id not in self._open:
                try:
                    await asyncio.create_task(self._begin(id, document.body.definition))
                except SkerryError as failure:
                    error = failure.message
                    _log.warning("pool %s cannot be opened: %s", id, error)
            await self._write(document, error)

    async def _begin(self, id: str, definition: PoolDefinition) -> None:
        """Open a pool, in a task of its own: what it does is told as its maker's."""
        ACTOR.set(Actor(definition.created_by, definition.tenant or ""))
        maker = Principal(actor=definition.created_by, tenant=definition.tenant, scopes=frozenset())
        manager = await self._manager_for(maker)
        pool = AsyncSandboxPool(
            manager,
            definition.spec,
            size=definition.size,
            max_boots=definition.max_boots,
            max_age_s=definition.max_age_s,
            interpreters=definition.interpreters,
        )
        manager.provider(definition.spec.provider)  # raises if there is none
        await pool.__aenter__()
        self._open[id] = OpenPool(definition, pool)

    async def _write(self, document: Document[KeptPool], error: str) -> None:
        opened = self._open.get(document.id)
        now = msgspec.structs.replace(document.body, error=error, stats=opened and opened.pool.stats())
        if _without_ages(now) == _without_ages(document.body):
            return
        with suppress(NotFound):
            await self._all.replace(document.id, now)

    def _close(self, pool: AsyncSandboxPool) -> asyncio.Task[None]:
        task = asyncio.create_task(pool.__aexit__(None, None, None), name="skerry-pool-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close_all(self) -> None:
        for opened in self._open.values():
            self._close(opened.pool)
        self._open.clear()
        if self._closing:
            await asyncio.wait(set(self._closing))


def _id(project: str, name: str) -> str:
    """Its id in the registry: names are a project's own."""
    return f"{project}/{name}"


def _without_ages(kept: KeptPool) -> KeptPool:
    """The pool without what changes all the time."""
    if kept.stats is None:
        return kept
    stats = msgspec.structs.replace(kept.stats, age_p50_s=0.0, age_max_s=0.0, retry_in_s=0.0)
    return msgspec.structs.replace(kept, stats=stats)
