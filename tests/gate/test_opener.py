"""Connections to hosts of secrets, between real clients and real TLS servers."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import os
import socket
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.gate import conversation, hooks
from skerry.gate.base import Late, Meter, Policy, Refused, Unreachable
from skerry.gate.conversation import Host
from skerry.gate.hooks import Hooks, Identity, NeedsBody, Request
from skerry.gate.secrets import Value, Vault
from skerry.gate.substitute import Substitution
from skerry.model.rules import Rules
from skerry.model.secrets import Secret
from skerry.model.spec import new_id

from .hosts import NAME, Handler, StreamDuplex, World, answer, echo, read_body, read_head

VALUE = "ghp_1f0e-the+value/of~it"
TOKEN = Secret(hosts=(NAME,))
Make = Callable[..., Any]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Make a world; one secret TOKEN is for its host unless told otherwise."""
    async with AsyncExitStack() as stack:

        async def made(
            handler: Handler = echo, secrets: dict[str, Secret] | None = None, port: int = 443, **changes: str
        ) -> World:
            world = World(tmp_path, handler, {"TOKEN": TOKEN} if secrets is None else secrets, port)
            for name, value in changes.items():
                setattr(world, name, value)
            world.vault.provide(world.id, {"TOKEN": VALUE})
            return await stack.enter_async_context(world.running())

        yield made


def headers_of(told: str) -> dict[str, str]:
    return dict(json.loads(told)["headers"])


async def test_a_header_gets_the_value_on_its_way_out(make: Make) -> None:
    world = await make()
    noted = world.meter.secrets
    told = await world.curl("/user", "-H", f"Authorization: token {world.placeholder('TOKEN')}")
    assert headers_of(told)["authorization"] == f"token {VALUE}"
    assert json.loads(told)["first"] == "GET /user HTTP/1.1"
    assert noted == {"TOKEN"}


async def test_basic_authentication_gets_the_value_within_its_base64(make: Make) -> None:
    world = await make()
    told = await world.curl("/", "-u", f"me:{world.placeholder('TOKEN')}")
    pair = base64.b64encode(f"me:{VALUE}".encode()).decode()
    assert headers_of(told)["authorization"] == f"Basic {pair}"


async def test_the_query_gets_the_value_percent_encoded(make: Make) -> None:
    world = await make()
    told = await world.curl(f"/a?key={world.placeholder('TOKEN')}&b=1")
    assert json.loads(told)["first"] == "GET /a?key=ghp_1f0e-the%2Bvalue%2Fof~it&b=1 HTTP/1.1"


async def test_paths_and_bodies_are_left_as_they_are(make: Make) -> None:
    world = await make()
    sought = world.placeholder("TOKEN")
    told = json.loads(await world.curl(f"/{sought}", "-d", f"a={sought}"))
    assert told["first"] == f"POST /{sought} HTTP/1.1"
    assert told["body"] == f"a={sought}"
    assert world.meter.secrets == set()


async def test_a_placeholder_of_another_secret_or_another_box_is_worth_nothing(make: Make) -> None:
    secrets = {"TOKEN": TOKEN, "OTHER": Secret(hosts=("other.example.org",))}
    world = await make(secrets=secrets)
    world.vault.provide(world.id, {"OTHER": "value-of-other"})
    for text in (world.placeholder("OTHER"), world.placeholder("TOKEN", new_id())):
        told = await world.curl("/", "-H", f"Authorization: token {text}")
        assert headers_of(told)["authorization"] == f"token {text}"


async def test_python_trusts_the_bundle_by_the_usual_variable(make: Make) -> None:
    world = await make()
    program = (
        "import http.client, os, socket, ssl\n"
        f"c = http.client.HTTPSConnection({NAME!r}, context=ssl.create_default_context())\n"
        f"c._create_connection = lambda *_: socket.create_connection(('127.0.0.1', {world.gate_port}))\n"
        "for _ in range(3):\n"
        "    c.request('GET', '/', headers={'X-Api-Key': os.environ['TOKEN']})\n"
        "    print(c.getresponse().read().decode())\n"
    )
    env = {"SSL_CERT_FILE": str(world.bundle), "TOKEN": world.placeholder("TOKEN")}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env=env
    )
    printed, _ = await process.communicate()
    assert [headers_of(line)["x-api-key"] for line in printed.decode().splitlines()] == [VALUE] * 3
    assert world.dials == 1


