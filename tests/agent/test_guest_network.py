"""The agent's side of a network with rules: real resolvers and connections in a box, answered by hand."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from skerry.agent.bundle import GUEST
from skerry.agent.network import AgentNetwork, Open, OpenProxy, Resolve, Warning
from skerry.agent.tunnel import AsyncTunnel
from skerry.errors import AgentError, CallInterrupted, PathNotFound, Unsupported
from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest, interpreters, wait_until
from .network_box import NetworkBox, run, why_none

pytestmark = pytest.mark.skipif(why_none() is not None, reason=str(why_none()))

SERVER_FAILED = 2
LOOK_UP = """
import socket, sys
for name in sys.argv[1:]:
    try:
        found = sorted({each[4][0] for each in socket.getaddrinfo(name, 443, type=socket.SOCK_STREAM)})
        print(name, *found)
    except socket.gaierror as error:
        print(name, {socket.EAI_NONAME: "no name", socket.EAI_AGAIN: "again"}.get(error.errno, error))
"""
ASK = """
import json, socket, sys
for question in json.load(sys.stdin):
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.settimeout(20)
    udp.sendto(bytes.fromhex(question), ("127.0.0.1", 53))
    print(udp.recv(4096).hex())
"""
ECHO = """
import socket, sys
name, port = sys.argv[1], int(sys.argv[2])
link = socket.create_connection((name, port), 20)
link.sendall(b"hello")
link.shutdown(socket.SHUT_WR)
data = b""
while piece := link.recv(1 << 16):
    data += piece
print(data.decode())
"""
TRY = """
import socket, sys
try:
    link = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20)
    data = link.recv(100)
    print("ended", data.decode())
except OSError as error:
    print(type(error).__name__)
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


class Host:
    """Answers wishes: names in `ports` are allowed there, connections are served by `serve`, or refused."""

    def __init__(self, network: AgentNetwork, ports: dict[str, set[int]] | None = None) -> None:
        self.network = network
        self.ports = ports or {}
        self.seen: list[Any] = []
        self.taken: dict[str, list[int]] = {}
        """Ports of names that programs of the box have."""
        self.serve: Callable[[AsyncTunnel], Awaitable[None]] | None = None
        self.idle = asyncio.Event()
        """Set once a connection has been served to its end."""

    async def answer(self) -> None:
        async with asyncio.TaskGroup() as group:
            async for wish in self.network.wishes():
                self.seen.append(wish)
                if isinstance(wish, Resolve):
                    group.create_task(self._resolve(wish))
                elif isinstance(wish, Open | OpenProxy) and self.serve is not None:
                    group.create_task(self._serve(self.serve, self.network.take(wish.wish)))
                elif isinstance(wish, Open | OpenProxy):
                    group.create_task(self.network.refuse(wish.wish))

    async def _resolve(self, wish: Resolve) -> None:
        if taken := await self.network.resolved(wish.wish, self.ports.get(wish.name, set())):
            self.taken[wish.name] = taken

    async def _serve(self, serve: Callable[[AsyncTunnel], Awaitable[None]], tunnel: AsyncTunnel) -> None:
        async with tunnel:
            await serve(tunnel)
        self.idle.set()

    def names(self) -> list[str]:
        return [wish.name for wish in self.seen if isinstance(wish, Resolve)]


@contextlib.asynccontextmanager
async def answering(box: NetworkBox, **ports: set[int]) -> AsyncIterator[Host]:
    """A host that answers; names are given with `_` for a dot."""
    async with box.network() as network:
        host = Host(network, {name.replace("_", "."): value for name, value in ports.items()})
        task = asyncio.create_task(host.answer())
        try:
            yield host
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def echo(tunnel: AsyncTunnel) -> None:
    while data := await tunnel.read():
        await tunnel.write(data.upper())
    await tunnel.close_write()
    await tunnel.read()


def question(name: str, kind: int = 1, id: int = 7, edns: bytes = b"") -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split(".") if label)
    head = struct.pack(">HHHHHH", id, 0x0100, 1, 0, 0, bool(edns))
    return head + labels + struct.pack(">BHH", 0, kind, 1) + edns


