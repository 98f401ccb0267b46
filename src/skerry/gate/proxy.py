"""HTTP on its way out of a box: requests on connections to a host, of which each has to mean that host, and requests to
the proxy, which name the host that they are for."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from typing import Protocol

from skerry.aio import end
from skerry.gate.base import Duplex, Refused, Unreachable
from skerry.gate.decide import shown
from skerry.gate.http1 import Malformed, Reader, Request, Slow, answer_error, authority_of, exchange, parse_request

_HTTP_PORT = 80
_CONNECTED = b"HTTP/1.1 200 Connection established\r\n\r\n"


Join = Callable[[Duplex], Awaitable[None]]
"""Join a client with the host that was decided on, until both have ended."""


class Ways(Protocol):
    """What the proxy needs of whoever decides and dials."""

    async def open(self, host: str, port: int) -> Join:
        """Decide on a host, and connect to it. Raises Refused."""

    async def ask(self, host: str, port: int, request: Request, client: Reader) -> None:
        """Send one request to a host, and its answer back. Raises Refused."""


async def serve_proxy(client: Duplex, ways: Ways, timeout_s: float) -> None:
    """Serve one request to the proxy: a tunnel, or a request that names its host. What follows a request is not looked
    at. Raises Refused, of which the client was told unless it has a tunnel by then."""
    reader = Reader(client)
    request: Request | None = None
    try:
        request = await _first_request(reader, timeout_s)
        if request is None:
            return
        if request.method != "CONNECT":
            host, port, target = absolute(request)
            request.send_to(target)
            request.forward_once(_host_header(host, port))
            await ways.ask(host, port, request, reader)
            return
        host, asked_port = authority_of(request.target)
        if asked_port is None or request.body.length or request.body.is_chunked:
            raise Malformed("CONNECT has a host and a port, and no body")
        join = await ways.open(host, asked_port)
    except Refused as error:
        if request is None or not request.is_answered:
            await answer_error(client, error)
        raise
    await client.write(_CONNECTED)
    await join(reader.rest())


async def _first_request(reader: Reader, timeout_s: float) -> Request | None:
    try:
        async with asyncio.timeout(timeout_s):
            head = await reader.head(None)
    except TimeoutError:
        raise Slow(f"no request came in {timeout_s:g} s") from None
    return None if head is None else parse_request(head)


async def serve_requests(host: str, port: int, client: Reader, server: Reader, timeout_s: float) -> None:
    """Serve the requests of a connection that is to one host, one after the other. Raises Refused for one that means
    another, once the client was told of it."""
    can_follow, count = True, 0
    try:
        while can_follow and (head := await _next_head(client, server, timeout_s)) is not None:
            count += 1
            request = parse_request(head)
            check_host(request, host, port)
            request.stay()
            can_follow = await exchange(request, client, server)
    except Refused as error:
        if isinstance(error, Unreachable) and count > 1:  # a server may end what is idle: a client asks it anew
            raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from error
        await answer_error(client.source, error)
        raise


async def _next_head(client: Reader, server: Reader, timeout_s: float) -> bytes | None:
    """The head of the next request; None if there is none, or the server has ended meanwhile. Raises Malformed."""
    coming, ended = asyncio.create_task(client.head(timeout_s)), server.look_ahead()
    try:
        await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
        return coming.result() if coming.done() else None
    finally:
        await end(coming)


def check_host(request: Request, host: str, port: int) -> None:
    """Raise Refused for a request that means another host than its connection is to."""
    names = request.all("host")
    if not names:
        raise Refused(f"the request names no host; it has to name {host}")
    meant = [names[0]]
    if not request.target.startswith("/") and (request.method, request.target) != ("OPTIONS", "*"):
        meant.append(_split(request.target)[0])
    for each in meant:
        found, found_port = authority_of(each)
        if found != host or found_port not in (None, port):
            raise Refused(f"the request is for {shown(each)}, and {host} was asked for")


def absolute(request: Request) -> tuple[str, int, str]:
    """Host, port and path of a request to the proxy. Raises Malformed or Refused."""
    authority, path = _split(request.target)
    host, port = authority_of(authority)
    for name in request.all("host"):
        if authority_of(name) not in ((host, port), (host, port or _HTTP_PORT)):
            raise Refused(f"the request is for {shown(authority)}, and its header says {shown(name)}")
    return host, port or _HTTP_PORT, path


def _split(target: str) -> tuple[str, str]:
    """Authority and path of a target. Raises Malformed."""
    scheme, found, rest = target.partition("://")
    if not found or scheme.lower() != "http":
        raise Malformed(f"{shown(target)!r}: the proxy takes http://HOST/PATH, and CONNECT for all else")
    ends = [at for at in map(rest.find, "/?#") if at >= 0]
    authority, path = rest[: min(ends, default=len(rest))], rest[min(ends, default=len(rest)) :]
    if "#" in path:
        raise Malformed("a target without a fragment")
    return authority, path if path.startswith("/") else f"/{path}"


def _host_header(host: str, port: int) -> str:
    shown_host = f"[{host}]" if ":" in host else host
    return shown_host if port == _HTTP_PORT else f"{shown_host}:{port}"
