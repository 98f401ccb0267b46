"""The guard before the application: hosts and origins, sizes, headers of answers, and an id for each call."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry import trace
from skerry.log import FIELDS
from skerry.surfaces.ports.places import Place
from skerry.surfaces.rest import problems
from skerry.surfaces.server.observe import OPEN, Observed

if TYPE_CHECKING:
    from skerry.surfaces.server.server import Server

_BODY_S = 60.0
"""Seconds for the next piece of a body."""
_OWN_CODES = 4000
"""WebSockets are closed with this and the status that the same would have over HTTP."""
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
    b"cache-control": b"no-store",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
}
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """Lets in what is for this server, and gives every answer the headers that all have."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self.server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        place = self.server.ports.place_of(scope)
        if place is not None:  # before all else: nothing of the API is there under the name of a port
            await self._serve_port(place, scope, receive, send)
            return
        scope["skerry.request"] = id = secrets.token_hex(8)
        observed = Observed(self.server, scope, id)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                observed.answered(message["status"])
                given = {name.lower() for name, _ in message["headers"]}
                ours = {b"x-request-id": id.encode(), **_HEADERS}
                message["headers"] = [*message["headers"], *((k, v) for k, v in ours.items() if k not in given)]
            elif message["type"] == "websocket.accept":
                observed.status = 101
            elif message["type"] == "websocket.close" and message.get("code", 1000) >= _OWN_CODES:
                observed.status = message["code"] - _OWN_CODES
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                observed.sent()

        FIELDS.set({"request": id})
        with trace.following(_header(scope, b"traceparent")), trace.span("skerry.request"):
            try:
                await self._serve(scope, _patient(scope, receive), answer)
            finally:
                observed.end()

    async def _serve_port(self, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a port of a sandbox, whose answers are its own."""
        scope["skerry.port"] = place
        id = secrets.token_hex(8)
        await self.observe(scope, id, send, lambda answer: self.server.ports.serve(scope, receive, answer, place))

    async def observe(self, scope: Scope, id: str, send: Send, serve: Callable[[Send], Awaitable[None]]) -> None:
        """Have what serves a request answer as it likes, and note how it did."""
        observed = Observed(self.server, scope, id)

        async def answer(message: Message) -> None:
            if message["type"].endswith(".response.start"):
                observed.answered(message["status"])
            elif message["type"] == "websocket.accept":
                observed.status = 101
            await send(message)

        try:
            await serve(answer)
        finally:
            observed.end()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 4403, "reason": refusal.detail[:120]})
        else:
            body = msgspec.json.encode(msgspec.structs.replace(refusal, request_id=scope["skerry.request"]))
            await Response(body, refusal.status, media_type=problems.CONTENT_TYPE)(scope, receive, send)

    def _refusal(self, scope: Scope) -> problems.Problem | None:
        """Why a call is none for us: another site's page, or a name that is not ours (DNS rebinding)."""
        if scope["path"] in OPEN:
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        if self._is_socket(scope):
            return None
        if not self.knows(_name(host)):
            return problems.make(421, "wrong_host", "the server is not called that; see server.hosts")
        origin = headers.get(b"origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return problems.make(403, "wrong_origin", "a page of another site may not call this server")
        return None

    def knows(self, name: str) -> bool:
        """Whether the server may be called by that name."""
        return name in self._hosts()

    def _is_socket(self, scope: Scope) -> bool:
        client = scope.get("client") or ("", 0)
        return str(client[0]).startswith("uid:")

    def _hosts(self) -> frozenset[str]:
        settings = self.server.config.server
        return _LOCAL | {name.lower() for name in settings.hosts} | {_name(address) for address in settings.listen}


def _header(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _patient(scope: Scope, receive: Receive) -> Receive:
    """`receive` for a body whose next piece has to come in time; after its end it waits as long as it takes."""
    if scope["type"] != "http":
        return receive
    is_over = False

    async def receive_in_time() -> Message:
        nonlocal is_over
        if is_over:
            return await receive()
        try:
            async with asyncio.timeout(_BODY_S):
                message = await receive()
        except TimeoutError:
            raise problems.Refused(408, f"no more of the body came for {_BODY_S:g} s", "too_slow") from None
        is_over = not message.get("more_body", False)
        return message

    return receive_in_time


def _name(host: str) -> str:
    """The name in a Host header or an address, without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdecimal() else host).lower()