async def test_a_value_that_is_provided_again_holds_for_the_next_request(make: Make) -> None:
    world = await make()
    reader, writer = await world.connect()
    seen = []
    for value in (VALUE, "rotated-value"):
        world.vault.provide(world.id, {"TOKEN": value})
        writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\nX: {world.placeholder('TOKEN')}\r\n\r\n".encode())
        _, headers = await read_head(reader)
        seen.append(headers_of((await read_body(reader, headers)).decode())["x"])
    writer.close()
    assert seen == [VALUE, "rotated-value"]
    assert world.dials == 1


async def test_a_secret_without_a_value_is_an_answer_that_names_it(make: Make) -> None:
    world = await make()
    world.vault.forget(world.id)
    told = await world.curl("/", "-i", "-H", f"Authorization: token {world.placeholder('TOKEN')}")
    assert told.startswith("HTTP/1.1 502 ")
    assert "the secret TOKEN: " in told
    assert world.dials == 0
    assert headers_of(await world.curl("/"))["host"] == NAME  # what needs no value goes on


async def test_a_value_that_no_header_can_have_is_an_answer_and_not_a_header(make: Make) -> None:
    world = await make()
    world.vault.provide(world.id, {"TOKEN": "a-value\r\nX-Other: b"})
    told = await world.curl("/", "-i", "-H", f"Authorization: token {world.placeholder('TOKEN')}")
    assert told.startswith("HTTP/1.1 502 ")
    assert "X-Other" not in told
    assert world.dials == 0


async def test_a_value_that_is_named_very_often_is_not_sent(make: Make) -> None:
    world = await make()
    world.vault.provide(world.id, {"TOKEN": "v" * 1000})
    many = world.placeholder("TOKEN") * 200
    told = await world.ask(f"GET / HTTP/1.1\nHost: {NAME}\nX: {many}\n\n")
    assert told.startswith(b"HTTP/1.1 400 ")
    assert world.dials == 0


async def test_a_host_that_shows_a_value_in_its_headers_shows_the_placeholder(make: Make) -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, headers = await read_head(reader)
        writer.write(answer(b"", "302 Found", f"Location: {first.split()[1]}", f"X-Echo: {dict(headers)['x-api-key']}"))
        await writer.drain()

    world = await make(redirect)
    sought = world.placeholder("TOKEN")
    told = await world.curl(f"/?key={sought}", "-i", "-H", f"X-Api-Key: {sought}")
    assert f"Location: /?key={sought}\r\n" in told
    assert f"X-Echo: {sought}" in told


async def test_a_host_whose_certificate_is_not_trusted_gets_nothing(make: Make) -> None:
    world = await make(host_name="other.example.org")
    told = await world.curl("/", "-i", "-H", f"Authorization: token {world.placeholder('TOKEN')}")
    assert told.startswith("HTTP/1.1 502 ")
    assert f"the certificate of {NAME} is not trusted" in told


async def test_a_host_that_cannot_be_reached_is_an_answer(make: Make) -> None:
    world = await make()

    async def refuse() -> StreamDuplex:
        raise ConnectionRefusedError(111, "Connection refused")

    world.dial = refuse
    assert f"{NAME} cannot be reached: Connection refused" in await world.curl("/", "-i")


@pytest.mark.parametrize(("kind", "status"), [(Refused, 403), (Unreachable, 502), (Late, 504)])
async def test_a_dial_that_is_refused_is_told_and_refused(make: Make, kind: type[Refused], status: int) -> None:
    world = await make()

    async def refuse() -> StreamDuplex:
        raise kind("its address is private")

    world.dial = refuse
    told = await world.curl("/", "-i")
    assert told.startswith(f"HTTP/1.1 {status} ")
    assert "its address is private" in told
    await world.ended.wait()
    assert world.refusals == ["its address is private"]


