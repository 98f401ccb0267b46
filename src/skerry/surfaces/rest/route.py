"""Routes: how a function becomes a call of the API. Its signature is all there is to say, also for OpenAPI.

    routes = Routes("sandboxes")

    @routes.post("/sandboxes/{id}/pause", Scope.DESTROY)
    async def pause(call: Call, id: str) -> SandboxView:
        \"""Freeze it, where the provider can.\"""

Parameters beside `call` are those of the path by their names, `query` (a struct of what follows the `?`) and `body` (a
struct that the JSON body is read as). What it returns is the JSON of the answer; None is an answer without a body, and
`Streamed` one whose bytes come as they are made. The docstring is the documentation.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.websockets import WebSocket

from skerry.errors import Conflict, NotFound, SandboxGone
from skerry.model.tenants import Principal, Scope
from skerry.surfaces.rest.problems import Refused

if TYPE_CHECKING:
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.sandbox.sandbox import AsyncSandbox
    from skerry.surfaces.server.server import Server

F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
PREFIX = "/v1"
PROTOCOL = "skerry.v1"
"""Name of what we speak over WebSockets."""
JSON = "application/json"
EVENTS = "text/event-stream"
GONE = 499
"""Status of a call whose client went away, for logs alone."""
_BODY_S = 60.0
"""Seconds for all of a body that is JSON; what is streamed may take longer, as long as it comes."""
BYTES = "application/octet-stream"
_OWN = frozenset({"call", "query", "body", "socket", "return"})


class Call:
    """One call: who makes it, and the manager of what is theirs."""

    def __init__(
        self, server: Server, connection: HTTPConnection, principal: Principal, manager: AsyncSandboxManager, id: str
    ) -> None:
        self.server = server
        self.connection = connection
        self.principal = principal
        self.manager = manager
        """For a tenant, one to which there is nothing but its project."""
        self.id = id
        """The request's id, which answers, logs and the ledger have."""
        self.headers: dict[str, str] = {}
        """Headers of the answer."""

    @property
    def request(self) -> Request:
        assert isinstance(self.connection, Request)
        return self.connection

    async def sandbox(self, reference: str) -> AsyncSandbox:
        """A sandbox of theirs that can be used. Raises NotFound, or SandboxGone if it has ended."""
        if (recent := self.manager.handles.recent(reference)) is not None:
            return recent
        try:
            return await self.manager.get(reference)
        except NotFound as error:
            await self.manager.record(reference)  # raises, unless there was one
            raise SandboxGone(error.message) from None

    def header(self, name: str) -> str | None:
        """A header of the request."""
        return self.connection.headers.get(name)

    def tag(self, version: int) -> None:
        """Give the answer an ETag: the version of what it shows."""
        self.headers["etag"] = f'"{version}"'

    def match(self) -> int | None:
        """The version that `If-Match` names; None where any will do. Raises Refused for what is no version."""
        text = self.header("if-match")
        if text is None or text.strip() == "*":
            return None
        number = text.strip().removeprefix("W/").strip('"')
        if not number.isdecimal() or len(number) > 18:
            raise Refused(412, "If-Match: give the ETag of an answer", "precondition_failed")
        return int(number)

    @contextmanager
    def matching(self) -> Iterator[None]:
        """Tell a Conflict as one of the version that `If-Match` names, if it names one. Raises Refused."""
        try:
            yield
        except Conflict as error:
            if self.header("if-match") is None:
                raise
            raise Refused(412, error.message, error.code) from None


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer whose bytes come as they are made."""

    chunks: AsyncIterator[bytes]
    content_type: str = BYTES
    status: int = 200
    headers: dict[str, str] = {}


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A call of the API."""

    method: str
    """`WEBSOCKET` for what becomes one."""
    path: str
    handler: Callable[..., Awaitable[Any]]
    scope: Scope | None
    status: int
    noun: str
    content_type: str
    """Of a successful answer."""
    takes: str
    """Content type of what it is sent; empty if it reads no body."""
    headers: tuple[str, ...] = ()
    """Headers of the request that mean something to it, for the documentation."""
    also: tuple[int, ...] = ()
    """Other statuses of answers that are no problems, for the documentation."""

    @property
    def hints(self) -> dict[str, Any]:
        return _hints(self.handler)

    @property
    def path_parameters(self) -> dict[str, Any]:
        return _path_parameters(self.handler)

    @property
    def documentation(self) -> str:
        return inspect.getdoc(self.handler) or ""

    @property
    def name(self) -> str:
        """Its operation id: noun and verb."""
        return f"{self.noun}_{self.handler.__name__}"