async def ask(inside: AsyncSandbox, *questions: bytes) -> list[bytes]:
    """Answers to questions that are sent as they are."""
    texts = json.dumps([each.hex() for each in questions])
    result = await inside.exec([sys.executable, "-I", "-c", ASK], stdin=texts.encode(), timeout_s=60)
    assert result.exit_code == 0, result.stderr
    return [bytes.fromhex(line) for line in result.stdout.decode().split()]


def code_of(answer: bytes) -> int:
    return answer[3] & 15


async def test_an_allowed_name_resolves_and_no_other_does(box: NetworkBox, inside: AsyncSandbox) -> None:
    async with answering(box, pypi_org={443}) as host:
        found = await run(inside, LOOK_UP, "pypi.org", "PyPI.org.", "evil.example", "localhost", "pypi.org")
        assert found.splitlines() == [
            "pypi.org 127.200.0.2", "PyPI.org. 127.200.0.2", "evil.example no name", "localhost 127.0.0.1",
            "pypi.org 127.200.0.2",
        ]  # fmt: skip
        assert set(host.names()) == {"pypi.org", "evil.example"}


async def test_bytes_go_both_ways_and_each_side_ends_by_itself(box: NetworkBox, inside: AsyncSandbox) -> None:
    async with answering(box, pypi_org={443}, db_internal={5432}) as host:
        host.serve = echo
        assert await run(inside, ECHO, "pypi.org", "443") == "HELLO"
        assert await run(inside, ECHO, "db.internal", "5432") == "HELLO"
        assert await run(inside, ECHO, "127.200.0.1", "3128") == "HELLO"
        opened = [wish for wish in host.seen if isinstance(wish, Open | OpenProxy)]
        assert [type(wish) for wish in opened] == [Open, Open, OpenProxy]
        assert [(wish.name, wish.port) for wish in opened if isinstance(wish, Open)] == [
            ("pypi.org", 443), ("db.internal", 5432),
        ]  # fmt: skip


async def test_what_is_refused_or_cancelled_is_reset(box: NetworkBox, inside: AsyncSandbox) -> None:
    async def give_up(tunnel: AsyncTunnel) -> None:
        """Leave, which closes it."""

    async with answering(box, pypi_org={443}) as host:
        assert await run(inside, TRY, "pypi.org", "443") == "ConnectionResetError"
        assert await run(inside, TRY, "pypi.org", "80") == "ConnectionRefusedError"
        host.serve = give_up
        assert await run(inside, TRY, "pypi.org", "443") == "ConnectionResetError"


async def test_a_name_that_is_not_allowed_any_more_refuses_at_its_address(
    box: NetworkBox, inside: AsyncSandbox
) -> None:
    async with answering(box, pypi_org={80, 443}) as host:
        host.serve = echo
        assert await run(inside, ECHO, "pypi.org", "80") == "HELLO"
        host.ports["pypi.org"] = {443}
        assert await run(inside, TRY, "pypi.org", "80") == "ConnectionRefusedError"
        assert await run(inside, ECHO, "127.200.0.2", "443") == "HELLO"
        host.ports.clear()
        assert await run(inside, TRY, "pypi.org", "443") == "gaierror"
        assert await run(inside, TRY, "127.200.0.2", "443") == "ConnectionRefusedError"


async def test_with_the_end_of_the_stream_all_is_closed_at_once(box: NetworkBox, inside: AsyncSandbox) -> None:
    hold = """
import socket
link = socket.create_connection(("pypi.org", 443), 20)
print(link.recv(10).decode(), flush=True)
link.sendall(b"x")
try:
    link.recv(1)
except OSError as error:
    print(type(error).__name__)
"""
    held = asyncio.Event()

    async def keep(tunnel: AsyncTunnel) -> None:
        await tunnel.write(b"open")
        await tunnel.read()
        held.set()
        await asyncio.Event().wait()

    async with answering(box, pypi_org={443}) as host:
        host.serve = keep
        holding = asyncio.create_task(run(inside, hold))
        async with asyncio.timeout(20):
            await held.wait()
    assert await holding == "open\nConnectionResetError"
    for place in (("127.200.0.2", "443"), ("127.200.0.1", "3128"), ("127.0.0.1", "53")):
        assert await run(inside, TRY, *place) == "ConnectionRefusedError"
    async with answering(box, example_org={443}, pypi_org={443}):
        found = await run(inside, LOOK_UP, "example.org", "pypi.org")
        assert found.splitlines() == ["example.org 127.200.0.3", "pypi.org 127.200.0.2"], "an address is one name's"


