"""The proxy from a name of its own to a port of a sandbox: who may come in, and what they get.

A link of a private port becomes a cookie for its name. From then on the cookie is looked at with each request, and goes
no further; pages of other origins cannot use it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import unquote_plus

import msgspec
from starlette.types import Receive, Scope, Send

from skerry.agent.tunnel import AsyncTunnel
from skerry.aio import end
from skerry.errors import LedgerError, LedgerFull, NotFound, SkerryError, StoreError
from skerry.gate.http1 import Body
from skerry.ledger.line import ACTOR, Actor
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.ports.exchange import Asked, ClientGone, Exchange, Limits, cut, turned_by
from skerry.surfaces.ports.headers import Pairs, link_cookies, set_cookie, to_box
from skerry.surfaces.ports.links import PARAMETER, Link, Links
from skerry.surfaces.ports.places import Base, Place, Turned, answer, base_of
from skerry.surfaces.ports.websocket import Relay
from skerry.surfaces.rest.problems import Refused

_log = logging.getLogger("skerry.server")
_MOST_TOLD = 10_000
LOOK_S = 10.0
"""Seconds after which it is looked again whether the link of a request that lasts is good."""
_NO_LINK = 1008
"""Code of a WebSocket whose link is not good any more."""
_PRIVATE = "This port of a sandbox is private. Whoever may open it can make a link; links expire and can be withdrawn."


class Visit(msgspec.Struct, frozen=True, kw_only=True):
    """A request for a port, as far as it is ours to read."""

    place: Place
    is_socket: bool
    method: str
    target: str
    """Path and query, without a link."""
    tokens: tuple[str, ...]
    """Links in the query."""
    headers: Pairs
    host: str
    scheme: str
    client: str

    @classmethod
    def of(cls, scope: Scope, place: Place, base: Base) -> Visit:
        """Raises Turned for what cannot be sent on."""
        headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        is_tls = scope["scheme"] in ("https", "wss")
        path, (query, tokens) = scope["raw_path"].decode("latin-1"), _without_links(scope["query_string"])
        target = f"{path}?{query}" if query else path
        if not target.startswith("/") or not all("!" <= letter <= "~" for letter in target):
            raise Turned(400, "The request's path is none.")
        if scope["http_version"] != "1.1":
            raise Turned(505, "Ports are reached by HTTP/1.1.")
        peer = str((scope.get("client") or ("",))[0])
        return cls(
            place=place,
            is_socket=scope["type"] == "websocket",
            method=scope.get("method", "GET"),
            target=target,
            tokens=tokens,
            headers=headers,
            host=next(value for name, value in headers if name == "host").lower(),
            scheme=base.scheme or ("https" if is_tls else "http"),
            client=peer if peer and not peer.startswith("uid:") else "unknown",
        )

    def header(self, name: str) -> str | None:
        """A header, if there is one and no more."""
        found = [value for each, value in self.headers if each == name]
        return found[0] if len(found) == 1 else None if not found else ", ".join(found)

    @property
    def is_from_elsewhere(self) -> bool:
        """Whether a page of another origin makes the request, other than by a link that somebody follows. Ports of
        sandboxes may be on one site with each other, so that the cookie alone does not tell."""
        site = self.header("sec-fetch-site")
        if site in ("same-origin", "none") and not self.is_socket:
            return False
        origin = self.header("origin")
        if origin is not None and origin.lower() != f"{self.scheme}://{self.host}":
            return True
        is_followed = self.header("sec-fetch-mode") == "navigate" and self.header("sec-fetch-dest") == "document"
        return site in ("same-site", "cross-site") and not (is_followed and self.method in ("GET", "HEAD"))


class Ports:
    """All ports of all sandboxes."""

    def __init__(self, manager: AsyncSandboxManager, begin: Callable[[SandboxId], Callable[[], None]]) -> None:
        """`manager` sees everything: a link says which sandbox its holder may see. `begin` counts a request in, what it
        gives counts it out, and it raises Refused if there are too many. Raises ConfigError."""
        self._manager = manager
        self.base = base_of(manager.config.server.ports_host)
        self.links = Links(manager.store)
        self.limits = Limits()
        self._begin = begin
        self._told: set[tuple[str, str]] = set()

    def place_of(self, scope: Scope) -> Place | None:
        """The port that a request is for by the name of its host; None for all that is not for a port."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        return self.base.place_of(hosts[0].decode("latin-1")) if len(hosts) == 1 else None

    async def serve(self, scope: Scope, receive: Receive, send: Send, place: Place) -> None:
        """Answer a request for a port."""
        if scope["type"] == "websocket":
            await receive()  # that it wants to connect
        try:
            try:
                visit = Visit.of(scope, place, self.base)
                link = await self._admit(visit)
                with self._counted(place.id):
                    await self._pass(visit, link, scope, receive, send)
            except SkerryError as error:
                raise self._unwell(error) from error
        except Turned as turned:
            with suppress(OSError):  # nobody may wait for it
                await answer(scope, send, turned)
        except ClientGone:
            if (transport := scope.get("skerry.transport")) is not None:
                transport.abort()
        except OSError as error:
            _log.debug("an answer of port %s was cut: %s", place.label, error)
            if scope["type"] == "http":
                await cut(scope, receive)

    async def _admit(self, visit: Visit) -> Link:
        """The link by which a request comes in. Raises Turned, with 303 for one that is to come again with a cookie."""
        if visit.tokens:
            link = await self.links.check(visit.place, visit.tokens[-1])
            if link is None:
                raise Turned(401, f"This link is not valid, or not any more. {_PRIVATE}")
            if visit.method in ("GET", "HEAD") and not visit.is_socket:
                left_s = max(1, int(link.expires_at - time.time()))
                cookie = set_cookie(visit.tokens[-1], left_s, is_secure=visit.scheme == "https")
                raise Turned(303, "The way is open.", location=_local(visit.target), set_cookie=cookie)
            return link
        if (link := await self.links.public(visit.place)) is not None:
            return link
        for token in link_cookies(visit.headers):
            if (link := await self.links.check(visit.place, token)) is not None:
                if visit.is_from_elsewhere:
                    raise Turned(403, "A page of another origin may not use a private port.")
                return link
        raise Turned(401, _PRIVATE)

    async def _pass(self, visit: Visit, link: Link, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request on to the sandbox. Raises Turned, ClientGone, ConnectionError or SkerryError."""
        sandbox = await self._reach(visit, link)
        headers = to_box(visit.headers, host=visit.host, scheme=visit.scheme, client=visit.client)
        tunnel = await sandbox.connect(visit.place.port)
        try:
            async with asyncio.timeout(None) as bound:
                watching = asyncio.create_task(self._watch(visit.place, link, bound))
                try:
                    await pass_on(visit, headers, tunnel, receive, send, self.limits)
                finally:
                    await end(watching)
        except TimeoutError:
            if not bound.expired():
                raise
            if not visit.is_socket:
                raise ClientGone from None
            with suppress(Exception):  # it may be gone
                await send({"type": "websocket.close", "code": _NO_LINK, "reason": "the link is not valid any more"})

    async def _watch(self, place: Place, link: Link, bound: asyncio.Timeout) -> None:
        """Have a request end that lasts longer than its link."""
        while (left_s := link.expires_at - time.time()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
            with suppress(StoreError):  # what is not known now is looked at again
                if link.id not in [each.id for each in await self.links.of(place.id)]:
                    break
        bound.reschedule(asyncio.get_running_loop().time())

    async def _reach(self, visit: Visit, link: Link) -> AsyncSandbox:
        """The sandbox, with a line in the ledger when a link is used for the first time from somewhere."""
        try:
            record = await self._manager.handles.live_record(visit.place.id)
        except NotFound:
            raise Turned(410, "This sandbox has ended.") from None
        ACTOR.set(Actor(f"{'public' if link.public else 'link'}:{link.id}", record.spec.project))
        if (link.id, visit.client) not in self._told:
            facts = {"port": visit.place.port, "link": link.id, "public": link.public, "client": visit.client}
            self._manager.handles.ledger.append("port", visit.place.id, **facts)
            if len(self._told) >= _MOST_TOLD:
                self._told.clear()
            self._told.add((link.id, visit.client))
        return self._manager.handles.of(record)

    @contextmanager
    def _counted(self, id: SandboxId) -> Iterator[None]:
        """Be one of the requests that a sandbox may have served, a WebSocket as long as it is open. Raises Turned."""
        try:
            count_out = self._begin(id)
        except Refused as error:
            wait_s = error.headers.get("retry-after", "1")
            text = "This sandbox is asked too much: its ports have too many connections, or too often new ones."
            raise Turned(error.status, text, retry_after=wait_s) from error
        try:
            yield
        finally:
            count_out()

    def _unwell(self, error: SkerryError) -> Turned:
        if isinstance(error, LedgerError | LedgerFull):
            return Turned(503, "The server cannot write its ledger.")
        return turned_by(error)


def _without_links(query: bytes) -> tuple[str, tuple[str, ...]]:
    """A query without links, and those."""
    kept, tokens = [], []
    for part in query.decode("latin-1").split("&"):
        name, _, value = part.partition("=")
        if unquote_plus(name) == PARAMETER:
            tokens.append(unquote_plus(value))
        else:
            kept.append(part)
    return "&".join(kept), tuple(tokens)


def _local(target: str) -> str:
    """A path as a place on the same host: browsers read what begins with two slashes, of either kind, as a host."""
    return "/" + target.lstrip("/\\")


def body_of(visit: Visit) -> Body:
    """How long the request's body is. The server has read it strictly; this is once more what it may be. Raises
    Turned."""
    lengths = [value for name, value in visit.headers if name == "content-length"]
    codings = [value.lower() for name, value in visit.headers if name == "transfer-encoding"]
    if len(lengths) + len(codings) > 1 or (codings and codings != ["chunked"]):
        raise Turned(400, "The request has no clear length.")
    if codings:
        return Body(is_chunked=True)
    if lengths and not (lengths[0].isascii() and lengths[0].isdecimal() and len(lengths[0]) <= 18):
        raise Turned(400, "The request has no clear length.")
    return Body(length=int(lengths[0]) if lengths else 0)


async def pass_on(
    visit: Visit, headers: Pairs, tunnel: AsyncTunnel, receive: Receive, send: Send, limits: Limits
) -> None:
    """Send a request through a tunnel that is open, with these headers, and close that. Raises Turned, ClientGone and
    ConnectionError."""
    try:
        if visit.is_socket:
            await Relay(visit.target, headers, tunnel, receive, send, limits).run()
            return
        asked = Asked(method=visit.method, target=visit.target, headers=headers, body=body_of(visit))
        await Exchange(asked, tunnel, receive, send, limits).run()
    finally:
        await tunnel.close()
