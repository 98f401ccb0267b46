"""Ports of sandboxes in a browser: what goes through, and what does not."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from surfaces.server.ports_world import Box, boxed, statuses

from skerry.surfaces.ports import proxy
from skerry.surfaces.ports.exchange import Limits

TOKEN = "skerry_0123456789ab_" + "a" * 43 + "_00000000"


@pytest.fixture
async def box(folder: Path) -> AsyncIterator[Box]:
    async with boxed(folder) as box:
        yield box


def headers_of(seen: dict[str, Any]) -> dict[str, str]:
    return {name.lower(): value for name, value in seen["headers"]}


async def test_a_link_opens_a_port_and_becomes_a_cookie_that_stays_out_of_the_box(box: Box) -> None:
    port = await box.mirror()
    browser = await box.browser()
    first = await browser.get(await box.link(port), follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/")
    cookie = first.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= set(cookie.split("; "))
    assert "Domain" not in cookie
    given = {"cookie": f"a=1; {cookie.split(';')[0]}; own=2"}
    seen = (await browser.get(f"http://{box.host(port)}/a%2Fb//c?x=1&y=%26", headers=given)).json()
    assert (seen["method"], seen["path"]) == ("GET", "/a%2Fb//c?x=1&y=%26")
    assert headers_of(seen)["cookie"] == "a=1; own=2"
    assert "skerry" not in str(seen)


@pytest.mark.parametrize("size", [0, 5, 3_000_000])
async def test_bodies_of_any_length_come_through_whole(box: Box, size: int) -> None:
    browser = await box.opened(await box.mirror())
    data = b"abcde" * (size // 5)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 100_000):
            yield data[at : at + 100_000]

    for content in (data, chunks()):
        seen = (await browser.post("/", content=content)).json()
        assert (seen["size"], seen["digest"]) == (size, hashlib.sha256(data).hexdigest())


async def test_nothing_of_the_api_reaches_the_box_and_all_of_the_app_does(box: Box) -> None:
    port = await box.mirror()
    browser = await box.opened(port)
    basic = base64.b64encode(f"user:{TOKEN}".encode()).decode()
    for secret in (f"Bearer {TOKEN}", f"bearer  {TOKEN.upper()}", f"Basic {basic}"):
        sent = {"authorization": secret, "x-api-key": TOKEN, "referer": "http://x/?skerry-link=secret"}
        seen = headers_of((await browser.get("/", headers=sent)).json())
        assert not {"authorization", "x-api-key", "referer"} & seen.keys()
    for own in ("Bearer eyJhbGciOi", "Basic dXNlcjpwYXNz", "Basic ?", "Digest a=b"):
        assert headers_of((await browser.get("/", headers={"authorization": own})).json())["authorization"] == own
    sent = {"cookie": f"x=y; __Host-skerry-port=1; a={TOKEN}; SKERRY-port=2; {await box.cookie(port)}; z=1"}
    assert headers_of((await browser.get("/", headers=sent)).json())["cookie"] == "x=y; z=1"
    assert (await browser.get("/?a=1&skerry%2Dlink=x", follow_redirects=False)).status_code == 401


async def test_what_clients_say_of_proxies_is_replaced(box: Box) -> None:
    port = await box.mirror()
    browser = await box.opened(port)
    lies = {
        "x-forwarded-for": "1.2.3.4", "x-forwarded-prefix": "/x", "x_forwarded_for": "1.2.3.4", "forwarded": "for=9",
        "via": "1.0 x", "x-real-ip": "1.2.3.4", "te": "trailers", "proxy-authorization": "x", "keep-alive": "1",
        "connection": "x-mine", "x-mine": "1", "x-other": "2", "expect": "x",
    }  # fmt: skip
    seen = headers_of((await browser.get("/", headers=lies)).json())
    assert seen["x-forwarded-for"] == "127.0.0.1"
    assert seen["x-forwarded-proto"] == "http"
    assert seen["x-forwarded-host"] == seen["host"] == box.host(port)
    assert (seen["x-other"], seen["connection"]) == ("2", "close")
    assert not {"x-forwarded-prefix", "x_forwarded_for", "forwarded", "via", "x-real-ip", "te", "x-mine"} & seen.keys()
    assert not {"proxy-authorization", "keep-alive", "expect", "sec-websocket-key", "upgrade"} & seen.keys()


async def test_an_app_says_nothing_of_other_hosts(box: Box) -> None:
    lines = [
        "Set-Cookie: a=1; Domain=localhost; Path=/",
        "Set-Cookie: b=2;domain =\t.localhost ; Secure",
        "Set-Cookie: skerry-port=stolen",
        "Set-Cookie: __Host-skerry-port=stolen; Secure; Path=/",
        "Strict-Transport-Security: max-age=1; includeSubDomains",
        'Clear-Site-Data: "*"',
        'Alt-Svc: h3=":1"',
        "X-Accel-Redirect: /etc/passwd",
        "Connection: close, X-Hop",
        "X-Hop: 1",
        "X-Mine: 2",
        "Content-Security-Policy: default-src *",
        "Content-Length: 2",
    ]
    browser = await box.opened(await box.says("\r\n".join(["HTTP/1.1 200 OK", *lines, "", "ok"]).encode()))
    answer = await browser.get("/")
    assert answer.text == "ok"
    assert answer.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2; Secure"]
    assert (answer.headers["x-mine"], answer.headers["content-security-policy"]) == ("2", "default-src *")
    dropped = {"strict-transport-security", "clear-site-data", "alt-svc", "x-accel-redirect", "x-hop"}
    assert not dropped & set(answer.headers)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhithere", "hi"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhi\r\n1\r\n!\r\n0\r\nX: y\r\n\r\nrest", "hi!"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", "to the end"),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200\r\n\r\nlate",
            "late",
        ),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", ""),
        (b"HTTP/1.1 204 No Content\r\nContent-Length: 9\r\n\r\nxxx", ""),
        (b"HTTP/1.1 599 Own\r\nContent-Length: 1\r\n\r\nx", "x"),
    ],
)
async def test_an_answer_is_read_as_http_says(box: Box, said: bytes, text: str) -> None:
    browser = await box.opened(await box.says(said))
    answer = await browser.get("/")
    assert (answer.status_code, answer.text) == (int(said.rpartition(b"HTTP/1.")[2][2:5]), text)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX y: z\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX : z\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\n\r\n",
        b"HTTP/1.1 200 OK\nX: a\n\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a\rDomain=x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"HTTP/1.1 099 No\r\n\r\n",
        b"HTTP/1.1 999 No\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.0\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(200)) + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100 + b"HTTP/1.1 200 OK\r\n\r\n",
    ],
    ids=lambda said: said[:40].decode("latin-1").encode("unicode_escape").decode(),
)
async def test_an_answer_that_could_be_read_in_two_ways_is_none(box: Box, said: bytes) -> None:
    browser = await box.opened(await box.says(said))
    answer = await browser.get("/")
    assert answer.status_code == 502
    assert answer.headers["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nonly this",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello world\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\nhello\n0\n\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_is_never_taken_for_a_whole_one(box: Box, said: bytes) -> None:
    browser = await box.opened(await box.says(said))
    with pytest.raises(httpx.RemoteProtocolError):
        await browser.get("/")
    await box.is_quiet()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nX: "])
async def test_an_app_that_does_not_answer_in_time_is_given_up(box: Box, said: bytes) -> None:
    box.served.server.ports.limits = Limits(answer_s=0.2, head_s=0.2)
    browser = await box.opened(await box.says(said, hold=True))
    assert (await browser.get("/")).status_code == 504


async def test_an_app_that_stops_in_the_middle_is_given_up(box: Box) -> None:
    box.served.server.ports.limits = Limits(idle_s=0.2)
    browser = await box.opened(await box.says(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", hold=True))
    with pytest.raises(httpx.RemoteProtocolError):
        await browser.get("/")


async def test_events_come_as_they_are_sent_and_end_with_their_reader(box: Box) -> None:
    said = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n"
    browser = await box.opened(await box.says(said, hold=True))
    async with browser.stream("GET", "/") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert await anext(answer.aiter_bytes()) == b"data: 1\n\n"
        assert box.connections() == 1
    await box.is_quiet()


@pytest.mark.parametrize("how", ["withdrawn", "expired"])
async def test_an_answer_that_lasts_is_cut_when_its_link_ends(
    box: Box, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(proxy, "LOOK_S", 0.05)
    links = box.served.server.ports.links
    port = await box.says(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n", hold=True)
    browser = await box.opened(port)
    async with browser.stream("GET", "/") as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == b"data: 1\n\n"
        if how == "withdrawn":
            assert (await box.api.delete(f"{box.path}/{port}/link")).status_code == 204
        else:
            links._kept.clear()
            for each in await links._read(box.id):
                expired = msgspec.structs.replace(each, expires_at=1.0)
                await links._links.replace(f"{box.id}:{each.id}", expired)
        async with asyncio.timeout(20):
            with pytest.raises(httpx.TransportError):
                await anext(pieces)
    await box.is_quiet()


async def test_a_reader_that_is_slow_has_the_app_wait(box: Box) -> None:
    browser = await box.opened(await box.says(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 65536, times=1600))
    async with browser.stream("GET", "/") as answer:
        size, chunks = 0, answer.aiter_bytes()
        size += len(await anext(chunks))
        async for chunk in chunks:
            size += len(chunk)
    assert size > 100 << 20


async def test_connections_of_a_sandbox_are_bounded(box: Box) -> None:
    port = await box.says(b"HTTP/1.1 200 OK\r\n\r\nx", hold=True)
    browser = await box.opened(port)
    box.bound(max_calls=1)
    async with browser.stream("GET", "/"):
        answer = await browser.get("/")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        assert (await box.api.get(box.path)).status_code == 200  # only the ports are asked too much
    await box.is_quiet()
    async with browser.stream("GET", "/") as again:
        assert again.status_code == 200


async def test_how_often_ports_of_a_sandbox_are_asked_is_bounded(box: Box) -> None:
    port = await box.mirror()
    browsers = [await box.opened(port) for _ in range(2)]
    box.bound(rate=2)
    codes = [(await browsers[turn % 2].get("/")).status_code for turn in range(4)]
    assert codes == [200] * 4
    for browser in browsers:
        answer = await browser.get("/")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert (await box.api.get(box.path)).status_code == 200
    assert 'skerry_refused_total{why="rate"} 2' in box.served.server.metrics.text([])


async def test_a_client_may_ask_whether_to_send_its_body(box: Box) -> None:
    port = await box.mirror()
    cookie = await box.cookie(port)
    head = f"POST / HTTP/1.1\r\nHost: {box.host(port)}\r\nCookie: {cookie}\r\nExpect: 100-continue\r\n"
    answer = await box.raw(f"{head}Connection: close\r\nContent-Length: 2\r\n\r\nhi".encode())
    assert statuses(answer) == [100, 200]
    assert b'"size": 2' in answer


async def test_answers_of_any_method_are_framed_rightly_one_after_the_other(box: Box) -> None:
    browser = await box.opened(await box.mirror())
    for method in ("HEAD", "GET", "OPTIONS", "DELETE", "PATCH", "HEAD", "PUT"):
        answer = await browser.request(method, "/", headers={"origin": str(browser.base_url).rstrip("/")})
        assert answer.status_code == 200
        assert int(answer.headers["content-length"]) > 0
        assert method == "HEAD" or answer.json()["method"] == method


async def test_an_app_may_answer_before_it_has_the_whole_body(box: Box) -> None:
    port = await box.says(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno", hold=True)
    cookie = await box.cookie(port)
    head = f"POST / HTTP/1.1\r\nHost: {box.host(port)}\r\nCookie: {cookie}\r\nContent-Length: 9000000\r\n\r\n"
    answer = await box.raw(head.encode() + b"x" * 1_000_000)
    assert statuses(answer) == [413]
    assert answer.endswith(b"no")


async def test_a_port_where_nothing_listens_says_so(box: Box) -> None:
    browser = await box.opened(1)
    answer = await browser.get("/")
    assert answer.status_code == 502
    assert "Nothing answers" in answer.text


async def test_a_port_of_a_sandbox_that_has_ended_is_gone(box: Box) -> None:
    browser = await box.opened(await box.mirror())
    assert (await browser.get("/")).status_code == 200
    await box.served.server.manager.destroy(box.id, grace_s=0)
    assert (await browser.get("/")).status_code == 410


async def test_the_first_use_of_a_link_is_in_the_ledger_and_no_other(box: Box) -> None:
    port = await box.mirror()
    browser = await box.opened(port)
    for _ in range(3):
        assert (await browser.get("/")).status_code == 200
    lines = [line async for line in box.served.server.manager.ledger.show() if line.sandbox == box.id]
    made = next(line for line in lines if line.kind == "link")
    (used,) = [line for line in lines if line.kind == "port"]
    assert made.who.actor.startswith("token:")
    assert (used.who.actor, used.who.tenant) == (f"link:{used.facts['link']}", "acme")
    assert (used.facts["port"], used.facts["public"], used.facts["client"]) == (port, False, "127.0.0.1")