async def test_a_newer_call_takes_the_network_over(box: NetworkBox, inside: AsyncSandbox) -> None:
    async with box.network() as first:
        wishes = asyncio.create_task(anext(first.wishes()))
        async with answering(box, pypi_org={443}) as host:
            host.serve = echo
            with pytest.raises(CallInterrupted, match="taken over"):
                await wishes
            assert await run(inside, ECHO, "pypi.org", "443") == "HELLO"
            with pytest.raises(PathNotFound):
                await first.resolved(1, {443})
            assert await run(inside, ECHO, "pypi.org", "443") == "HELLO"


async def test_a_program_that_is_gone_is_not_found(box: NetworkBox, inside: AsyncSandbox) -> None:
    leave = """
import socket, struct
link = socket.create_connection(("127.200.0.1", 3128), 20)
link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
link.close()
"""
    async with box.network() as network:
        wishes = network.wishes()
        await run(inside, leave)
        async with asyncio.timeout(20):
            wish = await anext(wishes)
        assert isinstance(wish, OpenProxy)
        await inside.ping()
        with pytest.raises(PathNotFound, match="gone"):
            await network.take(wish.wish).read()


async def test_a_program_that_breaks_off_in_the_middle_is_no_end(box: NetworkBox, inside: AsyncSandbox) -> None:
    break_off = """
import socket, struct
link = socket.create_connection(("127.200.0.1", 3128), 20)
link.sendall(b"half")
link.recv(1)
link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
link.close()
"""
    async with box.network() as network:
        running = asyncio.create_task(run(inside, break_off))
        async with asyncio.timeout(20):
            wish = await anext(network.wishes())
            assert isinstance(wish, OpenProxy)
            tunnel = network.take(wish.wish)
            assert await tunnel.read() == b"half"
            await tunnel.write(b"x")
            with pytest.raises(CallInterrupted, match="broken the connection off"):
                await tunnel.read()
            with pytest.raises(BrokenPipeError):
                await tunnel.write(b"more")
        await running


HAVE = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("has it", flush=True)
sys.stdin.read()
"""


@contextlib.asynccontextmanager
async def a_server(inside: AsyncSandbox, address: str, port: int) -> AsyncIterator[None]:
    """A program in the box that listens."""
    process = await inside.start([sys.executable, "-I", "-c", HAVE, address, str(port)], stdin=True)
    async for _ in process:
        break
    yield
    await process.kill()
    await process.wait()


async def test_a_program_that_has_a_port_at_all_addresses_is_not_reached_as_another_name(
    box: NetworkBox, inside: AsyncSandbox
) -> None:
    async with answering(box, pypi_org={80, 443}, other_test={80}) as host:
        host.serve = echo
        async with a_server(inside, "0.0.0.0", 443):
            assert await run(inside, TRY, "pypi.org", "443") == "gaierror"
            assert await run(inside, TRY, "pypi.org", "80") == "gaierror"
            assert host.taken == {"pypi.org": [443]}
            assert await run(inside, ECHO, "other.test", "80") == "HELLO"
        assert await run(inside, ECHO, "pypi.org", "443") == "HELLO"


async def test_a_port_that_comes_to_a_name_is_not_a_programs_either(box: NetworkBox, inside: AsyncSandbox) -> None:
    async with answering(box, pypi_org={80}) as host, a_server(inside, "0.0.0.0", 443):
        host.serve = echo
        assert await run(inside, ECHO, "pypi.org", "80") == "HELLO"
        host.ports["pypi.org"] = {80, 443}
        assert await run(inside, TRY, "pypi.org", "443") == "gaierror"
        host.ports["pypi.org"] = {80}
        assert await run(inside, ECHO, "pypi.org", "80") == "HELLO"


async def test_a_program_at_the_usual_loopback_address_is_in_nobodys_way(box: NetworkBox, inside: AsyncSandbox) -> None:
    async with answering(box, pypi_org={443}) as host, a_server(inside, "127.0.0.1", 443):
        host.serve = echo
        assert await run(inside, ECHO, "pypi.org", "443") == "HELLO"
        assert host.taken == {}


async def test_a_name_that_many_ask_for_at_once_is_one_wish(box: NetworkBox, inside: AsyncSandbox) -> None:
    many = """