@pytest.mark.parametrize("server_name", [None, "other.example.org"])
async def test_tls_for_another_name_is_refused(make: Make, server_name: str | None) -> None:
    world = await make()
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await world.connect(server_name)
    await world.ended.wait()
    assert world.refusals == [f"the name in its TLS is not {NAME}"]
    assert world.dials == 0


async def test_a_program_that_does_not_trust_the_ca_is_told_of_in_the_refusal(make: Make) -> None:
    world = await make()

    def distrust() -> None:
        with socket.create_connection(("127.0.0.1", world.gate_port)) as plain:
            ssl.create_default_context().wrap_socket(plain, server_hostname=NAME)

    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.to_thread(distrust)
    await world.ended.wait()
    assert "does not trust the CA" in world.refusals[0]


async def test_plain_http_to_a_port_of_tls_is_refused_with_an_answer(make: Make) -> None:
    world = await make()
    reader, writer = await asyncio.open_connection("127.0.0.1", world.gate_port)
    writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    assert (await reader.read(-1)).startswith(b"HTTP/1.1 400 ")
    writer.close()
    await world.ended.wait()
    assert world.refusals == ["plain HTTP to a host of a secret"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET / HTTP/1.1\nHost: other.example.org\n\n", 403),
        (f"GET / HTTP/1.1\nHost: {NAME}:8443\n\n", 403),
        (f"GET / HTTP/1.1\nHost: {NAME}\nHost: {NAME}\n\n", 400),
        ("GET / HTTP/1.0\n\n", 403),
        (f"TRACE / HTTP/1.1\nHost: {NAME}\nX: 1\n\n", 403),
        (f"track / HTTP/1.1\nHost: {NAME}\nX: 1\n\n", 403),
        (f"GET https://other.example.org/ HTTP/1.1\nHost: {NAME}\n\n", 400),
        (f"CONNECT {NAME}:443 HTTP/1.1\nHost: {NAME}\n\n", 400),
        (f"POST / HTTP/1.1\nHost: {NAME}\nContent-Length: 3\nTransfer-Encoding: chunked\n\n0\n\n", 400),
        (f"POST / HTTP/1.1\nHost: {NAME}\nContent-Length: 3\nContent-Length: 4\n\nabc", 400),
        (f"POST / HTTP/1.1\nHost: {NAME}\nTransfer-Encoding: gzip, chunked\n\n0\n\n", 400),
        (f"POST / HTTP/1.1\nHost: {NAME}\nTransfer-Encoding : chunked\n\n0\n\n", 400),
        (f"GET / HTTP/1.1\nHost: {NAME}\nX: a\n b\n: c\n\n", 400),
        ("\x16nonsense\n\n", 400),
    ],
)
async def test_what_is_not_plainly_a_request_to_the_host_is_refused(make: Make, head: str, status: int) -> None:
    world = await make()
    assert (await world.ask(head)).startswith(f"HTTP/1.1 {status} ".encode())
    await world.ended.wait()
    assert len(world.refusals) == 1
    assert world.dials == 0


async def test_a_name_in_another_spelling_is_the_same_host(make: Make) -> None:
    world = await make()
    told = await world.ask("GET / HTTP/1.1\nHost: API.Example.ORG.:443\nConnection: close\n\n")
    assert told.startswith(b"HTTP/1.1 200 ")


async def test_many_requests_go_over_one_connection(make: Make) -> None:
    world = await make()
    url = f"https://{NAME}:443/"
    told = await world.curl("/3", url + "1", url + "2")
    assert [line.split()[1] for line in told.split('"first": "')[1:]] == ["/1", "/2", "/3"]
    assert world.dials == 1


async def test_requests_that_are_sent_at_once_are_answered_in_order(make: Make) -> None:
    world = await make()
    first = "".join(f"GET /{n} HTTP/1.1\nHost: {NAME}\n\n" for n in range(9))
    told = await world.ask(f"{first}GET /9 HTTP/1.1\nHost: {NAME}\nConnection: close\n\n")
    assert [line.split()[1] for line in told.decode().split('"first": "')[1:]] == [f"/{n}" for n in range(10)]


