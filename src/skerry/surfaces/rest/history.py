"""Metrics over time, of one sandbox or of all that are live."""

from __future__ import annotations

from typing import Annotated

import msgspec

from skerry.errors import InvalidSpec
from skerry.model.tenants import Scope
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.views import Page
from skerry.surfaces.server.history import HistoryView

routes = Routes("metrics")
_MANY = 1000


class HistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From when on; nothing is older than half an hour."""

    since: float = 0.0
    """Seconds since 1970: samples after that."""


class AllHistoryQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sandboxes, and how much of each."""

    sandbox: tuple[str, ...] = ()
    """Ids; none is all that are live."""
    since: float = 0.0
    points: Annotated[int, msgspec.Meta(ge=1, le=360)] = 60
    """The most samples of each, the newest."""


@routes.get("/sandboxes/{id}/metrics/history", Scope.READ)
async def history(call: Call, id: str, query: HistoryQuery) -> HistoryView:
    """What a sandbox used, sampled every few seconds from the first time that somebody asks for it, and for some
    minutes after the last. To ask does not keep it from being idle."""
    (found,) = call.server.history.of([await call.manager.record(id)], since=query.since)
    return found


@routes.get("/metrics/history", Scope.READ)
async def history_of_all(call: Call, query: AllHistoryQuery) -> Page[HistoryView]:
    """What all live sandboxes used, or some of them; one that has no samples yet has empty lists."""
    if len(query.sandbox) > _MANY:
        raise InvalidSpec(f"sandbox: {len(query.sandbox)} are too many at once", field="sandbox")
    wanted = frozenset(query.sandbox)
    records = [record for record in await call.manager.list() if not wanted or record.id in wanted]
    return Page(call.server.history.of(records, since=query.since, points=query.points))