import socket, sys
question = bytes.fromhex(sys.argv[1])
sockets = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(20)]
for each in sockets:
    each.settimeout(20)
    each.sendto(question, ("127.0.0.1", 53))
print("asked", flush=True)
print(len({each.recv(512) for each in sockets}))
"""
    async with box.network() as network:
        wishes = network.wishes()
        process = await inside.start([sys.executable, "-I", "-c", many, question("pypi.org").hex()])
        async with asyncio.timeout(20):
            await anext(aiter(process))
            wish = await anext(wishes)
            assert wish == Resolve(1, "pypi.org")
            await inside.ping()
            await network.resolved(1, {443})
            assert (await process.wait()).exit_code == 0
        following = asyncio.create_task(anext(wishes))
        await run(inside, "import socket; socket.create_connection(('127.200.0.2', 443))")
        async with asyncio.timeout(20):
            assert await following == Open(2, "pypi.org", 443)


async def test_questions_are_answered_letter_by_letter_and_kind_by_kind(box: NetworkBox, inside: AsyncSandbox) -> None:
    a, aaaa, https, any_kind = 1, 28, 65, 255
    edns = b"\0" + struct.pack(">HHIH", 41, 1400, 0, 0)
    async with answering(box, pypi_org={443}):
        asked = [
            question("PyPi.oRg", a, 0x1234), *(question("pypi.org", kind) for kind in (aaaa, https, any_kind)),
            question("evil.example", aaaa), question("pypi.org", a, edns=edns), question("sub.localhost"),
            question("2.0.200.127.in-addr.arpa", 12),
        ]  # fmt: skip
        answers = await ask(inside, *asked)
    found = answers[0]
    assert found[:2] == b"\x12\x34"
    assert b"\x04PyPi\x03oRg\0" in found
    assert found.endswith(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + bytes([127, 200, 0, 2]))
    assert [code_of(answer) for answer in answers] == [0, 0, 0, 0, 3, 0, 0, 3]
    assert [answer[7] for answer in answers] == [1, 0, 0, 0, 0, 1, 1, 0], "records in each"
    assert answers[5][11] == 1, "who knows the extension is told that we do"
    assert answers[6].endswith(bytes([127, 0, 0, 1]))


async def test_questions_by_tcp_are_answered_in_their_order(box: NetworkBox, inside: AsyncSandbox) -> None:
    by_tcp = """
import socket, struct, sys
link = socket.create_connection(("127.0.0.1", 53), 20)
file = link.makefile("rb")
data = b"".join(struct.pack(">H", len(each)) + each for each in map(bytes.fromhex, sys.argv[1:]))
for at in range(0, len(data), 7):
    link.sendall(data[at : at + 7])
for _ in sys.argv[1:]:
    print(file.read(*struct.unpack(">H", file.read(2))).hex())
link.sendall(b"\\xff\\xff")
print(file.read())
"""
    async with answering(box, pypi_org={443}, example_org={443}):
        asked = [question("pypi.org", id=1), question("no.example", id=2), question("example.org", id=3)]
        *answers, rest = (await run(inside, by_tcp, *(each.hex() for each in asked))).splitlines()
        assert rest == "b''", "who says nonsense is hung up on"
        assert [bytes.fromhex(each)[1] for each in answers] == [1, 2, 3]
        assert [code_of(bytes.fromhex(each)) for each in answers] == [0, 3, 0]


async def test_connections_beyond_the_bound_are_refused_and_the_others_have_their_turn(
    box: NetworkBox, inside: AsyncSandbox
) -> None:
    flood = """