async def test_a_host_that_ends_its_connection_ends_that_of_the_client(make: Make) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(answer(b"one"))
        await writer.drain()

    world = await make(once)
    told = await world.ask(f"GET / HTTP/1.1\nHost: {NAME}\n\n")
    assert told.endswith(b"\r\n\r\none")


async def test_an_answer_passes_piece_by_piece(make: Make) -> None:
    has_seen = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await has_seen.wait()
        writer.write(b"6\r\nsecond\r\n0\r\nX-Trailer: a\r\n\r\n")
        await writer.drain()

    world = await make(slow)
    reader, writer = await world.connect()
    writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    _, headers = await read_head(reader)
    assert dict(headers)["transfer-encoding"] == "chunked"
    assert await reader.readexactly(10) == b"5\r\nfirst\r\n"
    has_seen.set()
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"6\r\nsecond\r\n0\r\n")
    writer.close()


async def test_a_body_passes_piece_by_piece(make: Make) -> None:
    pieces: asyncio.Queue[bytes] = asyncio.Queue(9)

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        for _ in range(2):
            await pieces.put(await reader.readexactly(10))
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.write(answer(b"done"))
        await writer.drain()

    world = await make(listen)
    reader, writer = await world.connect()
    writer.write(f"POST / HTTP/1.1\r\nHost: {NAME}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    for piece in (b"5\r\nfirst\r\n", b"5\r\nother\r\n"):
        writer.write(piece)
        assert await pieces.get() == piece
    writer.write(b"0\r\n\r\n")
    assert (await read_head(reader))[0] == "HTTP/1.1 200 OK"
    writer.close()


async def test_a_host_is_asked_before_a_body_is_sent_to_it(make: Make) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, headers = await read_head(reader)
        assert dict(headers)["expect"] == "100-continue"
        writer.write(answer(b"no", "413 Too Large", "Connection: close"))
        await writer.drain()

    world = await make(refuse)
    head = f"PUT / HTTP/1.1\nHost: {NAME}\nContent-Length: 5\nExpect: 100-continue\n\n"
    assert b"413 Too Large" in await world.ask(head)


async def test_a_body_follows_the_continue_of_the_host(make: Make) -> None:
    world = await make()
    told = await world.curl("/", "-H", "Expect: 100-continue", "--expect100-timeout", "60", "-d", "body")
    assert json.loads(told)["body"] == "body"


@pytest.mark.parametrize(
    ("method", "head", "body"),
    [
        ("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n", ""),
        ("GET", "HTTP/1.1 204 No Content\r\n\r\n", ""),
        ("GET", 'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 100\r\n\r\n', ""),
        ("GET", "HTTP/1.0 200 OK\r\n\r\n", "to its end"),
        ("GET", "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", "ok"),
    ],
)
async def test_answers_of_every_kind_end_where_they_end(make: Make, method: str, head: str, body: str) -> None:
    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write((head + body).encode())
        await writer.drain()

    world = await make(tell)
    told = await world.curl("/", *(["--head"] if method == "HEAD" else []), "-o", "/dev/stdout", "-w", "|%{http_code}")
    status = head.rpartition("HTTP/")[2].split()[1]
    assert told.endswith(f"{body}|{status}")


async def test_an_answer_that_is_cut_off_is_cut_off_for_the_client_too(make: Make) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
        await writer.drain()

    world = await make(cut)
    with pytest.raises(AssertionError, match=r"transfer closed with 96 bytes|unexpected eof|reset by peer"):
        await world.curl("/")


async def test_what_is_no_answer_is_told(make: Make) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"220 smtp.example.org\r\n\r\n")
        await writer.drain()

    world = await make(babble)
    assert "the server does not answer as HTTP/1.1 does" in await world.curl("/", "-i")


