"""Places of ports: the names under which browsers reach them, and who may come in there.

`3000-ID.localhost:7357` is port 3000 of the sandbox with that id. Nothing of the API is reached under such a name, and
no port under any other.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import NamedTuple

import msgspec
from starlette.types import Message, Scope, Send

from skerry.errors import ConfigError
from skerry.model.spec import SandboxId

_LABEL = re.compile(r"([1-9][0-9]{0,4})-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
_HOST = re.compile(r"([0-9a-z.-]+)(?::([0-9]{1,5}))?")
_BASE = re.compile(r"(?:(https?)://)?([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)(?::([0-9]{1,5}))?")
_PAGE = {
    "content-type": "text/plain; charset=utf-8",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Place(NamedTuple):
    """A port of a sandbox."""

    port: int
    id: SandboxId

    @property
    def label(self) -> str:
        """Its part of the name: 42 bytes at most, of the 63 that it may have."""
        return f"{self.port}-{self.id}"


class Base(msgspec.Struct, frozen=True):
    """What the names of all ports end in."""

    host: str
    scheme: str | None = None
    """Set where something before the server speaks TLS in its place."""
    port: int | None = None

    def place_of(self, host: str) -> Place | None:
        """The port that a Host header names; None if it names none."""
        found = _HOST.fullmatch(host.lower())
        if found is None:
            return None
        label, _, rest = found[1].partition(".")
        named = _LABEL.fullmatch(label)
        if named is None or rest != self.host or int(named[1]) > 65535:
            return None
        return Place(int(named[1]), SandboxId(named[2]))

    def url(self, place: Place, scheme: str, port: int | None) -> str:
        """The address of a port, where the server itself is reached by that scheme and port."""
        scheme, port = (scheme, port) if self.scheme is None else (self.scheme, self.port)
        is_usual = port is None or (scheme, port) in (("http", 80), ("https", 443))
        return f"{scheme}://{place.label}.{self.host}{'' if is_usual else f':{port}'}/"


def base_of(text: str) -> Base:
    """What `server.ports_host` says: HOST, or SCHEME://HOST[:PORT] where a proxy is before the server. Raises
    ConfigError."""
    found = _BASE.fullmatch(text)
    if found is None or (found[3] is not None and (found[1] is None or not 0 < int(found[3]) < 65536)):
        raise ConfigError(f"server.ports_host: {text!r} is not HOST or SCHEME://HOST[:PORT]")
    return Base(found[2].lower(), found[1], None if found[3] is None else int(found[3]))


class Turned(Exception):
    """A request that is not sent on, or has no answer that could be sent back; its text is for people."""

    def __init__(self, status: int, text: str, **headers: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


async def answer(scope: Scope, send: Send, turned: Turned) -> None:
    """Answer a request with a small page of ours, also one for a WebSocket."""
    kind = "http.response" if scope["type"] == "http" else "websocket.http.response"
    phrase = HTTPStatus(turned.status).phrase
    body = b"" if scope.get("method") == "HEAD" else f"{turned.status} {phrase}\n\n{turned.text}\n".encode()
    headers = {**_PAGE, "content-length": str(len(body)), **turned.headers}
    start: Message = {"type": f"{kind}.start", "status": turned.status}
    start["headers"] = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send(start)
    await send({"type": f"{kind}.body", "body": body})
