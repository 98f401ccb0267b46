"""MCP over HTTP: the endpoint `/mcp` of a server, for the same tokens and tenants as its REST API.

The SDK is loaded with the first call, so that a server starts as fast without it, and works where it is not installed.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from skerry.errors import AccessDenied, LimitReached, SkerryError
from skerry.ledger.line import ACTOR, Actor
from skerry.model.tenants import Principal
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import whole_body

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from skerry.surfaces.mcp.caller import Caller
    from skerry.surfaces.mcp.outputs import Outputs
    from skerry.surfaces.server.server import Server

PATH = "/mcp"
_METHODS = ("POST", "DELETE")
_MOST_CLIENTS = 5000
"""Clients that have said hello and not goodbye, of all tokens; each is a task, and some memory."""
_MOST_OF_ONE = 100
_IDLE_S = 1800.0
"""After so long without a call a client is forgotten, and has to say hello again."""


class McpEndpoint:
    """The application at `/mcp`. What a client has said hello with is its own: with another token its id is unknown."""

    def __init__(self, server: Server, problem: Callable[[SkerryError, str], Response]) -> None:
        """`problem` makes the answer that tells an error."""
        self._server = server
        self._problem = problem
        self._opening = asyncio.Lock()
        self._transport: StreamableHTTPSessionManager | None = None
        self._runner: asyncio.Task[None] | None = None
        self._outputs: Outputs | None = None
        self._is_over = asyncio.Event()
        self._running: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            principal = await self._server.principal(request)
            transport = await self._admit(request, principal)
            body = await whole_body(request, self._server.config.server.max_body)
        except SkerryError as error:
            await self._problem(error, scope["skerry.request"])(scope, receive, send)
            return
        from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
        from mcp.server.auth.provider import AccessToken

        actor = principal.actor
        scope["user"] = AuthenticatedUser(AccessToken(token=actor, client_id=actor, scopes=[]))
        await transport.handle_request(scope, _again(body, receive), send)

    async def aclose(self) -> None:
        """Let go of all clients, and give up what they have under way."""
        self._is_over.set()
        if self._runner is not None:
            await asyncio.wait([self._runner])

    async def _admit(self, request: Request, principal: Principal) -> StreamableHTTPSessionManager:
        """The transport for a request. Raises Refused for one that is of no use here, or too much."""
        if request.method not in _METHODS:  # nothing is told to a client that it did not ask for: no stream for that
            allowed = {"allow": ", ".join(_METHODS)}
            raise Refused(405, f"{request.method} is of no use here", "no_such_method", headers=allowed)
        if self._server.is_draining.is_set():
            raise Refused(503, "the server is about to end", "draining")
        transport = await self._open()
        is_new = request.method == "POST" and "mcp-session-id" not in request.headers
        owners = transport._session_owners.values()
        if is_new and sum(owner["client_id"] == principal.actor for owner in owners) >= _MOST_OF_ONE:
            raise Refused(429, f"{_MOST_OF_ONE} clients with this token are here already: let some go", "limit_reached")
        return transport

    async def _open(self) -> StreamableHTTPSessionManager:
        """The transport, begun with the first call. Raises Refused where the SDK is missing."""
        async with self._opening:
            if self._transport is None:
                try:
                    await asyncio.to_thread(importlib.import_module, "skerry.surfaces.mcp.server")
                except ModuleNotFoundError as error:
                    fix = "pip install 'skerry[mcp]'"
                    raise Refused(501, f"the package {error.name!r} is missing: {fix}", "not_implemented") from None
                self._transport = await self._start()
        return self._transport

    async def _start(self) -> StreamableHTTPSessionManager:
        from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
        from mcp.server.transport_security import TransportSecuritySettings

        from skerry.surfaces.mcp.outputs import Outputs
        from skerry.surfaces.mcp.server import build_server

        self._outputs = Outputs()
        transport = StreamableHTTPSessionManager(
            build_server(self._caller, is_local=False)._lowlevel_server,
            # names and origins are the guard's to check, before anybody gets here
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=_IDLE_S,
            max_sessions=_MOST_CLIENTS,
        )
        is_open = asyncio.Event()

        async def run() -> None:
            async with transport.run():
                is_open.set()
                await self._is_over.wait()

        self._runner = asyncio.create_task(run())
        await is_open.wait()
        return transport

    @asynccontextmanager
    async def _caller(self, context: ServerRequestContext[Any, Any]) -> AsyncIterator[Caller]:
        """Whoever sent a message, for as long as it takes to answer it: a client that went away is not waited for, and
        what it has begun goes on, so calls are counted here. Raises AccessDenied and LimitReached."""
        from skerry.surfaces.mcp.caller import Caller

        request = context.request
        if not isinstance(request, Request):
            raise AccessDenied("a message came from nowhere")
        principal: Principal = request.scope["skerry.principal"]
        most = self._server.config.server.max_calls
        if self._running[principal.actor] >= most:
            raise LimitReached(f"{most} calls of this token are under way: wait for some of them")
        ACTOR.set(Actor(principal.actor, principal.tenant or ""))
        manager = await self._server.manager_for(principal)
        self._running[principal.actor] += 1
        try:
            yield Caller(
                manager,
                manager.config.spec({}),
                outputs=self._outputs,
                principal=principal,
                fleets=self._server.fleets,
                url=_url(request),
                sees_all=principal.tenant is None,
            )
        finally:
            self._running[principal.actor] -= 1
            self._running += Counter()  # forgets whoever has none


def _again(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def _url(request: Request) -> str:
    """Where the client finds this server; the guard knows the name. Empty on the unix socket."""
    host = request.headers.get("host", "")
    is_socket = request.client is not None and request.client.host.startswith("uid:")
    return "" if is_socket or not host else f"{request.url.scheme}://{host}"