async def test_after_an_upgrade_bytes_pass_both_ways(make: Make) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, headers = await read_head(reader)
        assert dict(headers)["authorization"] == VALUE
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nhello ")
        while data := await reader.read(100):
            writer.write(data.upper())
            await writer.drain()

    world = await make(shout)
    reader, writer = await world.connect()
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\n"
    auth = f"Authorization: {world.placeholder('TOKEN')}\r\n"
    writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\n{upgrade}{auth}\r\n".encode())
    assert (await read_head(reader))[0].startswith("HTTP/1.1 101 ")
    assert await reader.readexactly(6) == b"hello "
    for word in (b"one", b"two"):
        writer.write(word)
        assert await reader.readexactly(3) == word.upper()
    writer.close()
    await world.ended.wait()


async def test_large_bodies_pass_both_ways(make: Make) -> None:
    async def digest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, headers = await read_head(reader)
        body = await read_body(reader, headers)
        writer.write(answer(hashlib.sha256(body).hexdigest().encode() + body))
        await writer.drain()

    world = await make(digest)
    body = os.urandom(5 << 20)
    told = await world.ask(f"POST / HTTP/1.1\nHost: {NAME}\nContent-Length: {len(body)}\nConnection: close\n\n", body)
    wanted = hashlib.sha256(body).hexdigest().encode()
    assert told.partition(b"\r\n\r\n")[2] == wanted + body


async def test_a_client_gets_all_of_an_answer_that_ends_the_connection(make: Make) -> None:
    body = os.urandom(3 << 20)

    async def tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(answer(body, "200 OK", "Connection: close"))
        await writer.drain()

    world = await make(tell)
    reader, writer = await world.connect()
    writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    _, headers = await read_head(reader)
    assert await read_body(reader, headers) == body
    assert await reader.read() == b""
    writer.close()
    await world.ended.wait()


async def test_a_head_without_end_is_refused(make: Make) -> None:
    world = await make()
    assert (await world.ask(f"GET / HTTP/1.1\nHost: {NAME}\nX: {'a' * 200_000}")).startswith(b"HTTP/1.1 4")


async def test_a_head_that_does_not_come_to_its_end_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_HEAD_S", 0.2)
    world = await make()
    assert (await world.ask(f"GET / HTTP/1.1\nHost: {NAME}\nX: a")).startswith(b"HTTP/1.1 408 ")
    assert world.dials == 0


async def test_port_80_is_opened_only_for_a_secret_that_names_it(make: Make) -> None:
    world = await make(secrets={"TOKEN": TOKEN, "CLEAR": Secret(hosts=(f"{NAME}:80",))}, port=80)
    world.vault.provide(world.id, {"CLEAR": "value-in-clear"})
    assert world.opener.is_for(world.policy, NAME, 80)
    told = await world.curl("/", "-H", f"A: {world.placeholder('TOKEN')}", "-H", f"B: {world.placeholder('CLEAR')}")
    assert headers_of(told)["a"] == world.placeholder("TOKEN")
    assert headers_of(told)["b"] == "value-in-clear"


async def test_only_hosts_of_secrets_are_opened(make: Make) -> None:
    world = await make(secrets={"TOKEN": Secret(hosts=("*.example.org", "other.org:8443"))})
    opened = [
        (name, port)
        for name in ("example.org", NAME, "other.org", "evil-example.org")
        for port in (22, 80, 443, 8443)
        if world.opener.is_for(world.policy, name, port)
    ]
    assert opened == [(NAME, 443), ("other.org", 8443)]


async def test_a_connection_that_is_cancelled_closes_both_sides(make: Make) -> None:
    is_asked = asyncio.Event()

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        is_asked.set()
        assert await reader.read() == b""

    world = await make(never)
    ours, theirs = socket.socketpair()
    client = StreamDuplex(*await asyncio.open_connection(sock=ours))
    dialled: list[StreamDuplex] = []

    async def dial() -> StreamDuplex:
        dialled.append(await world.dial())
        return dialled[0]

    before = asyncio.all_tasks()
    serving = asyncio.ensure_future(world.opener.serve(world.policy, NAME, 443, client, dial, world.meter))
    context = ssl.create_default_context(cafile=str(world.bundle))
    _, writer = await asyncio.open_connection(sock=theirs, ssl=context, server_hostname=NAME)
    writer.write(f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode())
    await is_asked.wait()
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert client.is_closed
    assert dialled[0].is_closed
    assert not {task for task in asyncio.all_tasks() - before if "StreamDuplex" in repr(task)}
    writer.close()