import socket, sys
links, broken = [], 0
for _ in range(600):
    try:
        links.append(socket.create_connection(("127.200.0.1", 3128), 20))
    except ConnectionResetError:
        broken += 1
for link in links[512:]:
    try:
        link.recv(1)
    except ConnectionResetError:
        broken += 1
print(broken, flush=True)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
udp.sendto(bytes.fromhex(sys.argv[1]), ("127.0.0.1", 53))
print(udp.recv(512)[3] & 15, flush=True)
print(sum(link.recv(1) == b"x" for link in links[:512]))
"""

    async def greet(wish: int) -> None:
        async with network.take(wish) as tunnel:
            await tunnel.write(b"x")
            await tunnel.read()

    async with box.network() as network, asyncio.TaskGroup() as group, asyncio.timeout(60):
        wishes = network.wishes()
        running = group.create_task(run(inside, flood, question("pypi.org").hex()))
        visitors: list[int] = []
        warnings: list[str] = []
        async for wish in wishes:
            if isinstance(wish, Resolve):
                break
            if isinstance(wish, Warning):
                warnings.append(wish.text)
                continue
            assert isinstance(wish, OpenProxy)
            visitors.append(wish.wish)
        assert warnings == ["there are more than 512 connections at once"]
        assert len(visitors) == 192, "names can be asked for, however many connections wait"
        await network.resolved(wish.wish, [])
        for number in visitors:
            group.create_task(greet(number))
        for _ in range(512 - 192):
            following = await anext(wishes)
            assert isinstance(following, OpenProxy)
            group.create_task(greet(following.wish))
        assert (await running).split() == ["88", "3", "512"]


async def test_names_beyond_the_bound_are_refused_at_once(box: NetworkBox, inside: AsyncSandbox) -> None:
    many = """
import json, socket, sys
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
for number, question in enumerate(json.load(sys.stdin)):
    udp.sendto(bytes.fromhex(question), ("127.0.0.1", 53))
    if number % 50 == 0:  # answered without the host, so that all before have been heard
        udp.sendto(bytes.fromhex(sys.argv[1]), ("127.0.0.1", 53))
        assert udp.recv(512)[3] & 15 == 0
print(*{udp.recv(512)[3] & 15 for _ in range(44)})
"""
    questions = json.dumps([question(f"n{number}.example").hex() for number in range(256 + 44)])
    async with box.network():
        argv = [sys.executable, "-I", "-c", many, question("localhost").hex()]
        result = await inside.exec(argv, stdin=questions.encode(), timeout_s=30)
        assert result.stdout.decode().split() == [str(SERVER_FAILED)], result.stderr


async def test_names_and_listeners_that_are_used_least_go_first(box: NetworkBox, inside: AsyncSandbox) -> None:
    names = [f"n{number}.example" for number in range(1100)]
    ports = {80, 443}
    async with box.network() as network:
        host = Host(network, dict.fromkeys(names, ports))
        host.serve = echo
        task = asyncio.create_task(host.answer())
        answers = await ask(inside, *(question(name) for name in names))
        assert {code_of(answer) for answer in answers} == {0}
        assert len({answer[-4:] for answer in answers}) == len(names)
        assert await run(inside, TRY, "127.200.0.2", "443") == "ConnectionRefusedError"
        assert await run(inside, ECHO, names[-1], "443") == "HELLO"
        assert await run(inside, ECHO, names[0], "443") == "HELLO"
        listening = (await run(inside, "print(open('/proc/net/tcp').read())")).count(" 0A ")
        assert listening <= 256 + 2, "a quarter of its descriptors, the resolver and the proxy"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_box_that_was_not_made_for_rules_says_what_it_lacks() -> None:
    with NetworkBox(first_port=1024) as box:
        client = await box.client()
        with pytest.raises(AgentError, match="ip_unprivileged_port_start"):
            await AgentNetwork.open(client)
        await client.call("ping", type=dict[str, Any])
        client.close()


async def test_a_program_on_port_53_keeps_the_resolver_out(box: NetworkBox, inside: AsyncSandbox) -> None:
    have = """
