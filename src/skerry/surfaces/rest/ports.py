"""Ports of sandboxes: what listens, links to them for browsers, and tunnels."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.agent.tunnel import AsyncTunnel
from skerry.aio import end
from skerry.errors import SkerryError
from skerry.model.tenants import Scope
from skerry.sandbox import service
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.ports.links import DEFAULT_S, MAX_S, PARAMETER, Link
from skerry.surfaces.ports.places import Place
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import Call, Routes, accept
from skerry.surfaces.rest.views import Page

routes = Routes("ports")
PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65535)]
_EOF = msgspec.json.encode({"type": "eof"}).decode()
_STALLED_S = 600.0
_LOOK_S = 5.0


class LinkView(msgspec.Struct, frozen=True, kw_only=True):
    """A link to a port. Its URL is shown once, when it is made."""

    id: str
    """Its serial, which the ledger has."""
    public: bool
    expires_at: float
    created_at: float
    created_by: str

    @classmethod
    def of(cls, link: Link) -> LinkView:
        return cls(**{field: getattr(link, field) for field in cls.__struct_fields__})


class PortView(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a sandbox that listens, is named in its spec, or has links."""

    port: int
    listening: bool | None
    """Null if the box cannot tell, or does not run."""
    address: str | None
    """On the server's loopback, for ports of the spec."""
    url: str
    """Where browsers reach it, with a link."""
    links: tuple[LinkView, ...]


class MakeLink(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a link is to be."""

    lifetime_s: Annotated[float, msgspec.Meta(ge=1, le=MAX_S)] = DEFAULT_S
    public: bool = False
    """Open the port to everybody who knows its name, until then."""


class MadeLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link that was made."""

    id: str
    url: str
    """Opens the port for whoever has it."""
    expires_at: float
    public: bool


@routes.get("/sandboxes/{id}/ports", Scope.READ)
async def list(call: Call, id: str) -> Page[PortView]:
    """Ports that listen, those of the spec, and those that have links."""
    record = await call.manager.record(id)
    heard: set[int] | None = None
    if record.is_live:
        heard = await _listening(await call.manager.get(record.id))
    links = await call.server.ports.links.of(record.id)
    named = {port.port: port.address for port in record.spec.ports}
    numbers = sorted({*named, *(heard or ()), *(link.port for link in links)})
    views = [
        PortView(
            port=port,
            listening=None if heard is None else port in heard,
            address=named.get(port),
            url=_url(call, Place(port, record.id)),
            links=tuple(LinkView.of(link) for link in links if link.port == port),
        )
        for port in numbers
    ]
    return Page(views)


@routes.post("/sandboxes/{id}/ports/{port}/link", Scope.PORTS, status=201)
async def link(call: Call, id: str, port: PortNumber, body: MakeLink) -> MadeLink:
    """Make a link that opens a port in a browser: for this port of this sandbox only, until it expires, is withdrawn,
    or the sandbox ends. With `public` the port needs no link meanwhile."""
    sandbox = await call.sandbox(id)
    place, links = Place(port, sandbox.id), call.server.ports.links
    call.manager.handles.ledger.append("link", sandbox.id, port=port, public=body.public, lifetime_s=body.lifetime_s)
    made = await links.make(
        place,
        project=sandbox.spec.project,
        public=body.public,
        lifetime_s=body.lifetime_s,
        created_by=call.principal.actor,
    )
    url = _url(call, place)
    if not made.public:
        url = f"{url}?{PARAMETER}={await links.token(place, made)}"
    return MadeLink(id=made.id, url=url, expires_at=made.expires_at, public=made.public)


@routes.delete("/sandboxes/{id}/ports/{port}/link", Scope.PORTS)
async def withdraw(call: Call, id: str, port: PortNumber) -> None:
    """Withdraw all links to a port, and close it if it was public."""
    record = await call.manager.record(id)
    if await call.server.ports.links.withdraw(Place(port, record.id)):
        call.manager.handles.ledger.note("unlink", record.id, port=port)


@routes.websocket("/sandboxes/{id}/ports/{port}", Scope.PORTS)
async def tunnel(call: Call, socket: WebSocket, id: str, port: PortNumber) -> None:
    """One connection to a port. Binary frames are its bytes; the text frame `{"type":"eof"}` says, either way, that no
    more will come, and the connection lasts until both have said so."""
    sandbox = await call.sandbox(id)
    call.manager.handles.ledger.append("port", sandbox.id, port=port, tunnel=True)
    async with await sandbox.connect(port) as opened:
        await accept(socket)
        is_over = asyncio.Event()
        up = asyncio.create_task(_up(socket, opened, is_over))
        down = asyncio.create_task(_down(opened, socket, is_over))
        try:
            done, _ = await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await socket.close()
        except (WebSocketDisconnect, OSError):  # the client is gone, or the box took nothing for too long
            pass
        finally:
            await end(up, down)


async def _up(socket: WebSocket, opened: AsyncTunnel, is_over: asyncio.Event) -> None:
    """Bytes of the client to the port, and then until it is gone. Raises WebSocketDisconnect, Refused for a frame that
    means nothing, and TimeoutError if the port takes nothing."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        data, text = message.get("bytes"), message.get("text")
        if is_over.is_set() or (data is None and not _is_eof(text or "")):
            raise Refused(400, f"bytes go in binary frames, and after {_EOF} there are none", "invalid_request")
        async with asyncio.timeout(_STALLED_S):
            if data is not None:
                await opened.write(data)
            else:
                await opened.close_write()
                is_over.set()


async def _down(opened: AsyncTunnel, socket: WebSocket, is_over: asyncio.Event) -> None:
    """Bytes of the port to the client, until both have ended."""
    while data := await opened.read():
        await socket.send_bytes(data)
    await socket.send_text(_EOF)
    await is_over.wait()


def _is_eof(text: str) -> bool:
    try:
        return bool(msgspec.json.decode(text) == {"type": "eof"})
    except (msgspec.DecodeError, RecursionError):
        return False


async def _listening(sandbox: AsyncSandbox) -> set[int] | None:
    """Ports of the box on which something listens, as the box tells; None if it does not."""
    try:
        async with asyncio.timeout(_LOOK_S):
            return await service.listening(await sandbox.connection.connect())
    except (SkerryError, TimeoutError):
        return None


def _url(call: Call, place: Place) -> str:
    """Where a port is reached by whoever makes this call: by the port of the server that they use."""
    scheme, port = call.connection.url.scheme.replace("ws", "http"), call.connection.url.port
    if (call.connection.scope.get("client") or ("",))[0].startswith("uid:"):
        settings = call.server.config.server
        port = int(settings.listen[0].rpartition(":")[2]) if settings.listen else None
        scheme = "https" if settings.tls_cert else "http"
    return call.server.ports.base.url(place, scheme, port)
