"""Volumes, which outlive boxes: the data of sandboxes, and caches of projects."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from skerry.model.tenants import Scope
from skerry.providers.base import Volume
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.views import Page, PageQuery, page_of

routes = Routes("volumes")


class VolumeKind(StrEnum):
    DATA = "data"
    CACHE = "cache"
    OWN = "own"
    """A project's own, by `cache="own"`: kept as data is."""


class VolumeView(msgspec.Struct, frozen=True, kw_only=True):
    """A volume of a project."""

    name: str
    kind: VolumeKind
    project: str
    sandbox: str | None
    """The id of the sandbox that it was made for, if it is one's data."""
    label: str
    """The sandbox's name, or the cache's."""
    size: int | None
    """Bytes, if they were asked for and the provider tells."""
    in_use: bool
    created_at: float | None

    @property
    def id(self) -> str:
        return self.name

    @classmethod
    def of(cls, found: Volume) -> VolumeView:
        return cls(
            name=found.name,
            kind=VolumeKind(found.kind),
            project=found.project,
            sandbox=found.sandbox,
            label=found.label,
            size=found.size,
            in_use=found.in_use,
            created_at=found.created_at,
        )


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: VolumeKind | None = None
    provider: str | None = None
    """Those of one provider; else of all that have any."""
    sizes: bool = False
    """Their sizes too, which takes longer."""


class RemoveQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    provider: str | None = None


@routes.get("/volumes", Scope.READ)
async def list(call: Call, query: ListQuery) -> Page[VolumeView]:
    """Volumes, by name. A tenant sees those of its project."""
    found = await call.manager.volumes(query.kind, sizes=query.sizes, provider=query.provider)
    return page_of([VolumeView.of(each) for each in found], query)


@routes.delete("/volumes/{name}", Scope.DESTROY)
async def remove(call: Call, name: str, query: RemoveQuery) -> None:
    """Remove a volume and all that is in it. It is a conflict while a sandbox uses it."""
    await call.manager.remove_volume(name, query.provider)
