"""The OpenAPI document: made from the signatures and docstrings of the routes, so that it cannot tell anything else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from skerry.surfaces.rest import problems
from skerry.surfaces.rest.problems import Problem
from skerry.surfaces.rest.route import JSON, Route, Streamed
from skerry.version import __version__

PATH = "/v1/openapi.json"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_HEADERS = {
    "Idempotency-Key": "1 to 256 printable characters: the same call again is answered as it was the first time.",
    "If-Match": "The ETag that what is changed must have.",
    "If-None-Match": "ETags of what is known: the answer is 304 if it is one of them.",
    "Last-Event-ID": "Where to go on after a stream that broke.",
    "Range": "Bytes of the file, such as bytes=0-1023.",
}


class Document:
    """Description of the routes."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = [route for route in routes if route.method != "WEBSOCKET"]

    async def answer(self, _request: Request) -> Response:
        """Answer with it. It is the same for everybody, and tells nothing of any sandbox."""
        return Response(self.encoded, media_type=JSON)

    @cached_property
    def encoded(self) -> bytes:
        return msgspec.json.encode(self.content)

    @cached_property
    def content(self) -> dict[str, Any]:
        kinds = [Problem, *(kind for route in self._routes for kind in _kinds(route))]
        schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._schemas = {id_of(kind): schema for kind, schema in zip(kinds, schemas, strict=True)}
        paths: dict[str, Any] = {}
        for route in self._routes:
            paths.setdefault(_PARAMETER.sub(r"{\1}", route.path), {})[route.method.lower()] = self._operation(route)
        return {
            "openapi": "3.1.0",
            "info": {"title": "skerry", "version": __version__, "description": "Sandboxes for untrusted code."},
            "security": [{"token": []}],
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            },
        }

    def _operation(self, route: Route) -> dict[str, Any]:
        summary, _, more = route.documentation.partition("\n\n")
        found: dict[str, Any] = {
            "operationId": route.name,
            "tags": [route.noun],
            "summary": " ".join(summary.split()),
            "parameters": [*self._path(route), *self._query(route), *_headers(route)],
            "responses": self._responses(route),
        }
        if more:
            found["description"] = more
        if route.scope is not None:
            found["x-scope"] = route.scope.value
        if "body" in route.hints:
            kind = route.hints["body"]
            is_needed = any(field.required for field in msgspec.structs.fields(kind))
            found["requestBody"] = {"required": is_needed, "content": {JSON: {"schema": self._schema(kind)}}}
        elif route.takes:
            found["requestBody"] = {"content": {route.takes: {}}}
        return found

    def _path(self, route: Route) -> list[dict[str, Any]]:
        return [
            {"name": name, "in": "path", "required": True, "schema": self._schema(hint)}
            for name, hint in route.path_parameters.items()
        ]

    def _query(self, route: Route) -> list[dict[str, Any]]:
        kind = route.hints.get("query")
        if kind is None:
            return []
        _, components = msgspec.json.schema_components([kind], ref_template=_REF)
        schema = components[kind.__name__]
        return [
            {"name": name, "in": "query", "required": name in schema.get("required", ()), "schema": field}
            for name, field in schema["properties"].items()
        ]

    def _responses(self, route: Route) -> dict[str, Any]:
        kind = route.hints.get("return")
        answer: dict[str, Any] = {"description": "It is done."}
        if kind is Streamed:
            answer["content"] = {route.content_type: {}}
        elif kind not in (None, type(None)):
            answer["content"] = {JSON: {"schema": self._schema(kind)}}
        status = str(204 if "content" not in answer and route.status == 200 else route.status)
        wrong = {"content": {problems.CONTENT_TYPE: {"schema": self._schema(Problem)}}}
        others = {str(each): answer if each < 300 else {"description": "It is as it was."} for each in route.also}
        return {status: answer, **others, "default": {"description": "It is not done, and why.", **wrong}}

    def _schema(self, kind: Any) -> dict[str, Any]:
        return self._schemas[id_of(kind)]


def id_of(kind: Any) -> str:
    """A key for a type, also for one that cannot be hashed."""
    return repr(kind)


def _kinds(route: Route) -> list[Any]:
    """The types of a route that have a schema."""
    hints = route.hints
    answer = hints.get("return")
    found = [hint for name, hint in hints.items() if name in ("body", "query")]
    found += route.path_parameters.values()
    return found if answer in (None, type(None), Streamed) else [*found, answer]


def _headers(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "header", "required": False, "description": _HEADERS[name], "schema": {"type": "string"}}
        for name in route.headers
    ]
