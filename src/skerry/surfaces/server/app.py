"""The application: every route of the API behind the guard, as one ASGI app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.routing import Route as HttpRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.aio import end
from skerry.errors import NotPermitted, SkerryError, StoreError
from skerry.ledger.line import ACTOR, Actor
from skerry.surfaces.mcp.http import PATH as MCP_PATH
from skerry.surfaces.mcp.http import McpEndpoint
from skerry.surfaces.page import assets
from skerry.surfaces.rest import openapi, problems
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import (
    GONE,
    JSON,
    Call,
    Route,
    Streamed,
    accept,
    read_body,
    read_path,
    read_query,
    whole_body,
)
from skerry.surfaces.rest.routes import ALL
from skerry.surfaces.server import observe
from skerry.surfaces.server.answers import StreamedAnswer, until_gone
from skerry.surfaces.server.guard import Guard
from skerry.surfaces.server.server import Server

_log = logging.getLogger("skerry.server")
LOOK_S = 10.0
"""Seconds after which it is looked again whether the token of a WebSocket, or of a call that lasts, is good."""
_SOCKET_CODES = {400: 4400, 401: 4401, 403: 4403, 404: 4404, 409: 4409, 410: 4410, 429: 4429}
_encode = msgspec.json.Encoder(enc_hook=str).encode


def build(server: Server) -> Guard:
    """The application of a server."""
    described = openapi.Document(ALL)
    mcp = McpEndpoint(server, problem)
    server.on_close.append(mcp.aclose)
    app = Starlette(
        routes=[
            *(_route(server, route) for route in ALL),
            HttpRoute(openapi.PATH, described.answer, methods=["GET"]),
            HttpRoute(MCP_PATH, mcp),
            *observe.routes(server, problem),
            *assets.routes(),
        ],
        exception_handlers={HTTPException: _no_route, Exception: _failed},
    )
    return Guard(app, server)


def _route(server: Server, route: Route) -> BaseRoute:
    if route.method == "WEBSOCKET":
        return WebSocketRoute(route.path, _socket_endpoint(server, route))
    return HttpRoute(route.path, _endpoint(server, route), methods=[route.method])


def _endpoint(server: Server, route: Route) -> Callable[[Request], Awaitable[Response]]:
    hints = route.hints

    async def endpoint(request: Request) -> Response:
        id = request.scope["skerry.request"]
        try:
            call = await _begin(server, route, request)
            arguments = read_path(route, request.path_params)
            if "query" in hints:
                arguments["query"] = read_query(hints["query"], request)
            if "body" in hints:
                arguments["body"] = read_body(hints["body"], await _json(request, server.config.server.max_body))
                result = await _while_client_waits(call, route, route.handler(call, **arguments))
            else:
                result = await route.handler(call, **arguments)
            return _answer(route, call, result)
        except SkerryError as error:
            return problem(error, id)

    return endpoint


def _socket_endpoint(server: Server, route: Route) -> Callable[[WebSocket], Awaitable[None]]:
    async def endpoint(socket: WebSocket) -> None:
        try:
            call = await _begin(server, route, socket)
            arguments = read_path(route, socket.path_params)
            if "query" in route.hints:
                arguments["query"] = read_query(route.hints["query"], socket)
            await _while_good(server, socket, route.handler(call, socket=socket, **arguments))
        except SkerryError as error:
            await refuse_socket(socket, error)
        except WebSocketDisconnect:
            raise
        except Exception as error:
            _log.error("request %s failed", socket.scope["skerry.request"], exc_info=error)
            with suppress(Exception):  # it may be gone
                await socket.close(1011)

    return endpoint


async def _while_good(server: Server, socket: WebSocket, work: Awaitable[None]) -> None:
    """Do what a WebSocket is for, as long as its token is good. Raises AccessDenied once it is not."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(StoreError):  # that the registry does not answer for a while is no reason to hang up
                await server.identify_again(socket)

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(watch())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await end(*tasks)
    for each in done:
        each.result()


async def refuse_socket(socket: WebSocket, error: SkerryError) -> None:
    """End a WebSocket with the error's code and its message, whether or not it was accepted."""
    found = problems.problem_of(error)
    if socket.client_state.name == "CONNECTING":
        await accept(socket)
    reason = f"{found.code}: {found.detail}".encode()[:120].decode(errors="ignore")
    await socket.close(_SOCKET_CODES.get(found.status, 1011), reason)


async def _begin(server: Server, route: Route, connection: Request | WebSocket) -> Call:
    """See who calls and whether they may. Raises AccessDenied or NotPermitted."""
    connection.scope["skerry.route"] = route
    principal = await server.principal(connection)
    if not principal.may(route.scope):
        raise NotPermitted(f"this call needs the scope {route.scope}, which the token does not have")
    ACTOR.set(Actor(principal.actor, principal.tenant or ""))
    manager = await server.manager_for(principal)
    return Call(server, connection, principal, manager, connection.scope["skerry.request"])


async def _json(request: Request, most: int) -> bytes:
    """The body of a request that is JSON. Raises Refused."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    body = await whole_body(request, most)
    if kind != JSON and (body or kind):
        raise Refused(415, f"send {JSON}", "unsupported_media_type")
    return body


async def _while_client_waits(call: Call, route: Route, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled if the client goes away, unless it can come back for it by a key, or if
    its token is good no more. Raises AccessDenied for that."""
    if "Idempotency-Key" in route.headers and call.header("idempotency-key"):
        return await work
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(until_gone(call.request.receive))
    try:
        while not (await asyncio.wait([task, watch], timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            with suppress(StoreError):  # that the registry does not answer is no reason to end it
                await call.server.identify_again(call.request)
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                raise Refused(GONE, "the client went away", "gone")
        return task.result()
    finally:
        await end(task, watch)
        del task  # its error knows this frame: what was asked would live until the two are found together


def _answer(route: Route, call: Call, result: Any) -> Response:
    if isinstance(result, Response):
        return result
    if isinstance(result, Streamed):
        return StreamedAnswer(result, call.headers)
    if result is None:
        return Response(status_code=route.status if route.status != 200 else 204, headers=call.headers)
    return Response(_encode(result), route.status, call.headers, JSON)


def problem(error: SkerryError, request_id: str) -> Response:
    """The answer that tells an error."""
    found = problems.problem_of(error, request_id)
    headers = dict(error.headers) if isinstance(error, Refused) else {}
    if found.status == 401:
        headers["www-authenticate"] = 'Bearer realm="skerry"'
    if found.status in (429, 503):
        headers.setdefault("retry-after", str(problems.RETRY_AFTER_S))
    return Response(msgspec.json.encode(found), found.status, headers, problems.CONTENT_TYPE)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "no_such_method"}.get(error.status_code, "invalid_request")
    found = problems.make(error.status_code, code, str(error.detail), request_id=request.scope["skerry.request"])
    return Response(msgspec.json.encode(found), error.status_code, error.headers, problems.CONTENT_TYPE)


async def _failed(request: Request, error: Exception) -> Response:
    """Tell that we failed, and nothing more: what it was is in our log."""
    id = request.scope["skerry.request"]
    _log.error("request %s failed", id, exc_info=error)
    found = problems.make(500, "internal", "the server failed; its log has more under this request_id", request_id=id)
    return Response(msgspec.json.encode(found), 500, media_type=problems.CONTENT_TYPE)
