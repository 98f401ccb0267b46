"""What is told of a server: each call in its log, its metrics and the ledger; and whether it is well."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Scope

from skerry import trace
from skerry.config import variable
from skerry.errors import NotPermitted, SkerryError
from skerry.ledger.line import ACTOR, Actor
from skerry.model.records import Record
from skerry.surfaces.server import metrics

if TYPE_CHECKING:
    from skerry.surfaces.server.server import Server

OPEN = ("/healthz", "/readyz")
"""What anybody may ask, by any name of the server: it tells nothing but yes or no."""
_READ_ONLY = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = frozenset({*_READ_ONLY, "POST", "PUT", "PATCH", "DELETE", "WEBSOCKET"})
_OTHER = "other"
_READY_S = 1.0
"""Seconds for which an answer about being ready holds."""
_PROVIDER_S = 15.0
"""Seconds between two checks of the default provider."""
_ANSWER_S = 5.0
"""Seconds for the registry or a provider to answer."""
_LIST_S = 1.0
_log = logging.getLogger("skerry.server")


class Observed:
    """One call, from its first byte to its last."""

    def __init__(self, server: Server, scope: Scope, id: str) -> None:
        self._server = server
        self._scope = scope
        self._id = id
        self._began = time.monotonic()
        self._answered: float | None = None
        self.status = 0
        server.metrics.begin()

    def answered(self, status: int) -> None:
        """Note that the answer begins."""
        self.status = status
        self._answered = time.monotonic() - self._began

    def sent(self) -> None:
        """Count it as one of the caller's calls no longer: they have all of the answer, and may ask again."""
        if (counted := self._scope.pop("skerry.counted", None)) is not None:
            counted.end()

    def end(self) -> None:
        """Tell of it, once it is over."""
        scope, server = self._scope, self._server
        self.sent()
        asked = scope.get("method", "WEBSOCKET")
        method = asked if asked in _METHODS else _OTHER
        route = template_of(scope)
        server.metrics.end(route, method, self.status, self._answered)
        told = {"http.request.method": method, "http.route": route, "http.response.status_code": self.status}
        trace.note(**told, **{"skerry.request": self._id})
        self._tell_ledger(method, route)
        if _log.isEnabledFor(logging.INFO):
            self._tell_log(method, route)

    def _tell_ledger(self, method: str, route: str) -> None:
        """Write down what changes something, and tokens that were refused; never what was said."""
        principal, ledger = self._scope.get("skerry.principal"), self._server.manager.store.ledger
        if principal is not None:
            if method in _READ_ONLY:
                return
            token = ACTOR.set(Actor(principal.actor, principal.tenant or ""))
        elif self._scope.get("skerry.refused"):
            token = ACTOR.set(Actor(f"address:{self._address()}"))
        else:
            return
        try:
            ledger.note_soon("call", method=method, route=route, status=self.status, request=self._id)
        finally:
            ACTOR.reset(token)

    def _tell_log(self, method: str, route: str) -> None:
        principal, took_ms = self._scope.get("skerry.principal"), (time.monotonic() - self._began) * 1000
        fields: dict[str, Any] = {
            "request": self._id,
            "actor": principal.actor if principal is not None else "",
            "method": method,
            "route": route,
            "status": self.status,
            "duration_ms": round(took_ms, 1),
        }
        if route.startswith("/v1/sandboxes/{id}"):
            fields["sandbox"] = str(self._scope.get("path_params", {}).get("id", ""))[:64]
        if (place := self._scope.get("skerry.port")) is not None:
            fields["sandbox"], fields["port"] = place.id, place.port
        text = " ".join(f"{name}={value}" for name, value in fields.items() if value != "")
        _log.info("%s", text, extra={"fields": fields})

    def _address(self) -> str:
        client = self._scope.get("client")
        return str(client[0]) if client else ""


def template_of(scope: Scope) -> str:
    """The route of a call, as it is written: without what is in its place in this one."""
    if "skerry.port" in scope:
        return "port"
    route = scope.get("skerry.route")
    if route is not None:
        return str(route.path)
    return scope["path"] if scope.get("path") in (*OPEN, "/metrics", "/") else _OTHER


def routes(server: Server, problem: Callable[[SkerryError, str], Response]) -> list[Route]:
    """What is told of the server itself."""
    health = Health(server)

    async def alive(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def ready(request: Request) -> Response:
        return PlainTextResponse("ready\n") if await health.is_ready() else PlainTextResponse("not ready\n", 503)

    async def read_metrics(request: Request) -> Response:
        try:
            if not (server.config.server.metrics == "loopback" and _is_near(request)):
                principal = await server.principal(request)
                if not principal.is_admin:
                    raise NotPermitted("metrics are for admins")
            live, room = await health.live(), await server.manager.handles.room()
            return Response(server.metrics.text(live, *metrics.of_host(room)), media_type=metrics.CONTENT_TYPE)
        except SkerryError as error:
            return problem(error, request.scope["skerry.request"])

    found: list[tuple[str, Callable[[Request], Awaitable[Response]]]]
    found = [("/healthz", alive), ("/readyz", ready), ("/metrics", read_metrics)]
    return [Route(path, endpoint, methods=["GET"]) for path, endpoint in found]


class Health:
    """Whether a server can do its work, asked no more often than is good for it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = asyncio.Lock()
        self._answer: tuple[float, bool] = (float("-inf"), False)
        self._checked: tuple[float, bool] = (float("-inf"), False)
        self._live: tuple[float, list[Record]] = (float("-inf"), [])

    async def is_ready(self) -> bool:
        """Whether the registry answers, the default provider can make boxes, and the server is not about to end."""
        if self._server.is_draining.is_set():
            return False
        async with self._lock:
            at, answer = self._answer
            if time.monotonic() - at > _READY_S:
                answer = await self._look()
                self._answer = time.monotonic(), answer
        return answer

    async def _look(self) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._server.manager.store.last_event()
                return await self._provider_is_well()
        except (SkerryError, OSError) as error:
            _log.warning("the server is not ready: %s", error or type(error).__name__)
            return False

    async def _provider_is_well(self) -> bool:
        at, is_well = self._checked
        if time.monotonic() - at > _PROVIDER_S:
            manager = self._server.manager
            is_well = False
            try:
                await manager.provider(manager.config.provider).check()
                is_well = True
            finally:
                self._checked = time.monotonic(), is_well
        return is_well

    async def live(self) -> list[Record]:
        """All sandboxes that have not ended."""
        async with self._lock:
            at, records = self._live
            if time.monotonic() - at > _LIST_S:
                records = await self._server.manager.list()
                self._live = time.monotonic(), records
        return records


def begin_tracing() -> None:
    """Have spans go where OpenTelemetry's own variables say, if it is installed. A program that has set it up already,
    such as `opentelemetry-instrument`, is left to it."""
    try:
        from opentelemetry import trace as api
    except ImportError:
        return
    if not variable("OTEL_EXPORTER_OTLP_ENDPOINT") or not isinstance(
        api.get_tracer_provider(), api.ProxyTracerProvider
    ):
        return
    try:
        exporter = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning("spans go nowhere: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http")
        return
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter()))
    api.set_tracer_provider(provider)


def _is_near(request: Request) -> bool:
    """Whether a request came from this host."""
    host = request.client.host if request.client is not None else ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
