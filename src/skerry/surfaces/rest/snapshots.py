"""Snapshots: the files of a sandbox under a name, and the sandboxes that are made of them."""

from __future__ import annotations

import msgspec

from skerry.model.records import Record
from skerry.model.spec import Spec
from skerry.model.tenants import Scope
from skerry.providers.base import Snapshot
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.specs import SpecBody, for_tenant
from skerry.surfaces.rest.views import Page, PageQuery, SandboxView, page_of

routes = Routes("snapshots")


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a sandbox as they once were."""

    name: str
    sandbox: str
    """The id of the one that it was taken from, which may be gone."""
    size: int
    created_at: float

    @property
    def id(self) -> str:
        return self.name

    @classmethod
    def of(cls, found: Snapshot) -> SnapshotView:
        return cls(name=found.name, sandbox=found.sandbox, size=found.size, created_at=found.created_at)


class TakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Of lower-case letters, digits, '.', '_' and '-'."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    snapshot: str
    env: dict[str, str] = {}
    """Its environment, which is kept nowhere."""


class Fork(SpecBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is other than in its source, in the words of `Spec.of`; it has no name and no environment but those given.
    Provider, image and snapshot are those of its source."""


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None
    """Those of one provider; else of all that have any."""


class RemoveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None
    """Which provider has it; needed where several have one of that name."""


@routes.post("/sandboxes/{id}/snapshots", Scope.CREATE, status=201)
async def take(call: Call, id: str, body: TakeSnapshot) -> SnapshotView:
    """Keep the files of a sandbox as they are now, under a name. Volumes and processes are no part of that."""
    return SnapshotView.of(await call.manager.snapshot(id, body.name))


@routes.post("/sandboxes/{id}/restore", Scope.CREATE)
async def restore(call: Call, id: str, body: Restore) -> SandboxView:
    """Make its box anew from a snapshot, under the same id and with its volumes. What it was since is gone."""
    sandbox = await call.manager.restore(id, body.snapshot, body.env)
    return _shown(call, await call.manager.record(sandbox.id))


@routes.post("/sandboxes/{id}/fork", Scope.CREATE, status=201)
async def fork(call: Call, id: str, body: Fork) -> SandboxView:
    """Make another sandbox with the same files, and a data volume of its own."""
    options = body.options()
    if not call.principal.is_admin:
        allowed = for_tenant(Spec.of(**options))
        if "secrets" in options:
            options["secrets"] = allowed.secrets
        if allowed.workspace is not None:
            options["workspace"] = allowed.workspace
    sandbox = await call.manager.fork(id, **options)
    return _shown(call, await call.manager.record(sandbox.id))


@routes.get("/snapshots", Scope.READ)
async def list(call: Call, query: ListQuery) -> Page[SnapshotView]:
    """Snapshots, the oldest first. A tenant sees its own."""
    found = await call.manager.snapshots(query.provider)
    return page_of([SnapshotView.of(each) for each in found], query)


@routes.delete("/snapshots/{name}", Scope.DESTROY)
async def remove(call: Call, name: str, query: RemoveQuery) -> None:
    """Remove a snapshot. It is a conflict while a sandbox is made of it."""
    await call.manager.remove_snapshot(name, query.provider)


def _shown(call: Call, record: Record) -> SandboxView:
    call.tag(record.version)
    return SandboxView.of(record, call.principal)
