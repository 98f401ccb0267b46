"""The application for E2B's clients, on one port: what a request is for is told by its headers, its host, or its path.

A sandbox is named by the headers of the SDK, by the host (`49983-ID.DOMAIN`), or, for a file under a signed URL, by the
token with which that was signed. All else is the control plane's.
"""

from __future__ import annotations

import logging
import secrets
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.errors import SkerryError
from skerry.surfaces.e2b import (
    answers,
    names,
    sandboxes,
    secrets_calls,
    snapshots,
    template_calls,
    volume_content,
    volumes,
)
from skerry.surfaces.e2b.answers import failure
from skerry.surfaces.e2b.box import Boxes
from skerry.surfaces.e2b.inside import SERVICES, Inside
from skerry.surfaces.e2b.keys import Signature
from skerry.surfaces.e2b.names import ENVD, Place
from skerry.surfaces.e2b.route import Surface
from skerry.surfaces.e2b.secrets_calls import Secrets
from skerry.surfaces.e2b.templates import Templates
from skerry.surfaces.e2b.volumes import Volumes
from skerry.surfaces.server.guard import Guard
from skerry.surfaces.server.limits import Limits
from skerry.surfaces.server.server import Server

_log = logging.getLogger("skerry.server")


def build(server: Server) -> E2bGuard:
    """The application of a server, for E2B's clients."""
    boxes = Boxes(server)
    surface = Surface(server, boxes, Templates(server), Volumes(server, boxes), Secrets(server, boxes))
    server.background("e2b", boxes.run)
    control = Starlette(
        routes=[
            *sandboxes.routes(surface),
            *snapshots.routes(surface),
            *template_calls.routes(surface),
            *volumes.routes(surface),
            *volume_content.routes(surface.volumes),
            *secrets_calls.routes(surface),
        ],
        exception_handlers={HTTPException: _no_route, Exception: _failed},
    )
    return E2bGuard(Router(control, Inside(server, boxes), boxes, server.limits), server)


class E2bGuard(Guard):
    """The server's guard, which knows the names of E2B's domain beside the server's own, and lets what is for an app in
    a sandbox through as it is."""

    def __init__(self, router: Router, server: Server) -> None:
        super().__init__(router, server)
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope["skerry.receive"] = receive  # a process is written to for as long as it takes, without a deadline
            scope["skerry.e2b.place"] = place = place_of(scope)
            if place is not None and place.port not in SERVICES:
                await self._serve_app(place, scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    async def _serve_app(self, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        scope["skerry.request"] = id = secrets.token_hex(8)
        await self.observe(scope, id, send, lambda answer: self._router.inside.serve(place, scope, receive, answer))

    def knows(self, name: str) -> bool:
        domain = self.server.config.server.e2b_domain.lower()
        return super().knows(name) or (bool(domain) and name.endswith(f".{domain}"))

    def _hosts(self) -> frozenset[str]:
        return super()._hosts() | {address.rpartition(":")[0] for address in self.server.config.server.e2b_listen}


def place_of(scope: Scope) -> Place | None:
    """The port of a sandbox that a request names, by the SDK's headers or by its host."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    place = names.place_of_headers(headers.get(b"e2b-sandbox-id"), headers.get(b"e2b-sandbox-port"))
    return place or names.place_of_host(headers.get(b"host", ""))


class Router:
    """Sends a request to the sandbox that it is for, or to the control plane."""

    def __init__(self, control: ASGIApp, inside: Inside, boxes: Boxes, limits: Limits) -> None:
        self._control = control
        self._limits = limits
        self.inside = inside
        self._boxes = boxes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        place: Place | None = scope["skerry.e2b.place"]
        if place is None and scope["path"] == "/files":
            try:
                place = await self._signed(scope)
            except SkerryError as error:  # too many bad ones came from there
                await answers.of_error(error)(scope, receive, send)
                return
        if place is not None:
            await self.inside.serve(place, scope, receive, send)
        elif scope["type"] == "http":
            await self._control(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 4404, "reason": "no sandbox was named"})

    async def _signed(self, scope: Scope) -> Place | None:
        """The sandbox whose token signed a URL that names none. Raises TooMany for an address from which too many came
        that nobody signed: each is compared with all tokens."""
        signature = signature_of(scope)
        if signature is None or not signature.is_formed:
            return None
        address = str((scope.get("client") or ("",))[0])
        self._limits.check(address, signature.text)
        box = await self._boxes.signed(signature)
        if box is None:
            self._limits.refused(address)
            return None
        self._limits.accepted(signature.text)
        return Place(ENVD, box.name)


def signature_of(scope: Scope) -> Signature | None:
    """The signature of a request for a file, if it bears one."""
    query = {name: values[0] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
    if "signature" not in query:
        return None
    return Signature(
        text=query["signature"],
        path=query.get("path", ""),
        operation="read" if scope.get("method") in ("GET", "HEAD") else "write",
        user=query.get("username", ""),
        expires=query.get("signature_expiration", ""),
    )


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure(error.status_code, "there is no such call" if error.status_code == 404 else str(error.detail))


async def _failed(request: Request, error: Exception) -> Response:
    """Tell that we failed, and nothing more: what it was is in our log."""
    _log.error("request %s failed", request.scope["skerry.request"], exc_info=error)
    return failure(500, f"the server failed; its log has more under {request.scope['skerry.request']}")