CALLS: list[tuple[Request, Identity]] = []


def add_header(request: Request, identity: Identity) -> Request:
    CALLS.append((request, identity))
    return request.but("X-Signed", f"{identity.secret}:{identity.value.reveal()}:{identity.labels['team']}")


def sign_body(request: Request, identity: Identity) -> Request:
    if request.body is None:
        raise NeedsBody
    return request.but("X-Digest", hashlib.sha256(request.body).hexdigest())


def fail(request: Request, identity: Identity) -> Request:
    raise ValueError(f"it fails with {identity.value.reveal()}")


def go_elsewhere(request: Request, identity: Identity) -> Request:
    return request.but("Host", "other.example.org")


def break_headers(request: Request, identity: Identity) -> Request:
    return request.but("X-Broken", f"{identity.value.reveal()}\r\nX-More: 1")


def hooked(function: Callable[[Request, Identity], Request]) -> dict[str, Secret]:
    return {"TOKEN": Secret(hosts=(NAME,), hook=f"{__name__}:{function.__name__}")}


async def test_a_hook_changes_each_request_with_the_value(make: Make) -> None:
    world = await make(secrets=hooked(add_header))
    CALLS.clear()
    told = await world.curl("/path?a=1", "-X", "PUT", "-d", "body")
    assert headers_of(told)["x-signed"] == f"TOKEN:{VALUE}:blue"
    [(request, identity)] = CALLS
    assert (request.method, request.target, request.body) == ("PUT", "/path?a=1", None)
    assert (identity.sandbox, identity.host, identity.port) == (world.id, NAME, 443)
    assert VALUE not in repr(identity)
    assert world.meter.secrets == {"TOKEN"}


def add_body(request: Request, identity: Identity) -> Request:
    return Request(method=request.method, target=request.target, headers=request.headers, body=b"of the hook")


async def test_a_hook_may_give_a_request_another_body(make: Make) -> None:
    world = await make(secrets=hooked(add_body))
    assert json.loads(await world.curl("/"))["body"] == "of the hook"
    url = f"https://{NAME}:443/"
    told = await world.curl("/", "-d", "GET /smuggled HTTP/1.1", "-H", "Expect: 100-continue", url)
    assert told.count('"body": "of the hook"') == 2
    assert world.refusals == []


@pytest.mark.parametrize("body", ["", "a" * 100_000])
async def test_a_hook_may_ask_for_the_whole_body(make: Make, body: str) -> None:
    world = await make(secrets=hooked(sign_body))
    options = ["-d", body, "-H", "Transfer-Encoding: chunked", "-H", "Expect: 100-continue"] if body else []
    told = await world.curl("/", *options)
    assert headers_of(told)["x-digest"] == hashlib.sha256(body.encode()).hexdigest()
    assert json.loads(told)["body"] == body


async def test_a_body_that_is_too_large_for_a_hook_is_an_answer(make: Make, tmp_path: Path) -> None:
    world = await make(secrets=hooked(sign_body))
    large = tmp_path / "large"
    large.write_bytes(bytes((8 << 20) + 1))
    told = await world.curl("/", "-i", "--data-binary", f"@{large}", "-H", "Expect:")
    assert told.startswith("HTTP/1.1 400 ")
    assert world.dials == 0


def give_back(request: Request, identity: Identity) -> Request:
    return request


def give_nothing(request: Request, identity: Identity) -> Request:
    return None  # type: ignore[return-value]


def leave(request: Request, identity: Identity) -> Request:
    sys.exit(f"it leaves with {identity.value.reveal()}")


def stop(request: Request, identity: Identity) -> Request:
    raise StopIteration(identity.value.reveal())


