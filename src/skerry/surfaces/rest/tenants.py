"""Tenants: projects with a quota, whose tokens see nothing else. They are the admins' to make and to end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec

from skerry.errors import Conflict
from skerry.model.records import Filter, Record
from skerry.model.tenants import Quota, Scope, Tenant, promised
from skerry.store.documents import Document
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.views import Page, PageQuery
from skerry.surfaces.server.fleets import forget_shapes

routes = Routes("tenants")
_Note = Annotated[str, msgspec.Meta(max_length=1000)]


class CreateTenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A tenant to be: its name is that of its project."""

    name: str
    quota: Quota = Quota()
    note: _Note = ""


class ChangeTenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is to be another; a quota takes the place of the whole one before."""

    quota: Quota | None = None
    note: _Note | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What all live sandboxes of a project were promised."""

    sandboxes: int
    cpus: float
    memory: int
    disk: int
    egress: int
    """Bytes a second."""

    @classmethod
    def of(cls, records: Iterable[Record]) -> Usage:
        specs = [record.spec for record in records if record.is_live]
        return cls(
            sandboxes=len(specs),
            cpus=sum(spec.cpus or 0.0 for spec in specs),
            memory=sum(spec.memory or 0 for spec in specs),
            disk=sum(spec.disk or 0 for spec in specs),
            egress=sum(promised(spec, "egress") or 0 for spec in specs),
        )


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant."""

    name: str
    quota: Quota
    """The most that its live sandboxes may be promised together; what is left out has no bound."""
    used: Usage
    note: str
    created_at: float
    version: int


class RemoveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of its sandboxes."""

    destroy: bool = False
    """End them; without this, a tenant that has any is kept."""


@routes.post("/tenants", Scope.ADMIN, status=201)
async def create(call: Call, body: CreateTenant) -> TenantView:
    """Make a tenant. Sandboxes of a project of that name are its own from then on."""
    made = await call.server.access.add_tenant(Tenant(name=body.name, quota=body.quota, note=body.note))
    return await _shown(call, made)


@routes.get("/tenants", Scope.ADMIN)
async def list(call: Call, query: PageQuery) -> Page[TenantView]:
    """List tenants by name, and what each uses of its quota."""
    found = await call.server.access.tenants(after=query.after, limit=query.limit + 1)
    page = found[: query.limit]
    records = await call.server.manager.list()
    views = [_view(each, [record for record in records if record.spec.project == each.id]) for each in page]
    return Page(views, page[-1].id if len(found) > len(page) else None)


@routes.get("/tenants/{name}", Scope.ADMIN)
async def show(call: Call, name: str) -> TenantView:
    """Show a tenant, and what it uses of its quota."""
    return await _shown(call, await call.server.access.tenant(name))


@routes.patch("/tenants/{name}", Scope.ADMIN, headers=("If-Match",))
async def change(call: Call, name: str, body: ChangeTenant) -> TenantView:
    """Give a tenant another quota. Sandboxes that it has already it keeps."""
    access = call.server.access
    quota = (await access.tenant(name)).body.quota if body.quota is None else body.quota
    with call.matching():
        changed = await access.set_quota(name, quota, note=body.note, version=call.match())
    return await _shown(call, changed)


@routes.delete("/tenants/{name}", Scope.ADMIN)
async def remove(call: Call, name: str, query: RemoveQuery) -> None:
    """Remove a tenant with its tokens, webhooks and pools. Its volumes and snapshots are kept."""
    access, mine = call.server.access, Filter(project=name)
    await access.tenant(name)
    if query.destroy:
        await access.shut_out(name)  # so that no more are made meanwhile
        await call.server.pools.forget(name)
        await call.server.manager.destroy_all(mine)
    if left := await call.server.manager.count(mine):
        raise Conflict(f"tenant {name!r} has {left} sandboxes: end them first, or with destroy=true")
    await call.server.pools.forget(name)
    await forget_shapes(call.server.manager.store, name)
    await access.remove_tenant(name)
    call.server.webhooks.look_again()


async def _shown(call: Call, tenant: Document[Tenant]) -> TenantView:
    call.tag(tenant.version)
    return _view(tenant, await call.server.manager.list(Filter(project=tenant.id)))


def _view(tenant: Document[Tenant], records: Iterable[Record]) -> TenantView:
    return TenantView(
        name=tenant.id,
        quota=tenant.body.quota,
        used=Usage.of(records),
        note=tenant.body.note,
        created_at=tenant.body.created_at,
        version=tenant.version,
    )
