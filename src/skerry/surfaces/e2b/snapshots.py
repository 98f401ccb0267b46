"""Snapshots by E2B's control plane: the files of a sandbox as they were, of which others are made as of a template."""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from skerry.errors import InvalidSpec, NotFound
from skerry.model.tenants import Scope
from skerry.store.documents import Document
from skerry.surfaces.e2b import names, wire
from skerry.surfaces.e2b.answers import answer
from skerry.surfaces.e2b.kept import KeptSnapshot
from skerry.surfaces.e2b.pages import paged
from skerry.surfaces.e2b.route import Call, Surface, route


def routes(surface: Surface) -> list[BaseRoute]:
    table = (
        ("POST", "/sandboxes/{id}/snapshots", Scope.CREATE, take),
        ("POST", "/v2/sandboxes/{id}/snapshots", Scope.CREATE, take),
        ("GET", "/snapshots", Scope.READ, list_all),
    )
    return [route(surface, method, path, scope, handler) for method, path, scope, handler in table]


async def take(call: Call) -> Response:
    """Keep the files of a sandbox as they are now. Processes are no part of that."""
    asked = await call.body(wire.NewSnapshot)
    name = _plain(asked.name) if asked.name else ""
    box = await call.box()
    id = secrets.token_hex(10)
    kept = KeptSnapshot(
        sandbox=box.name,
        template=box.kept.template,
        provider=box.record.spec.provider,
        names=(f"{name}:{names.TAG}",) if name else (),
    )
    await box.manager.snapshot(box.id, id)
    await call.templates.snapshots.add(id, kept, project=call.project)
    return answer(_told(id, kept), 201)


async def list_all(call: Call) -> Response:
    """Snapshots, the newest first, a page at a time."""
    query = call.request.query_params
    sandbox, name = query.get("sandboxID"), query.get("name")
    found = [
        (each.body.created_at, each.id, each)
        for each in await call.templates.all_snapshots(call)
        if sandbox in (None, each.body.sandbox) and (name is None or names.is_called(each.id, each.body.names, name))
    ]
    page, headers = paged(found, query.get("limit"), query.get("nextToken"))
    return answer([_told(each.id, each.body) for each in page], 200, headers)


async def remove(call: Call, document: Document[KeptSnapshot]) -> None:
    """Remove a snapshot. Raises Conflict while a sandbox is made of it."""
    manager = await call.boxes.manager_of(document.project)
    with suppress(NotFound):  # somebody removed it at the provider
        await manager.remove_snapshot(document.id, document.body.provider)
    await call.templates.snapshots.remove(document.id)


def _told(id: str, kept: KeptSnapshot) -> dict[str, Any]:
    return {"snapshotID": f"{id}:{names.TAG}", "names": list(kept.names)}


def _plain(name: str) -> str:
    if not names.is_plain(name):
        raise InvalidSpec("name: letters, digits, '-', '_' and '.', at most 128", field="name")
    return name
