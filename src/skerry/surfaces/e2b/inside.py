"""Requests for a sandbox itself: its files and processes, its interpreter, and whatever listens on its ports."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skerry.aio import end
from skerry.errors import NotFound, SkerryError
from skerry.ledger.line import ACTOR, Actor
from skerry.surfaces.e2b import answers, interpreter, names
from skerry.surfaces.e2b.box import Boxes, E2bSandbox, Exchange
from skerry.surfaces.e2b.envd import routes as envd_routes
from skerry.surfaces.e2b.names import ENVD, INTERPRETER, Place
from skerry.surfaces.e2b.ports import PortProxy

if TYPE_CHECKING:
    from skerry.surfaces.server.server import Server

_log = logging.getLogger("skerry.server")
SERVICES: Mapping[int, Callable[[], Sequence[BaseRoute]]] = {ENVD: envd_routes, INTERPRETER: interpreter.routes}
"""Ports at which a service of ours answers, and not what listens in the box: each has the routes of its requests, whose
scope has the sandbox as `skerry.e2b`."""
_WITHOUT_TOKEN = frozenset({"/health", "/files"})
"""What needs no token: health is told to everybody, and files are looked at for signatures."""


class Inside:
    """All sandboxes, from within."""

    def __init__(self, server: Server, boxes: Boxes) -> None:
        self._server = server
        self._boxes = boxes
        handlers: dict[Any, Any] = {HTTPException: _no_route, Exception: _failed}
        self._apps: dict[int, ASGIApp] = {
            port: Starlette(routes=make(), exception_handlers=handlers) for port, make in SERVICES.items()
        }
        self._ports = PortProxy(server)

    async def serve(self, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a port of a sandbox."""
        try:
            box = await self._boxes.get(names.read(place.name))
            if not box.is_running and not await self._wake(box, place):
                raise NotFound("it does not run")
            ends = self._server.limits.begin(f"e2b:{box.id}").end
        except NotFound:
            await _refuse(answers.gone(place.name), scope, receive, send)
            return
        except SkerryError as error:
            await _refuse(answers.of_error(error), scope, receive, send)
            return
        ACTOR.set(Actor(f"e2b:{box.id}", box.project))
        try:
            with box.exchanges.open(scope.get("skerry.transport")) as exchange:
                await self._until_ended(box, place, exchange, scope, receive, send)
        finally:
            ends()

    async def _wake(self, box: E2bSandbox, place: Place) -> bool:
        """Resume a paused sandbox that is to be by a request; whether it runs now."""
        if not (box.kept.auto_pause and box.kept.auto_resume and box.kept.pauses_memory):
            return False
        await box.connect(box.kept.timeout_s)
        return True

    async def _until_ended(
        self, box: E2bSandbox, place: Place, exchange: Exchange, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer, unless the sandbox is paused or killed before anything of an answer was sent: then tell that."""

        async def told(message: Message) -> None:
            exchange.is_answered = True
            await send(message)

        work = asyncio.ensure_future(self._answer(box, place, scope, receive, told))
        over = asyncio.ensure_future(exchange.ended.wait())
        try:
            await asyncio.wait((work, over), return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (not exchange.ended.is_set() or exchange.is_answered):
                await work
                return
        finally:
            await end(work, over)
        if not exchange.is_answered:
            await _refuse(answers.gone(box.name), scope, receive, send)

    async def _answer(self, box: E2bSandbox, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._apps.get(place.port)
        if app is None or scope["type"] != "http":
            await self._ports.serve(box, place, scope, receive, send)
            return
        # the interpreter looks at the token itself, which the SDK sends it with code alone
        if place.port == ENVD and scope["path"] not in _WITHOUT_TOKEN and not _is_let_in(box, scope):
            await _refuse(answers.failure(401, "the access token is not valid"), scope, receive, send)
            return
        scope["skerry.e2b"] = box
        await app(scope, receive, send)


def _is_let_in(box: E2bSandbox, scope: Scope) -> bool:
    """Whether a request shows the token of a sandbox, if it has one."""
    token = box.access_token
    given = next((value for name, value in scope["headers"] if name == b"x-access-token"), b"")
    return token is None or hmac.compare_digest(given, token.encode())


async def _refuse(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await response(scope, receive, send)
        return
    await receive()
    await send({"type": "websocket.close", "code": 4502})


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answers.failure(error.status_code, str(error.detail))


async def _failed(request: Request, error: Exception) -> Response:
    """Tell that we failed, and nothing more: what it was is in our log."""
    _log.error("request %s failed", request.scope["skerry.request"], exc_info=error)
    return answers.failure(500, f"the server failed; its log has more under {request.scope['skerry.request']}")