import socket, sys
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("", 53))
print("has it", flush=True)
sys.stdin.read()
"""
    async with await inside.start([sys.executable, "-I", "-c", have], stdin=True) as process:
        await anext(aiter(process))
        client = await box.client()
        with pytest.raises(AgentError, match="a program of the box has port 53"):
            await AgentNetwork.open(client)
        client.close()


async def test_only_the_first_process_of_a_box_has_its_network(guest: Guest) -> None:
    client = await guest.client()
    with pytest.raises(Unsupported, match="first process"):
        await AgentNetwork.open(client)
    client.close()


def test_the_plain_dialect_has_no_network(box: NetworkBox) -> None:
    with box.wire(greet=False) as wire:
        for id, method in enumerate(("network", "resolved", "take", "refuse")):
            assert wire.call(id, method)["error"]["code"] == -32601


def test_a_call_with_wrong_params_is_refused(box: NetworkBox) -> None:
    with box.wire() as wire:
        assert wire.call(1, "take", wish=1)["error"]["data"]["kind"] == "not_found"
        wire.send({"id": 2, "method": "network", "params": {}})
        assert b"ready" in wire.receive()[1]
        for id, ports in enumerate([None, "443", [0], [65536], ["443"], [True], [1] * 257], start=10):
            assert wire.call(id, "resolved", wish=1, ports=ports)["error"]["data"]["kind"] == "invalid", ports
        for id, wish in enumerate([None, "1", [], {}, True, 10**30, -1], start=30):
            assert wire.call(id, "take", wish=wish)["error"]["data"]["kind"] == "not_found", wish
            assert wire.call(id + 50, "refuse", wish=wish)["result"] == {}
        with box.wire() as other:
            assert other.call(1, "refuse", wish=1)["error"]["data"]["kind"] == "not_found"
        wire.send({"method": "cancel", "params": {"id": 2}})
        assert wire.answer(2)["result"] == {}
        assert wire.call(3, "take", wish=1)["error"]["data"]["kind"] == "not_found"


def test_a_box_whose_network_is_watched_is_still_idle() -> None:
    with NetworkBox(idle_s=1.0) as box, box.wire() as wire:
        wire.send({"id": 1, "method": "network", "params": {}})
        assert b"ready" in wire.receive()[1]
        wait_until(lambda: box.process.poll() is not None, "the box ended for want of use")


@pytest.mark.parametrize("rules", [True, False])
def test_an_agent_reads_the_code_of_its_network_before_that_is_asked_for_if_its_box_has_rules(rules: bool) -> None:
    guest = Guest(rules=rules)
    guest.program = shutil.copytree(GUEST, guest.home / "agent")
    mark = guest.home / "read"
    with (guest.program / "network.py").open("a") as source:
        source.write(f"\nopen({str(mark)!r}, 'w').close()\n")
    with guest, guest.wire() as wire:
        if rules:
            wait_until(mark.exists, "it was read")
        assert wire.call(1, "exec", argv=["true"])["result"]["exit_code"] == 0
        assert mark.exists() == rules


async def test_what_the_host_does_not_answer_in_time_is_refused() -> None:
    with NetworkBox(wish_s=0.3) as box:
        inside = box.sandbox()
        async with box.network() as network:
            assert await run(inside, TRY, "127.200.0.1", "3128") == "ConnectionResetError"
            assert [code_of(answer) for answer in await ask(inside, question("pypi.org"))] == [SERVER_FAILED]
            wishes = network.wishes()
            opened, asked = await anext(wishes), await anext(wishes)
            assert isinstance(opened, OpenProxy)
            assert isinstance(asked, Resolve)
            await network.resolved(asked.wish, {443})
            with pytest.raises(PathNotFound):
                await network.take(opened.wish).read()
        await inside.close()


async def test_connections_leave_descriptors_for_others() -> None:
    many = """
import socket
links, broken = [], 0
for _ in range(40):
    try:
        links.append(socket.create_connection(("127.200.0.1", 3128), 20))
        links[-1].sendall(b"x")
        broken += links[-1].recv(1) != b"X"
    except OSError:
        broken += 1
