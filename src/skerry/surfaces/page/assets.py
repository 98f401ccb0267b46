"""Answers with the built files of the page: read once, held in memory, and under names that hold their hashes."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

STATIC = Path(__file__).parent / "static"
POLICY = "; ".join((
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data: blob:",
    "connect-src 'self'",
    "font-src 'self'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
    "form-action 'self'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
))  # fmt: skip
"""Only what the server itself serves runs or is shown. Pictures of a box are shown from memory. The last two have the
browser refuse to make HTML of text, whatever a script tries."""
_PAGE = "index.html"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_FOR_EVER = "public, max-age=31536000, immutable"


class _Asset(NamedTuple):
    content: bytes
    packed: bytes
    type: str


def routes() -> list[BaseRoute]:
    """The routes of the page. They need no token: there is nothing in these files but what is in the package."""
    return [Route("/", _page, methods=["GET"]), Route("/assets/{name}", _asset, methods=["GET"])]


@cache
def _assets() -> dict[str, _Asset]:
    found = {}
    for path in sorted(STATIC.iterdir()):
        if path.suffix in _TYPES:
            content = path.read_bytes()
            found[path.name] = _Asset(content, gzip.compress(content, mtime=0), _TYPES[path.suffix])
    return found


async def _page(request: Request) -> Response:
    """The page itself, asked for anew each time, as it names the files of its version."""
    headers = {
        "content-security-policy": POLICY,
        "cache-control": "no-cache",
        "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    }
    return _answer(request, _PAGE, headers)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name == _PAGE or name not in _assets():
        raise HTTPException(404)
    return _answer(request, name, {"cache-control": _FOR_EVER if "-" in name else "no-cache"})


def _answer(request: Request, name: str, headers: dict[str, str]) -> Response:
    found = _assets()[name]
    headers["vary"] = "accept-encoding"
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        return Response(found.packed, headers=headers, media_type=found.type)
    return Response(found.content, headers=headers, media_type=found.type)