@pytest.mark.parametrize("hook", [fail, go_elsewhere, break_headers, give_nothing, leave, stop])
async def test_a_hook_that_fails_is_an_answer_without_what_it_said(
    make: Make, hook: Callable[[Request, Identity], Request]
) -> None:
    world = await make(secrets=hooked(hook))
    told = await world.curl("/", "-i")
    assert told.startswith("HTTP/1.1 502 ")
    assert VALUE not in told
    assert world.dials == 0


HANGING = threading.Event()


def hang(request: Request, identity: Identity) -> Request:
    HANGING.wait(30)
    return request


async def test_hooks_that_hang_are_given_up_and_let_others_in_once_they_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    HANGING.clear()
    monkeypatch.setattr(hooks, "_TIMEOUT_S", 0.3)
    world = await make(secrets=hooked(hang))
    told = await asyncio.gather(*(world.curl("/", "-i") for _ in range(10)))
    assert all("did not end in 0.3 s" in each for each in told)
    HANGING.set()
    monkeypatch.setattr(hooks, "_TIMEOUT_S", 20)
    assert headers_of(await world.curl("/"))["host"] == NAME


async def test_hooks_of_one_sandbox_that_hang_leave_some_room_for_those_of_another() -> None:
    HANGING.clear()
    calling, request = Hooks(), Request(method="GET", target="/", headers=())

    def identity() -> Identity:
        return Identity(sandbox=new_id(), labels={}, host=NAME, port=443, secret="TOKEN", value=Value(VALUE))

    greedy = identity()
    hanging = [asyncio.create_task(calling.call(f"{__name__}:hang", request, greedy)) for _ in range(20)]
    await asyncio.sleep(0)
    try:
        assert await calling.call(f"{__name__}:give_back", request, identity()) == request
    finally:
        HANGING.set()
        await asyncio.gather(*hanging)


async def test_a_sandbox_has_few_bodies_for_hooks_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_BODIES_OF_ONE", 1)
    monkeypatch.setattr(conversation, "_PLACE_S", 0.1)
    world = await make(secrets=hooked(sign_body))
    asked, writer = await world.connect()
    writer.write(f"POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n".encode())
    await asked.readuntil(b"100 Continue\r\n\r\n")
    reader, other = await world.connect()
    other.write(f"POST / HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: 1\r\n\r\na".encode())
    assert (await reader.readline()).startswith(b"HTTP/1.1 504 ")
    writer.close()
    await world.ended.wait()
    assert json.loads(await world.curl("/", "-d", "abc"))["body"] == "abc"


async def test_a_hook_that_is_not_there_is_an_answer(make: Make) -> None:
    world = await make(secrets={"TOKEN": Secret(hosts=(NAME,), hook="no.such.module:function")})
    assert "the hook no.such.module:function cannot be loaded: ModuleNotFoundError" in await world.curl("/")