print(broken)
"""
    with NetworkBox(descriptors=64) as box:
        inside = box.sandbox()
        async with answering(box) as host:
            host.serve = echo
            assert await run(inside, many) == "8", "half of its descriptors are for connections"
            assert await run(inside, ECHO, "127.200.0.1", "3128") == "HELLO", "and are free again"
        await inside.close()


async def test_garbage_to_the_resolver_does_no_harm(box: NetworkBox, inside: AsyncSandbox) -> None:
    pelt = """
import os, random, socket, sys
good = bytes.fromhex(sys.argv[1])
chance = random.Random(13)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
for _ in range(2000):
    data = bytearray(good if chance.random() < 0.7 else os.urandom(chance.randrange(100)))
    for _ in range(chance.randrange(4)):
        if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
    udp.sendto(bytes(data), ("127.0.0.1", 53))
for _ in range(100):
    with socket.create_connection(("127.0.0.1", 53), 20) as link:
        link.sendall(os.urandom(chance.randrange(300)))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(20)
udp.sendto(good, ("127.0.0.1", 53))
print(udp.recv(512)[:4].hex())
"""
    async with answering(box, pypi_org={443}):
        assert await run(inside, pelt, question("pypi.org").hex()) == "00078180"


@pytest.mark.parametrize("python", interpreters().values(), ids=interpreters())
async def test_every_python_that_a_box_may_have_can_do_it(python: str) -> None:
    with NetworkBox(python) as box:
        inside = box.sandbox()
        async with answering(box, pypi_org={443}) as host:
            host.serve = echo
            assert await run(inside, ECHO, "pypi.org", "443") == "HELLO"
        await inside.close()


async def test_ten_megabytes_come_through_whole_to_a_slow_reader(box: NetworkBox, inside: AsyncSandbox) -> None:
    read = """
import hashlib, socket
link = socket.create_connection(("pypi.org", 443), 20)
digest, count = hashlib.sha256(), 0
while piece := link.recv(50_000):
    digest.update(piece)
    count += len(piece)
link.sendall(digest.hexdigest().encode() * 50_000)
link.close()
print(count, digest.hexdigest())
"""
    content = os.urandom(10_000_000)
    back = bytearray()

    async def send(tunnel: AsyncTunnel) -> None:
        await tunnel.write(content)
        await tunnel.close_write()
        while data := await tunnel.read():
            back.extend(data)

    async with answering(box, pypi_org={443}) as host:
        host.serve = send
        digest = hashlib.sha256(content).hexdigest()
        assert await run(inside, read) == f"{len(content)} {digest}"
        async with asyncio.timeout(20):
            await host.idle.wait()
    assert back == digest.encode() * 50_000


async def test_a_connection_that_ends_in_order_delivers_all_that_was_written(
    box: NetworkBox, inside: AsyncSandbox
) -> None:
    slow = """
import socket, sys
link = socket.socket()
link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
link.connect(("127.200.0.1", 3128))
link.sendall(b"a request that nobody reads" * 1000)
print(link.recv(1), flush=True)
sys.stdin.read()
count = 1
while piece := link.recv(1 << 16):
    count += len(piece)
print(count)
"""
    size = 400_000
    async with box.network() as network, asyncio.timeout(30):
        wishes = network.wishes()
        process = await inside.start([sys.executable, "-I", "-c", slow], stdin=True)
        wish = await anext(wishes)
        assert isinstance(wish, OpenProxy)
        async with network.take(wish.wish) as tunnel:
            await tunnel.write(bytes(size))
            await tunnel.close_write()
        output = aiter(process)
        assert (await anext(output))[1] == b"b'\\x00'\n"
        await process.close_stdin()
        assert (await anext(output))[1] == f"{size}\n".encode()


async def test_a_connection_that_is_broken_off_with_bytes_on_their_way_is_reset(
    box: NetworkBox, inside: AsyncSandbox
) -> None:
    read = """
import socket
try:
    link = socket.create_connection(("127.200.0.1", 3128), 20)
    while link.recv(1 << 16):
        pass
    print("ended")
except ConnectionResetError:
    print("reset")
"""

    async def half(tunnel: AsyncTunnel) -> None:
        await tunnel.write(bytes(400_000))

    async with answering(box) as host:
        host.serve = half
        assert await run(inside, read) == "reset"
