"""Calls of E2B's control plane: who makes them, and how a function becomes one of its routes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from skerry.errors import NotPermitted, SkerryError
from skerry.ledger.line import ACTOR, Actor
from skerry.model.tenants import Principal, Scope
from skerry.surfaces.e2b import answers, names
from skerry.surfaces.e2b.box import Boxes, E2bSandbox
from skerry.surfaces.rest.route import read_body, whole_body

if TYPE_CHECKING:
    from skerry.manager.manager import AsyncSandboxManager
    from skerry.surfaces.e2b.secrets_calls import Secrets
    from skerry.surfaces.e2b.templates import Templates
    from skerry.surfaces.e2b.volumes import Volumes
    from skerry.surfaces.server.server import Server

T = TypeVar("T")
_log = logging.getLogger("skerry.server")


class Surface:
    """What all calls share."""

    def __init__(self, server: Server, boxes: Boxes, templates: Templates, volumes: Volumes, secrets: Secrets) -> None:
        self.server = server
        self.boxes = boxes
        self.templates = templates
        self.volumes = volumes
        self.secrets = secrets


class Call:
    """One call: who makes it, and the manager of what is theirs."""

    def __init__(
        self, surface: Surface, request: Request, principal: Principal, manager: AsyncSandboxManager, domain: str
    ) -> None:
        self.surface = surface
        self.server = surface.server
        self.boxes = surface.boxes
        self.templates = surface.templates
        self.volumes = surface.volumes
        self.secrets = surface.secrets
        self.request = request
        self.principal = principal
        self.manager = manager
        self.domain = domain
        """What names of ports end in, for whoever calls."""

    @property
    def project(self) -> str:
        """Whose it is what they make: empty for what is nobody's but the host's."""
        return self.principal.tenant or ""

    def part(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])

    async def box(self) -> E2bSandbox:
        """The sandbox that the path names. Raises NotFound unless it is theirs."""
        return await self.boxes.get(names.read(self.part("id")), self.principal)

    async def body(self, kind: type[T]) -> T:
        """The body as JSON; none is an empty object. Raises Refused."""
        found: T = read_body(kind, await whole_body(self.request, self.server.config.server.max_body))
        return found


Handler = Callable[[Call], Awaitable[Any]]


def route(surface: Surface, method: str, path: str, scope: Scope | None, handler: Handler) -> Route:
    """A route of the control plane. The caller needs a token, with that scope."""

    async def endpoint(request: Request) -> Response:
        request.scope["skerry.route"] = made
        try:
            call = await _begin(surface, request, scope)
            result = await handler(call)
            return result if isinstance(result, Response) else answers.answer(result)
        except SkerryError as error:
            return answers.of_error(error)

    made = Route(path, endpoint, methods=[method])
    return made


async def _begin(surface: Surface, request: Request, scope: Scope | None) -> Call:
    """See who calls and whether they may. Raises AccessDenied or NotPermitted."""
    server = surface.server
    if (key := request.headers.get("x-api-key")) is not None:
        request.scope["skerry.token"] = key
    principal = await server.principal(request)
    if not principal.may(scope):
        raise NotPermitted(f"this call needs the scope {scope}, which the key does not have")
    ACTOR.set(Actor(principal.actor, principal.tenant or ""))
    manager = await server.manager_for(principal)
    return Call(surface, request, principal, manager, domain_of(server, request))


def domain_of(server: Server, request: Request) -> str:
    """What the names of ports end in for this client: our own domain, or what it calls us by."""
    host = request.headers.get("host", "").lower()
    domain = server.config.server.e2b_domain.lower()
    name, _, port = host.partition(":")
    if domain and name.endswith(f".{domain}"):
        return f"{domain}:{port}" if port else domain
    return f"localhost:{port}" if name in ("127.0.0.1", "localhost", "") else host
