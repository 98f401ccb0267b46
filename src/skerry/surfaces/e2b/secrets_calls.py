"""Secrets of E2B's control plane: not served, and each call says why."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import BaseRoute

from skerry.surfaces.e2b.answers import failure
from skerry.surfaces.e2b.route import Call, Surface, route

_WHY = (
    "secrets are not kept here: E2B puts them into requests by `network.rules`, which this server refuses; give a"
    " sandbox's secrets by skerry's own API, PUT /v1/sandboxes/{id}/secrets"
)


def routes(surface: Surface) -> list[BaseRoute]:
    table = (("POST", ""), ("GET", ""), ("GET", "/{id}"), ("POST", "/{id}"), ("DELETE", "/{id}"))
    return [route(surface, method, f"/secrets{path}", None, refuse) for method, path in table]


async def refuse(call: Call) -> Response:
    return failure(501, _WHY, error_code="not_implemented")
