"""HTTP through the gate: the proxy, and requests on connections to a host."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loopback import served

from skerry.gate.base import Refused
from skerry.gate.dialer import Dialer
from skerry.gate.http1 import MAX_HEAD, Malformed, Reader, authority_of, parse_request
from skerry.gate.proxy import absolute, check_host

from .box import PATIENCE_S, Rerouted, Sandbox, Web, policy, serving
from .test_dialer import hanging

ALLOW = ("a.test", "*.wild.test", "a.test:8080", "127.0.0.1", "127.0.0.1:8080")


async def ask_proxy(sandbox: Sandbox, request: bytes) -> bytes:
    client = await sandbox.box.proxy()
    return await client.ask(request)


async def test_a_request_to_the_proxy_reaches_its_host_in_the_form_for_servers() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        answer = await ask_proxy(
            sandbox,
            b"POST http://A.TEST.:8080?q=1 HTTP/1.1\r\nHost: a.test:8080\r\nProxy-Connection: keep-alive\r\n"
            b"Proxy-Authorization: Basic eA==\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nX-Kept: 2\r\n"
            b"Content-Length: 3\r\n\r\nabcGET http://evil.test/ HTTP/1.1\r\n\r\n",
        )
        assert answer.endswith(b"\r\n\r\nhello")
        assert web.heads == [
            b"POST /?q=1 HTTP/1.1\r\nHost: a.test:8080\r\nX-Kept: 2\r\nContent-Length: 3\r\nConnection: close\r\n\r\n"
        ]
        assert web.bodies == [b"abc"]
        (closed,) = await sandbox.ledger.wait("close")
        (connected,) = sandbox.ledger.of("connect")
        assert connected == {
            "kind": "connect", "name": "a.test", "port": 8080, "address": "127.0.0.1", "rule": "a.test:8080",
        }  # fmt: skip
        assert (closed["up"], closed["down"]) == (len(web.heads[0]) + 3, len(answer))


async def test_a_tunnel_carries_what_it_is_given_once_it_stands() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.proxy()
        await client.send(
            b"CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
        )
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert (await client.until(b"hello")).startswith(b"HTTP/1.1 200 OK")
        await client.send(b"GET /2 HTTP/1.1\r\nHost: evil.test\r\n\r\n")
        assert b"403 Forbidden" in await client.rest()
        assert "the request is for evil.test, and a.test was asked for" in sandbox.ledger.reasons()
        assert len(web.heads) == 1


REFUSED = {
    "http://evil.test/": "no rule allows evil.test on port 80",
    "http://wild.test/": "no rule allows wild.test",
    "http://a.test.evil.test/": "no rule allows",
    "http://a.test:81/": "no rule allows a.test on port 81",
    "http://xa.test/": "no rule allows",
    "http://127.1/": "no host name",
    "http://127.0.0.1./": "no host name",
    "http://0x7f000001/": "no host name",
    "http://0x7f.1/": "no host name",
    "http://2130706433/": "no host name",
    "http://017700000001/": "no host name",
    "http://0177.0.0.1/": "no host name",
    "http://127.0.0.2/": "no rule allows 127.0.0.2",
    "http://[::1]/": "no rule allows ::1",
    "http://[::ffff:127.0.0.2]/": "no rule allows 127.0.0.2",
    "http://169.254.169.254/latest/meta-data/": "no rule allows 169.254.169.254",
}
MALFORMED = [
    "http://a.test@evil.test/", "http://evil.test@a.test/", "http://a.test:80@evil.test:80/", "http://a.test%00/",
    "http://a.test%2eevil.test/", "http://a.test\\@evil.test/", "http://[::1%25lo]/", "http://[127.0.0.1]/", "http:///",
    "http://a.test:0/", "http://a.test:99999/", "http://a.test:+80/", "https://a.test/", "ftp://a.test/", "/", "*",
    "a.test:80", "http://a.test/#x", "http://b\xfccher.test/", "http:a.test", "//a.test/",
]  # fmt: skip


@pytest.mark.parametrize("target", REFUSED)
async def test_the_proxy_refuses_what_no_rule_allows_and_tells_why(target: str) -> None:
    async with serving(policy(ALLOW)) as sandbox:
        host = target.partition("://")[2].partition("/")[0]
        answer = await ask_proxy(sandbox, f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain")
        assert REFUSED[target].encode() in answer
        (line,) = await sandbox.ledger.wait("refuse")
        assert REFUSED[target] in line["reason"]
        host = host if ":" in host.strip("[]:") and "[" in host else host.partition(":")[0]
        tunnel = f"CONNECT {target.partition('://')[2].partition('/')[0]}"
        tunnel = tunnel if ":8" in tunnel else f"{tunnel}:80"
        answer = await ask_proxy(sandbox, f"{tunnel} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n")
        assert REFUSED[target].encode() in answer


@pytest.mark.parametrize("target", MALFORMED)
async def test_the_proxy_refuses_targets_that_can_be_read_in_two_ways(target: str) -> None:
    async with serving(policy(ALLOW)) as sandbox:
        answer = await ask_proxy(sandbox, f"GET {target} HTTP/1.1\r\nHost: a.test\r\n\r\n".encode("latin-1"))
        assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 403 "))
        await sandbox.ledger.wait("refuse")
        assert not sandbox.ledger.of("connect")


HEADS = {
    "CL and TE": b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    "two CL": b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\n",
    "CL list": b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 3, 3\r\n\r\n",
    "CL sign": b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: +3\r\n\r\n",
    "CL space": b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length : 3\r\n\r\n",
    "TE twice": b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
    "TE other": b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: xchunked\r\n\r\n",
    "TE list": b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
    "TE in 1.0": b"POST / HTTP/1.0\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n",
    "bare LF": b"GET / HTTP/1.1\nHost: a.test\r\n\r\n",
    "bare LF in a header": b"GET / HTTP/1.1\r\nHost: a.test\r\nX: 1\nHost: evil.test\r\n\r\n",
    "bare CR": b"GET / HTTP/1.1\r\nHost: a.test\r\nX: 1\rHost: evil.test\r\n\r\n",
    "NUL": b"GET / HTTP/1.1\r\nHost: a.test\r\nX: \x00\r\n\r\n",
    "fold": b"GET / HTTP/1.1\r\nHost: a.test\r\nX: 1\r\n Host: evil.test\r\n\r\n",
    "fold of the first": b"GET / HTTP/1.1\r\n Host: evil.test\r\nHost: a.test\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nHost: a.test\r\nHost: evil.test\r\n\r\n",
    "spaces": b"GET  / HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "tab": b"GET\t/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "version": b"GET / HTTP/1.2\r\nHost: a.test\r\n\r\n",
    "lower case": b"GET / http/1.1\r\nHost: a.test\r\n\r\n",
    "empty line before": b"\r\nGET / HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "no name": b"GET / HTTP/1.1\r\nHost: a.test\r\n: x\r\n\r\n",
    "dropped host": b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: host\r\n\r\n",
    "dropped length": b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1\r\nConnection: content-length\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: a.test\r\n" + b"X: 1\r\n" * 100 + b"\r\n",
    "long": b"GET / HTTP/1.1\r\nHost: a.test\r\nX: " + b"x" * MAX_HEAD + b"\r\n\r\n",
}
HEADS_OF_SERVERS = {
    "tunnel": b"CONNECT evil.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "userinfo": b"GET / HTTP/1.1\r\nHost: a.test@evil.test\r\n\r\n",
    "list of hosts": b"GET / HTTP/1.1\r\nHost: a.test, evil.test\r\n\r\n",
}
OTHERS = {
    "other host": b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
    "other port": b"GET / HTTP/1.1\r\nHost: a.test:81\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "no host in 1.0": b"GET / HTTP/1.0\r\n\r\n",
    "absolute": b"GET http://evil.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
    "absolute and host": b"GET http://a.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
}


@pytest.mark.parametrize("case", [*HEADS, *HEADS_OF_SERVERS, *OTHERS])
async def test_a_connection_sends_on_no_request_that_could_mean_another_host(case: str) -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        answer = await client.ask((HEADS | HEADS_OF_SERVERS | OTHERS)[case])
        assert answer.startswith(b"HTTP/1.1 403 " if case in OTHERS else b"HTTP/1.1 400 ")
        (line,) = await sandbox.ledger.wait("refuse")
        assert (line["name"], line["port"]) == ("a.test", 80)
        assert web.heads == []


@pytest.mark.parametrize("case", HEADS)
async def test_the_proxy_sends_on_no_request_that_can_be_read_in_two_ways(case: str) -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        answer = await ask_proxy(sandbox, HEADS[case].replace(b"/ ", b"http://a.test/ ", 1))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        await sandbox.ledger.wait("refuse")
        assert web.heads == []


@pytest.mark.parametrize("spelling", ["a.test", "A.Test", "a.test.", "a.test:80", "A.TEST.:80"])
async def test_a_request_may_spell_its_host_as_it_likes(spelling: str) -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(f"GET / HTTP/1.1\r\nHost: {spelling}\r\n\r\n".encode())
        assert (await client.until(b"hello")).startswith(b"HTTP/1.1 200 OK")


async def test_requests_on_one_connection_are_judged_one_by_one() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        good = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
        body = (
            b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nX-T: 1\r\n\r\n"
        )
        await client.send(
            good + body.replace(b"X-T: 1\r\n", b"") + good + b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n" + good
        )
        answer = await client.rest()
        assert answer.count(b"hello") == 3
        assert answer.count(b"403 Forbidden") == 1
        assert len(web.heads) == 3
        assert web.bodies[1] == b"3;x=y\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [b"3\nabc\r\n0\r\n\r\n", b"-1\r\n", b"\r\n", b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"0x3\r\nabc\r\n",
     b"ffffffffffffffff1\r\n", b"3;a\rb\r\nabc\r\n", b"3\r\nabc\n0\r\n\r\n", b"0\r\nbad trailer\r\n\r\n", b"3 " * 3000],
)  # fmt: skip
async def test_a_body_whose_end_is_not_clear_ends_the_connection(body: bytes) -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        answer = await client.ask(b"POST / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert answer.startswith(b"HTTP/1.1 400 ")
        await sandbox.ledger.wait("refuse")
        assert web.bodies == []


async def test_an_answer_before_the_whole_request_is_passed_on_and_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("skerry.gate.http1.LINGER_S", 0.05)

    async def impatient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await reader.read()

    async with served(impatient) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000\r\n\r\nabc")
        assert await client.rest() == b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n"


async def test_a_client_that_waits_for_the_servers_word_gets_it() -> None:
    async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert await reader.readexactly(3) == b"abc"
        writer.write(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async with served(patient) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(b"PUT / HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n")
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await client.send(b"abc")
        assert (await client.rest()).startswith(b"HTTP/1.1 204 ")


UPGRADE = b"GET / HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade%b\r\nUpgrade: %b\r\n\r\n"


async def test_a_websocket_is_carried_as_it_is_once_the_server_agrees() -> None:
    async def agree(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
        writer.write(await reader.readexactly(4))
        await writer.drain()

    async with served(agree) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(UPGRADE % (b"", b"websocket"))
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        await client.send(b"\x81\x02hi")
        assert await client.rest() == b"\x81\x02hi"


async def test_a_server_that_does_not_agree_leaves_no_way_around_the_rules() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        answer = await client.ask(UPGRADE % (b"", b"websocket") + b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
        assert answer.count(b"hello") == 1
        assert b"403 Forbidden" in answer
        assert len(web.heads) == 1


async def test_no_other_protocol_is_asked_for() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(UPGRADE % (b", HTTP2-Settings\r\nHTTP2-Settings: x", b"h2c"))
        await client.until(b"hello")
        assert web.heads == [b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"]


@pytest.mark.parametrize(
    "answer", [b"nonsense\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
               b"HTTP/1.1 101 Switching Protocols\r\n\r\n", b"HTTP/1.1 200 OK\n\n"],
)  # fmt: skip
async def test_a_server_that_speaks_no_http_is_a_bad_gateway(answer: bytes) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.write_eof()
        await reader.read()

    async with served(nonsense) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        got = await ask_proxy(sandbox, b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")


async def test_a_server_that_never_comes_to_its_answer_is_left() -> None:
    is_left = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
                await writer.drain()
        is_left.set()

    async with served(endless) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n")
        await sandbox.ledger.wait("close")
        async with asyncio.timeout(PATIENCE_S):
            await is_left.wait()


async def test_a_host_that_cannot_be_reached_is_a_bad_gateway() -> None:
    async with serving(policy(ALLOW)) as sandbox:
        got = await ask_proxy(sandbox, b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert b"a.test cannot be resolved" in got
        await sandbox.ledger.wait("refuse")


async def test_a_host_that_takes_too_long_is_a_gateway_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.gate.dialer._LOOKUP_S", 0.05)
    async with hanging() as look_up, serving(policy(ALLOW), dialer=Dialer(look_up)) as sandbox:
        got = await ask_proxy(sandbox, b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")
        await sandbox.ledger.wait("refuse")


async def test_a_head_that_comes_byte_by_byte_is_read_as_one() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        head = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"
        for byte in head:
            await client.send(bytes([byte]))
        await client.until(b"hello")
        assert web.heads == [head]


def test_an_authority_has_a_host_and_may_have_a_port() -> None:
    assert authority_of("A.test.:80") == ("a.test", 80)
    assert authority_of("[::FFFF:10.0.0.1]:443") == ("10.0.0.1", 443)
    assert authority_of("[2001:db8:0::1]") == ("2001:db8::1", None)


@given(st.binary(max_size=400))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    for head in (data, b"GET / HTTP/1.1\r\n" + data, b"GET http://" + data + b" HTTP/1.1\r\nHost: a\r\n\r\n"):
        try:
            request = parse_request(head + b"\r\n\r\n")
            check_host(request, "a", 80)
            absolute(request)
        except Refused:
            pass


@given(st.text(alphabet="a.test@:/\\%[]#?0127 \t", max_size=40))
def test_a_target_means_the_host_that_a_strict_reader_finds(text: str) -> None:
    from urllib.parse import urlsplit

    try:
        request = parse_request(f"GET http://{text} HTTP/1.1\r\n\r\n".encode())
        host, port, path = absolute(request)
    except Refused:
        return
    found = urlsplit(f"http://{text}")
    assert (found.hostname or "").removesuffix(".") == host
    assert (found.port or 80) == port
    assert path.startswith("/")


class Pieces:
    """A connection from which a test's bytes come."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    async def read(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, data: bytes) -> None: ...

    async def close_write(self) -> None: ...

    async def close(self) -> None: ...


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_a_body_in_chunks_ends_where_it_ends_however_it_comes(chunks: list[bytes], data: st.DataObject) -> None:
    from skerry.gate.http1 import Body

    form = data.draw(st.sampled_from([b"%x\r\n%b\r\n", b"%x;a=b\r\n%b\r\n", b"0%X \r\n%b\r\n"]))
    whole = b"".join(form % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    wire, pieces = whole + b"GET / HTTP/1.1\r\n\r\n", []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        pieces.append(wire[:size])
        wire = wire[size:]

    async def read() -> tuple[bytes, bytes | None]:
        reader = Reader(Pieces(*pieces))
        found = b"".join([piece async for piece in reader.pieces(Body(is_chunked=True))])
        return found, await reader.head(None)

    assert asyncio.run(read()) == (whole, b"GET / HTTP/1.1\r\n\r\n")


@given(st.binary(max_size=200))
def test_no_chunks_break_the_reader(data: bytes) -> None:
    from skerry.gate.http1 import Body

    async def read() -> None:
        try:
            async for _ in Reader(Pieces(data)).pieces(Body(is_chunked=True)):
                pass
        except Malformed:
            pass

    asyncio.run(read())