async def test_the_shipped_hook_signs_what_a_box_signed_with_its_placeholder(make: Make) -> None:
    key = Secret(hosts=(NAME,), hook="skerry.gate.sigv4:sign")
    world = await make(secrets={"AWS_ACCESS_KEY_ID": TOKEN, "AWS_SECRET_ACCESS_KEY": key})
    world.vault.provide(world.id, {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": "the-secret-key"})
    told = await world.curl(
        "/",
        *("--aws-sigv4", "aws:amz:eu-north-1:sqs", "-d", "Action=ListQueues"),
        *("-u", f"{world.placeholder('AWS_ACCESS_KEY_ID')}:{world.placeholder('AWS_SECRET_ACCESS_KEY')}"),
    )
    sent = headers_of(told)
    date = sent["x-amz-date"]
    assert sent["authorization"].split("Signature=")[1] == direct_signature(date)
    assert sent["authorization"].startswith(f"AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/{date[:8]}/eu-north-1/sqs/")


def direct_signature(date: str) -> str:
    """The signature by the published steps, written out for this one request."""
    names = "host;x-amz-date"
    body = hashlib.sha256(b"Action=ListQueues").hexdigest()
    head = f"host:{NAME}\nx-amz-date:{date}\n"
    canonical = f"POST\n/\n\n{head}\n{names}\n{body}"
    scope = f"{date[:8]}/eu-north-1/sqs/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = b"AWS4the-secret-key"
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


async def test_a_value_is_in_no_log_error_or_argument(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    world = await make(secrets={**hooked(fail), "OTHER": TOKEN})
    world.vault.provide(world.id, {"OTHER": "other-value\r\nbroken"})
    for head in ("", f"A: {world.placeholder('TOKEN')}\n", f"A: {world.placeholder('OTHER')}\n"):
        told = await world.ask(f"GET /{head and '?a=' + world.placeholder('TOKEN')} HTTP/1.1\nHost: {NAME}\n{head}\n")
        assert VALUE.encode() not in told
        assert b"other-value" not in told
    shown = f"{caplog.text} {world.vault.__dict__} {world.meter} {world.refusals} {world.policy}"
    shown += Path("/proc/self/environ").read_bytes().decode(errors="replace")
    shown += Path("/proc/self/cmdline").read_bytes().decode(errors="replace")
    shown += "".join(path.read_bytes().decode(errors="replace") for path in world.folder.iterdir() if path.is_file())
    assert VALUE not in shown
    assert "other-value" not in shown


class Pipe:
    """A duplex in memory: what is read comes in given pieces, and what is written is kept."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.written = b""
        self.has_more = asyncio.Event()
        self._is_closed = asyncio.Event()

    async def read(self) -> bytes:
        if self._pieces:
            return self._pieces.pop(0)
        await self._is_closed.wait()
        return b""

    async def write(self, data: bytes) -> None:
        self.written += data
        self.has_more.set()

    async def close_write(self) -> None:
        self._is_closed.set()

    async def close(self) -> None:
        self._is_closed.set()
        self.has_more.set()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


@given(
    bodies=st.lists(st.tuples(st.binary(max_size=50), st.booleans()), min_size=1, max_size=3),
    of_client=st.lists(st.integers(0, 600), max_size=30),
    of_host=st.lists(st.integers(0, 300), max_size=30),
)
def test_however_requests_and_answers_are_cut_up_they_arrive_whole(
    bodies: list[tuple[bytes, bool]], of_client: list[int], of_host: list[int]
) -> None:
    secret = Secret(hosts=(f"{NAME}:80",))

    def messages(first: str, key: str) -> bytes:
        sent = b""
        for body, is_chunked in bodies:
            sent += f"{first}Host: {NAME}\r\nX-Key: {key}\r\n".encode()
            if is_chunked:
                chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
                sent += b"Transfer-Encoding: chunked\r\n\r\n" + chunk + b"0\r\n\r\n"
            else:
                sent += b"Content-Length: %d\r\n\r\n" % len(body) + body
        return sent

    async def pass_through() -> None:
        with TemporaryDirectory() as folder:
            vault = Vault(Path(folder))
            id = new_id()
            vault.provide(id, {"TOKEN": VALUE})
            key = vault.placeholders(id, {"TOKEN": secret})["TOKEN"]
            client = Pipe(cut(messages("POST / HTTP/1.1\r\n", key), of_client))
            host = Pipe(cut(messages("HTTP/1.1 200 OK\r\n", VALUE), of_host))
            known = Host(
                policy=Policy(id=id, rules=Rules(), secrets={"TOKEN": secret}),
                name=NAME,
                port=80,
                secrets={"TOKEN": secret},
                substitution=Substitution({"TOKEN": key}),
                vault=vault,
                hooks=Hooks(),
                meter=Meter(),
            )

            async def dial() -> Pipe:
                return host

            async with asyncio.timeout(20):
                talking = asyncio.ensure_future(conversation.Conversation(known, client, dial).run())
                wanted = messages("HTTP/1.1 200 OK\r\n", key)
                while len(client.written) < len(wanted) and not talking.done():
                    client.has_more.clear()
                    await client.has_more.wait()
                await client.close()
                await talking
            assert client.written == wanted
            assert host.written == messages("POST / HTTP/1.1\r\n", VALUE)

    asyncio.run(pass_through())