@cache
def _hints(handler: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(handler, include_extras=True)


@cache
def _path_parameters(handler: Callable[..., Any]) -> dict[str, Any]:
    return {name: hint for name, hint in _hints(handler).items() if name not in _OWN}


@cache
def _lists(kind: Any) -> frozenset[str]:
    """The names in a query that may come again."""
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind) if "tuple" in str(field.type))


class Routes:
    """The calls of a noun."""

    def __init__(self, noun: str) -> None:
        self.noun = noun
        self.all: list[Route] = []

    def add(
        self,
        method: str,
        path: str,
        scope: Scope | None,
        *,
        status: int = 200,
        content_type: str = JSON,
        takes: str | None = None,
        headers: tuple[str, ...] = (),
        also: tuple[int, ...] = (),
    ) -> Callable[[F], F]:
        """Make a function a route. `scope` None is a call that anybody may make who is known at all; `takes` is what it
        reads from the request itself, where it has no `body`."""

        def register(handler: F) -> F:
            reads = JSON if "body" in inspect.signature(handler).parameters else ""
            self.all.append(
                Route(
                    method=method,
                    path=PREFIX + path,
                    handler=handler,
                    scope=scope,
                    status=status,
                    noun=self.noun,
                    content_type=content_type,
                    takes=reads if takes is None else takes,
                    headers=headers,
                    also=also,
                )
            )
            return handler

        return register

    def get(self, path: str, scope: Scope | None, **more: Any) -> Callable[[F], F]:
        return self.add("GET", path, scope, **more)

    def post(self, path: str, scope: Scope | None, **more: Any) -> Callable[[F], F]:
        return self.add("POST", path, scope, **more)

    def put(self, path: str, scope: Scope | None, **more: Any) -> Callable[[F], F]:
        return self.add("PUT", path, scope, **more)

    def patch(self, path: str, scope: Scope | None, **more: Any) -> Callable[[F], F]:
        return self.add("PATCH", path, scope, **more)

    def delete(self, path: str, scope: Scope | None, *, status: int = 204, **more: Any) -> Callable[[F], F]:
        return self.add("DELETE", path, scope, status=status, **more)

    def websocket(self, path: str, scope: Scope | None) -> Callable[[F], F]:
        """Make a function `(call, socket, ...)` one that speaks over a WebSocket."""
        return self.add("WEBSOCKET", path, scope, status=101)


def read_path(route: Route, given: Mapping[str, str]) -> dict[str, Any]:
    """The parameters of the path, as the function has them. Raises Refused."""
    found = {}
    for name, hint in route.path_parameters.items():
        try:
            found[name] = msgspec.convert(given[name], hint, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(404, f"{name}: {error}", "not_found") from None
    return found


def read_query(kind: Any, connection: HTTPConnection) -> Any:
    """What follows the `?`; a name that comes again makes a list. Raises Refused."""
    given: dict[str, Any] = {}
    for name in connection.query_params:
        values = connection.query_params.getlist(name)
        is_list = name in _lists(kind)
        if len(values) > 1 and not is_list:
            raise Refused(400, f"{name}: it is given {len(values)} times", "invalid_request")
        given[name] = values if is_list else values[0]
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Refused(400, f"query: {error}", "invalid_request") from None


async def whole_body(request: Request, most: int) -> bytes:
    """All of a request's body. Raises Refused for one that is larger than `most` bytes, takes too long or breaks off,
    and TooMany if those of its caller are too large together."""
    body, counted = bytearray(), request.scope.get("skerry.counted")
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                body += chunk
                if counted is not None:
                    counted.hold(len(chunk))
                if len(body) > most:
                    raise Refused(413, f"the body is larger than {most} bytes", "too_large")
    except TimeoutError:
        raise Refused(408, f"the body took longer than {_BODY_S:g} s", "too_slow") from None
    except ClientDisconnect:
        raise Refused(GONE, "the client went away", "gone") from None
    return bytes(body)


def read_body(kind: Any, raw: bytes) -> Any:
    """A JSON body. Raises Refused, or what the struct itself raises."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, f"body: {error}", "invalid_request") from None


async def accept(socket: WebSocket) -> None:
    """Accept a WebSocket, in our protocol if the client names it."""
    await socket.accept(subprotocol=PROTOCOL if PROTOCOL in socket.scope.get("subprotocols", ()) else None)
