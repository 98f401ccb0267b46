"""A session with the real agent: programs in a box reach hosts by their names, through the gate and not otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from agent.network_box import NetworkBox, run, why_none
from loopback import served

from skerry.errors import SkerryError
from skerry.gate.base import Policy
from skerry.gate.session import Session
from skerry.sandbox.sandbox import AsyncSandbox

from .box import Lines, Rerouted, Web, has_open, policy

pytestmark = pytest.mark.skipif(why_none() is not None, reason=str(why_none()))

ALLOW = ("a.test", "raw.test:7", "127.0.0.1", "127.0.0.1:7")
FETCH = """
import sys, urllib.error, urllib.request
proxies = {"http": "http://127.200.0.1:3128"} if sys.argv[2:] == ["proxy"] else {}
opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
try:
    print(opener.open(sys.argv[1], timeout=20).read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except urllib.error.URLError as error:
    print(type(error.reason).__name__)
"""
ASK = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
link.sendall(sys.argv[3].encode())
data = b""
while piece := link.recv(1 << 16):
    data += piece
print(data.decode())
"""
WAIT = """
import socket, sys
link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
link.sendall(sys.argv[3].encode())
try:
    print("ended", link.recv(1))
except ConnectionResetError:
    print("reset")
"""
GLANCE = """
import socket
link = socket.create_connection(("raw.test", 7), 20)
print(len(link.recv(1)))
"""


@pytest.fixture
def box() -> Iterator[NetworkBox]:
    with NetworkBox() as running:
        yield running


@pytest.fixture
async def inside(box: NetworkBox) -> AsyncIterator[AsyncSandbox]:
    made = box.sandbox()
    yield made
    await made.close()


@asynccontextmanager
async def gate(box: NetworkBox, rules: Policy, port: int) -> AsyncIterator[tuple[Session, Lines]]:
    """A session that serves the box; all hosts are at one port of the loopback."""
    ledger = Lines()
    async with box.network() as network:
        session = Session(network, rules, dialer=Rerouted(port), recorder=ledger)
        serving = asyncio.create_task(session.serve())
        try:
            yield session, ledger
        finally:
            network.close()
            with suppress(SkerryError):
                await serving


@pytest.mark.parametrize("way", ["direct", "proxy"])
async def test_a_program_fetches_by_name_what_the_rules_allow(box: NetworkBox, inside: AsyncSandbox, way: str) -> None:
    async with served(Web()) as port, gate(box, policy(ALLOW), port) as (session, ledger):
        assert await run(inside, FETCH, "http://a.test/", way) == "hello"
        (closed,) = await ledger.wait("close")
        assert closed["name"] == "a.test"
        assert closed["down"] > 5
        refused = await run(inside, FETCH, "http://evil.test/", way)
        expected = "403 no rule allows evil.test on port 80" if way == "proxy" else "gaierror"
        assert refused == expected
        assert len(ledger.of("refuse") + ledger.of("resolve")) == 1
        await has_open(session, 0)


async def test_a_program_is_told_why_its_request_was_not_sent_on(box: NetworkBox, inside: AsyncSandbox) -> None:
    web = Web()
    async with served(web) as port, gate(box, policy(ALLOW), port) as (_, ledger):
        answer = await run(inside, ASK, "a.test", "80", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
        assert answer.startswith("HTTP/1.1 403 Forbidden")
        assert answer.endswith("the request is for evil.test, and a.test was asked for")
        assert len(ledger.of("refuse")) == 1
        assert web.heads == []


async def test_nothing_more_is_fetched_for_a_program_that_is_gone(box: NetworkBox, inside: AsyncSandbox) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    async with served(flood) as port, gate(box, policy(ALLOW), port) as (session, ledger):
        assert await run(inside, GLANCE) == "1"
        await ledger.wait("close")
        await has_open(session, 0)


async def test_rules_that_change_break_connections_of_programs_off(box: NetworkBox, inside: AsyncSandbox) -> None:
    came = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        came.set()
        await reader.read()

    async with served(hold) as port, gate(box, policy(ALLOW), port) as (session, ledger):
        running = asyncio.create_task(run(inside, WAIT, "raw.test", "7", "x\n"))
        await came.wait()
        await session.update(policy([]))
        assert await running == "reset"
        assert ledger.of("close")[0]["reason"].startswith("the rules changed")
