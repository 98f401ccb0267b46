"""Headers between browsers and boxes: what is the server's own reaches no box, and what a box says is about nothing but
its own origin.

To the box go neither tokens of the API nor cookies of ours, nor what clients say of proxies before us; whatever the
app itself uses for its users, `Authorization` included, goes through. From the box come no cookies for other hosts, no
rules for how browsers reach other hosts or the server, and no orders to a proxy before the server.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence

from skerry.gate.http1 import Head
from skerry.surfaces.ports.links import PARAMETER

Pairs = list[tuple[str, str]]
COOKIE = "skerry-port"
_OUR_COOKIES = ("skerry", "__host-skerry", "__secure-skerry")
_OUR_TOKEN = re.compile(r"skerry_[0-9a-f]{12}_|e2b_[0-9a-f]{84}|skerry\.bearer\.", re.IGNORECASE)
_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authentication-info", "proxy-authorization",
    "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length",
})  # fmt: skip
"""For the next program only. How long a body is we say ourselves."""
_FROM_CLIENT = frozenset({"host", "expect", "http2-settings", "forwarded", "via", "x-real-ip", "cookie"})
_FROM_BOX = frozenset({
    "alt-svc", "clear-site-data", "public-key-pins", "set-cookie", "strict-transport-security",
    "x-accel-redirect", "x-lighttpd-send-file", "x-reproxy-url", "x-sendfile",
})  # fmt: skip


def to_box(headers: Sequence[tuple[str, str]], *, host: str, scheme: str, client: str) -> Pairs:
    """Headers of a client's request as the box gets them."""
    named = {*_HOP, *_FROM_CLIENT, *_words(headers, "connection")}
    kept = [
        (name, value)
        for name, value in headers
        # servers read X_Forwarded_For as X-Forwarded-For
        if name not in named and "_" not in name and not name.startswith("x-forwarded-") and not _is_ours(value)
    ]
    cookies = "; ".join(_cookies_of_app(headers))
    ours = [("x-forwarded-for", client), ("x-forwarded-host", host), ("x-forwarded-proto", scheme)]
    return [("host", host), *kept, *([("cookie", cookies)] if cookies else []), *ours]


def from_box(answer: Head) -> Pairs:
    """Headers of a box's answer as the client gets them."""
    named = {*_HOP, *_FROM_BOX, *answer.words("connection")}
    kept = [(name.lower(), value) for name, value in answer.headers if name.lower() not in named]
    cookies = [_own_host(value) for value in answer.all("set-cookie") if not _is_our_cookie(value)]
    return [*kept, *(("set-cookie", value) for value in cookies)]


def link_cookies(headers: Iterable[tuple[str, str]]) -> list[str]:
    """The values of our cookies in a request, of which there may be more than one: others can put some there."""
    pairs = [pair.strip().partition("=") for name, value in headers if name == "cookie" for pair in value.split(";")]
    return [value for name, _, value in pairs if name in (COOKIE, f"__Host-{COOKIE}")]


def set_cookie(token: str, lifetime_s: int, *, is_secure: bool) -> str:
    """The cookie that a link becomes, for its host only."""
    name, more = (f"__Host-{COOKIE}", "; Secure") if is_secure else (COOKIE, "")
    return f"{name}={token}; Path=/; Max-Age={lifetime_s}; HttpOnly; SameSite=Lax{more}"


def _is_ours(value: str) -> bool:
    """Whether a value has a token of the API in it, or a link, also as a user's name or password."""
    if _OUR_TOKEN.search(value) or f"{PARAMETER}=" in value:
        return True
    scheme, _, text = value.partition(" ")
    if scheme.lower() != "basic":
        return False
    try:
        return bool(_OUR_TOKEN.search(base64.b64decode(text.strip()).decode("latin-1")))
    except (binascii.Error, ValueError):
        return False


def _cookies_of_app(headers: Iterable[tuple[str, str]]) -> list[str]:
    pairs = [pair.strip() for name, value in headers if name == "cookie" for pair in value.split(";")]
    return [pair for pair in pairs if pair and not _is_our_cookie(pair) and not _is_ours(pair)]


def _is_our_cookie(pair: str) -> bool:
    name = pair.partition(";")[0].partition("=")[0]
    return name.strip().lower().startswith(_OUR_COOKIES)


def _own_host(cookie: str) -> str:
    """A cookie without what gives it to other hosts."""
    parts = cookie.split(";")
    return ";".join(part for part in parts if part.partition("=")[0].strip().lower() != "domain" or part is parts[0])


def _words(headers: Iterable[tuple[str, str]], name: str) -> set[str]:
    return {word.strip().lower() for each, value in headers if each == name for word in value.split(",")}
