"""Pools: sandboxes that wait ready, and are handed out at once."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from skerry.errors import InvalidSpec, NotFound
from skerry.model.tenants import Scope
from skerry.pool.claim import Binding
from skerry.pool.pool import PoolStats
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.specs import SpecBody, for_tenant
from skerry.surfaces.rest.views import Page, PageQuery, SandboxView, page_of, spec_view
from skerry.surfaces.server.pools import KeptPool, PoolDefinition
from skerry.units import parse_duration

routes = Routes("pools")
_UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """A pool, and how it does."""

    id: str
    """Project and name."""
    name: str
    project: str
    size: int
    max_boots: int
    max_age_s: float
    interpreters: tuple[str, ...]
    spec: dict[str, Any]
    created_at: float
    created_by: str
    stats: PoolStats | None
    """Since it was opened; null until then."""
    hit_rate: float | None
    """Part of the acquires that found a warm one; null before the first."""
    error: str
    """Why it is not open, or why the last boot failed."""


class CreatePool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a pool is to be."""

    name: str
    spec: SpecBody = SpecBody()
    """Of its sandboxes, without a name and an environment."""
    size: int = 4
    max_boots: int = 2
    """How many boot at once."""
    max_age: float | str = 3600.0
    """When one that waits is replaced by a fresh one: seconds, or as people write it."""
    interpreters: tuple[str, ...] = ()
    """Languages of which each has an interpreter ready, such as `python`."""


class Acquire(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the sandbox is to have beside what the pool's spec says."""

    name: str | Unset = _UNSET
    env: dict[str, str] | Unset = _UNSET
    labels: dict[str, str] | Unset = _UNSET
    language: str | Unset = _UNSET
    lifetime: float | str | Unset | None = _UNSET
    idle: float | str | Unset | None = _UNSET
    timeout: float | str | Unset | None = _UNSET
    allow: tuple[str, ...] | Unset = _UNSET
    deny: tuple[str, ...] | Unset = _UNSET

    def binding(self) -> Binding:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return cast("Binding", {name: value for name, value in given.items() if value is not _UNSET})


class ProjectQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose it is; for a tenant always its own."""

    project: str | None = None


def project_of(call: Call, given: str | None) -> str:
    """The project that a call is about. Raises NotFound for a tenant that names another: to it there is none."""
    own = call.principal.tenant
    if own is not None and given not in (None, own):
        raise NotFound(f"there is no project {given!r}")
    return own or given or call.manager.config.project


def _view(call: Call, kept: KeptPool) -> PoolView:
    made, stats = kept.definition, kept.stats
    asked = 0 if stats is None else stats.hits + stats.misses
    return PoolView(
        id=f"{made.project}/{made.name}",
        name=made.name,
        project=made.project,
        size=made.size,
        max_boots=made.max_boots,
        max_age_s=made.max_age_s,
        interpreters=made.interpreters,
        spec=spec_view(made.spec, call.principal),
        created_at=made.created_at,
        created_by=made.created_by,
        stats=stats,
        hit_rate=None if stats is None or not asked else stats.hits / asked,
        error=kept.error or ("" if stats is None else stats.last_error),
    )


@routes.post("/pools", Scope.CREATE, status=201)
async def create(call: Call, body: CreatePool) -> PoolView:
    """Define a pool. It is opened at once, and again after a restart of the server, until it is removed; its sandboxes
    count towards the quota while they wait."""
    definition = PoolDefinition(
        name=body.name,
        spec=body.spec.spec(call.manager, call.principal),
        size=body.size,
        max_boots=body.max_boots,
        max_age_s=parse_duration(body.max_age, "max_age"),
        interpreters=body.interpreters,
        tenant=call.principal.tenant,
        created_by=call.principal.actor,
    )
    if call.principal.tenant not in (None, definition.project):
        raise InvalidSpec(f"project: it can be {call.principal.tenant!r} alone", field="spec.project")
    return _view(call, await call.server.pools.add(call.manager.store, definition))


@routes.get("/pools", Scope.READ)
async def list(call: Call, query: PageQuery) -> Page[PoolView]:
    """Pools, by project and name."""
    found = await call.server.pools.list(call.manager.store)
    return page_of([_view(call, each) for each in found], query)


@routes.get("/pools/{name}", Scope.READ)
async def show(call: Call, name: str, query: ProjectQuery) -> PoolView:
    """A pool, and how it does."""
    project = project_of(call, query.project)
    return _view(call, await call.server.pools.get(call.manager.store, project, name))


@routes.delete("/pools/{name}", Scope.DESTROY)
async def remove(call: Call, name: str, query: ProjectQuery) -> None:
    """Forget a pool. Its sandboxes that nobody has acquired go; all others stay."""
    await call.server.pools.remove(call.manager.store, project_of(call, query.project), name)


@routes.post("/pools/{name}/acquire", Scope.CREATE, status=201)
async def acquire(call: Call, name: str, query: ProjectQuery, body: Acquire) -> SandboxView:
    """A sandbox of the pool, at once if one is warm, else a new one. It is the caller's, and outlives the pool."""
    pools, project = call.server.pools, project_of(call, query.project)
    definition = (await pools.get(call.manager.store, project, name)).definition
    if not call.principal.is_admin:
        for_tenant(definition.spec.but(**body.binding()))
    sandbox = await pools.acquire(call.manager, definition, **body.binding())
    record = await call.manager.record(sandbox.id)
    call.tag(record.version)
    return SandboxView.of(record, call.principal)
