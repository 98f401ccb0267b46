"""Requests as bytes: what could be read in more than one way is refused, and nothing after it is read."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from surfaces.server.ports_world import raw, statuses
from surfaces.server.world import Served
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from skerry.surfaces.server.strict import StrictProtocol

HIDDEN = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
"""A request that is to be seen as the body of another."""

REFUSED = {
    "length beside coding": f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    f"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
    "coding beside length": f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    f"Content-Length: 5\r\n\r\n0\r\n\r\n{HIDDEN}",
    "two lengths": f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\n{HIDDEN}",
    "two like lengths": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nContent-Length: 0\r\n\r\n",
    "a list of lengths": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0, 0\r\n\r\n",
    "a length with a sign": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: +5\r\n\r\nhello",
    "a length in hex": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0x5\r\n\r\nhello",
    "a length without end": f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: {'9' * 40}\r\n\r\n",
    "an unknown coding": f"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n{HIDDEN}",
    "two codings": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    "Transfer-Encoding: identity\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": "POST /v1/x HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": "POST /v1/x HTTP/1.1\r\nHost: localhost\r\nContent-Length : 5\r\n\r\nhello",
    "bare line feeds": "GET /healthz HTTP/1.1\nHost: localhost\n\n",
    "a bare line feed": "GET /healthz HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n",
    "a bare return": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\rY: b\r\n\r\n",
    "a folded line": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\r\n b\r\n\r\n",
    "a folded host": "GET /healthz HTTP/1.1\r\nHost:\r\n localhost\r\n\r\n",
    "a name with a space": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX Y: a\r\n\r\n",
    "a header without a name": "GET /healthz HTTP/1.1\r\nHost: localhost\r\n: a\r\n\r\n",
    "a zero byte": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\0b\r\n\r\n",
    "a control byte": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: a\x01b\r\n\r\n",
    "a target with a host": "GET http://localhost/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target with another host": "GET http://evil.test/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target that is a host": "CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target that is a star": "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target that is no text": "GET /\xe9 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a target with a space": "GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no host": "GET /healthz HTTP/1.1\r\nX: y\r\n\r\n",
    "two hosts": "GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    "no version": "GET /healthz\r\n\r\n",
    "another version": "GET /healthz HTTP/2.0\r\nHost: localhost\r\n\r\n",
    "a version of its own": "GET /healthz HTTP/1.9\r\nHost: localhost\r\n\r\n",
    "an unknown method": "G@T /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no HTTP": "\x16\x03\x01\x02\x00\x01\x00",
    "too many headers": "GET /healthz HTTP/1.1\r\nHost: localhost\r\n" + "X: y\r\n" * 200 + "\r\n",
    "a WebSocket with a body": "GET /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\nContent-Length: 9\r\n\r\n{HIDDEN}",
}


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED.keys())
async def test_a_request_that_could_be_read_in_two_ways_is_refused(served: Served, request_: str) -> None:
    answer = await raw(served, request_.encode("latin-1"))
    assert statuses(answer) == [400]
    assert b"connection: close" in answer.lower()


@pytest.mark.parametrize(
    "body", ["x\r\n", "-1\r\nx\r\n", "5\r\nhello!\r\n0\r\n\r\n", "1\nx\n0\n\n", "1 \r\nx\r\n", f"{'f' * 20}\r\nx"]
)
async def test_chunks_that_are_none_end_the_connection(served: Served, body: str) -> None:
    token = await served.token("acme")
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    head += "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = await raw(served, f"{head}{body}{HIDDEN}".encode())
    assert statuses(answer) in ([], [400])
    assert await (await served.client("acme")).get("/v1/sandboxes")


async def test_trailers_are_no_headers(served: Served) -> None:
    token = await served.token("acme")
    head = "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    answer = await raw(served, f"{head}Authorization: Bearer {token}\r\nHost: evil.test\r\n\r\n".encode())
    assert statuses(answer) == [401]


@pytest.mark.parametrize("size", [40_000, 1_000_000])
@pytest.mark.parametrize("begin", ["GET /", "GET / HTTP/1.1\r\nHost: localhost\r\nX: ", "GET / HTTP/1.1\r\nX"])
async def test_a_head_that_is_too_large_is_refused(served: Served, begin: str, size: int) -> None:
    answer = await raw(served, f"{begin}{'x' * size}".encode())
    assert statuses(answer) in ([431], [])  # a client that still writes may lose the answer


async def test_requests_are_answered_one_at_a_time(served: Served) -> None:
    call = f"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {await served.token()}\r\n\r\n"
    answer = await raw(served, f"{call}{call}".encode())
    assert statuses(answer) in ([], [200], [400])


async def test_one_request_after_the_other_is_served_on_one_connection(served: Served) -> None:
    call = f"GET /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {await served.token()}\r\n\r\n"
    address = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        for _ in range(3):
            writer.write(call.encode())
            async with asyncio.timeout(20):
                head = await reader.readuntil(b"\r\n\r\n")
                assert statuses(head) == [200]
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                await reader.readexactly(length)
    finally:
        writer.close()


async def test_an_answer_does_not_wait_for_the_client_to_acknowledge_its_head(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = []
    served_before = StrictProtocol.on_headers_complete

    def look(protocol: Any) -> None:
        own = protocol.transport.get_extra_info("socket")
        at_once.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        served_before(protocol)

    monkeypatch.setattr(StrictProtocol, "on_headers_complete", look)
    assert (await (await served.anonymous()).get("/healthz")).status_code == 200
    assert at_once == [1]


async def test_who_has_all_of_an_answer_may_ask_again_before_its_maker_has_said_that_it_ends(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, began, asked = RequestResponseCycle.send, StrictProtocol.on_message_begin, asyncio.Event()

    async def send(cycle: Any, message: Any) -> None:
        if message["type"] == "http.response.body" and not asked.is_set():
            await made(cycle, {**message, "more_body": True})
            await asked.wait()
            message = {"type": "http.response.body", "body": b""}
        await made(cycle, message)

    def begin(protocol: Any) -> None:
        if protocol.cycle is not None:
            asked.set()
        began(protocol)

    monkeypatch.setattr(RequestResponseCycle, "send", send)
    monkeypatch.setattr(StrictProtocol, "on_message_begin", begin)
    client = await served.anonymous(limits=httpx.Limits(max_connections=1))
    for _ in range(2):
        assert (await client.get("/healthz")).text == "ok\n"
    assert asked.is_set()
