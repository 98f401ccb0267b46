"""Snapshots: the files of a sandbox under a name, and the sandboxes that are made of them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from skerry.model.records import Record
from skerry.model.spec import Spec, SpecOptions
from skerry.model.tenants import Scope
from skerry.providers.base import Snapshot
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.specs import SpecBody, for_tenant
from skerry.surfaces.rest.views import Page, PageQuery, SandboxView, page_of

routes = Routes("snapshots")
_MOST_FORKS = 1000


class SnapshotView(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a sandbox as they once were."""

    name: str
    sandbox: str
    """The id of the one that it was taken from, which may be gone."""
    size: int
    created_at: float
    memory: bool
    """Whether all that ran in it is kept too."""

    @property
    def id(self) -> str:
        return self.name

    @classmethod
    def of(cls, found: Snapshot) -> SnapshotView:
        kept = msgspec.structs.asdict(found)
        return cls(**{name: kept[name] for name in cls.__struct_fields__})


class TakeSnapshot(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Of lower-case letters, digits, '.', '_' and '-'."""
    with_memory: bool = False
    """Keep all that runs in it too, and its data volume: what is made of it goes on from there."""


class Restore(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    snapshot: str
    env: dict[str, str] = {}
    """Its environment, which is kept nowhere."""


class Fork(SpecBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is other than in its source, in the words of `Spec.of`; it has no name and no environment but those given.
    Provider, image and snapshot are those of its source."""

    with_memory: bool = False
    """All that runs in its source goes on in it too."""


class Forks(Fork, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The same of each of many."""

    count: Annotated[int, msgspec.Meta(ge=1, le=_MOST_FORKS)]


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None
    """Those of one provider; else of all that have any."""


class RemoveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None
    """Which provider has it; needed where several have one of that name."""


@routes.post("/sandboxes/{id}/snapshots", Scope.CREATE, status=201)
async def take(call: Call, id: str, body: TakeSnapshot) -> SnapshotView:
    """Keep the files of a sandbox as they are now, under a name. Volumes and processes are no part of that, unless it
    is with its memory."""
    return SnapshotView.of(await call.manager.snapshot(id, body.name, with_memory=body.with_memory))


@routes.post("/sandboxes/{id}/restore", Scope.CREATE)
async def restore(call: Call, id: str, body: Restore) -> SandboxView:
    """Make its box anew from a snapshot, under the same id and with its volumes. What it was since is gone."""
    sandbox = await call.manager.restore(id, body.snapshot, body.env)
    return _shown(call, await call.manager.record(sandbox.id))


@routes.post("/sandboxes/{id}/fork", Scope.CREATE, status=201)
async def fork(call: Call, id: str, body: Fork) -> SandboxView:
    """Make another sandbox with the same files, and a data volume of its own."""
    sandbox = await call.manager.fork(id, with_memory=body.with_memory, **_options(call, body))
    return _shown(call, await call.manager.record(sandbox.id))


@routes.post("/sandboxes/{id}/forks", Scope.CREATE, status=201)
async def fork_many(call: Call, id: str, body: Forks) -> Page[SandboxView]:
    """Make many such sandboxes of one moment, or none."""
    options = _options(call, body)
    made = await call.manager.fork_many(id, body.count, with_memory=body.with_memory, **options)
    return Page([SandboxView.of(await call.manager.record(each.id), call.principal) for each in made])


def _options(call: Call, body: Fork) -> SpecOptions:
    """What is other in a fork. Raises NotPermitted for what is the host's."""
    options = body.options()
    if not call.principal.is_admin:
        allowed = for_tenant(Spec.of(**options))
        if "secrets" in options:
            options["secrets"] = allowed.secrets
        if allowed.workspace is not None:
            options["workspace"] = allowed.workspace
    return options


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
