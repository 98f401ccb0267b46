"""Ports of sandboxes by E2B's names for them: open to whoever knows the name, or shows the sandbox's traffic token."""

from __future__ import annotations

import hmac
from contextlib import suppress
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from skerry.errors import NotFound, SkerryError
from skerry.surfaces.e2b import answers
from skerry.surfaces.e2b.box import E2bSandbox
from skerry.surfaces.e2b.names import Place
from skerry.surfaces.ports import places
from skerry.surfaces.ports.exchange import ClientGone, Limits, cut
from skerry.surfaces.ports.headers import to_box
from skerry.surfaces.ports.places import Base, Turned
from skerry.surfaces.ports.proxy import Visit, pass_on

if TYPE_CHECKING:
    from skerry.surfaces.server.server import Server

TRAFFIC_TOKEN = "e2b-traffic-access-token"
_OURS = frozenset({TRAFFIC_TOKEN, "e2b-sandbox-id", "e2b-sandbox-port", "x-access-token", "x-api-key"})
_BASE = Base("e2b")


class PortProxy:
    """What listens on ports of sandboxes, for whoever asks by E2B's names."""

    def __init__(self, server: Server) -> None:
        self._limits = Limits()
        self._server = server

    async def serve(self, box: E2bSandbox, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a port."""
        if scope["type"] == "websocket":
            await receive()  # that it wants to connect
        try:
            await self._pass(box, place, scope, receive, send)
        except SkerryError as error:
            is_closed = isinstance(error, NotFound)
            await _tell(
                answers.port_closed(box.name, place.port) if is_closed else answers.of_error(error), scope, send
            )
        except Turned as turned:
            if isinstance(turned.__cause__, NotFound):
                await _tell(answers.port_closed(box.name, place.port), scope, send)
                return
            phrase = HTTPStatus(turned.status).phrase
            await _tell(answers.failure(turned.status, f"{phrase}: {turned.text}"), scope, send)
        except ClientGone:
            if (transport := scope.get("skerry.transport")) is not None:
                transport.abort()
        except OSError:
            if scope["type"] == "http":
                await cut(scope, receive)

    async def _pass(self, box: E2bSandbox, place: Place, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request on. Raises Turned, ClientGone, ConnectionError or SkerryError; NotFound where nothing
        listens."""
        visit = Visit.of(scope, places.Place(place.port, box.id), _BASE)
        if (token := box.traffic_token) is not None:
            given = visit.header(TRAFFIC_TOKEN) or ""
            if not hmac.compare_digest(given.encode("latin-1"), token.encode()):
                raise Turned(403, "the traffic token of this sandbox is missing, or not valid")
        mask = box.kept.network.mask_request_host
        host = mask.replace("${PORT}", str(place.port)) if mask else visit.host
        shown = [(name, value) for name, value in visit.headers if name not in _OURS]
        headers = to_box(shown, host=host, scheme=visit.scheme, client=visit.client)
        headers = [("Host" if name == "host" else name, value) for name, value in headers]  # as E2B spells it
        await pass_on(visit, headers, await box.sandbox.connect(place.port), receive, send, self._limits)


async def _tell(response: Response, scope: Scope, send: Send) -> None:
    """Answer a request, also one for a WebSocket, with an error of ours."""
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    start: Message = {"type": f"{kind}.start", "status": response.status_code, "headers": response.raw_headers}
    with suppress(OSError):  # nobody may wait for it
        await send(start)
        await send({"type": f"{kind}.body", "body": response.body})
