"""A sandbox's network as its box sees it: wishes answered by rules, within bounds, each refusal with its line."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from loopback import served

from skerry.errors import LimitReached, NotFound
from skerry.gate.base import Dial, Duplex, Meter, Policy, Refused
from skerry.gate.bounds import Bucket, Limits, Tally
from skerry.gate.dialer import Dialer, SocketDuplex
from skerry.gate.relay import Turns
from skerry.model.secrets import Secret
from skerry.model.spec import SandboxId, new_id

from .box import ID, PATIENCE_S, Lines, Rerouted, Sandbox, WasRefused, Web, has_open, policy, serving
from .test_dialer import echo
from .test_inspect import greeting

ALLOW = ("a.test", "b.test", "raw.test:7", "127.0.0.1", "127.0.0.1:7")
GET = b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"


@asynccontextmanager
async def echoing(rules: Policy | None = None, **more: Any) -> AsyncIterator[Sandbox]:
    """A sandbox whose every host says back what it hears."""
    async with served(echo) as port, serving(rules or policy(ALLOW), dialer=Rerouted(port), **more) as sandbox:
        yield sandbox


async def test_a_name_has_the_ports_of_its_rules_in_every_spelling() -> None:
    async with serving(policy(["a.test", "a.test:22", "*.wild.test"], ["a.test:80"])) as sandbox:
        assert await sandbox.box.resolve("a.test") == {22, 443}
        assert await sandbox.box.resolve("A.Test.") == {22, 443}
        assert await sandbox.box.resolve("x.wild.test") == {80, 443}
        assert sandbox.ledger.all == []


@pytest.mark.parametrize(
    "name", ["evil.test", "wild.test", "a.test.evil.test", "127.0.0.1", "127.1", "0x7f000001", "a..b"]
)
async def test_a_name_that_no_rule_allows_does_not_exist_and_leaves_a_line(name: str) -> None:
    async with serving(policy(["a.test", "*.wild.test", "127.0.0.1"])) as sandbox:
        assert await sandbox.box.resolve(name) == set()
        assert [line["name"] for line in sandbox.ledger.of("resolve")] == [name]


async def test_a_name_that_would_lead_to_a_program_of_the_box_leaves_a_line() -> None:
    async with serving(policy(["a.test"])) as sandbox:
        sandbox.box.taken = {80}
        await sandbox.box.resolve("a.test")
        (line,) = await sandbox.ledger.wait("resolve")
        assert line["name"] == "a.test"
        assert line["reason"] == "a program of the box has port 80 at all addresses, and would be reached as a.test"


async def test_what_the_agent_could_not_do_is_a_line() -> None:
    async with serving(policy()) as sandbox:
        for number in range(3):
            sandbox.box.warn(f"port {number}")
        await sandbox.box.resolve("a.test")  # all before it were read
        told = [line["reason"] for line in sandbox.ledger.of("refuse")]
        assert told == [f"its agent says: port {number}" for number in range(3)]


async def test_names_beyond_a_rate_wait_and_are_answered() -> None:
    async with serving(policy(["a.test"]), limits=Limits(names_per_s=200, names_burst=1)) as sandbox:
        assert await asyncio.gather(*(sandbox.box.resolve("a.test") for _ in range(5))) == [{80, 443}] * 5


async def test_bytes_go_both_ways_and_both_ends_are_told_of() -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.connect("raw.test", 7)
        sent = bytes(range(256)) * 4096
        sending = asyncio.create_task(client.send(sent))
        assert await client.read(len(sent)) == sent
        await sending
        client.writer.write_eof()
        assert await client.rest() == b""
        (closed,) = await sandbox.ledger.wait("close")
        assert sandbox.ledger.of("connect") == [
            {"kind": "connect", "name": "raw.test", "port": 7, "address": "127.0.0.1", "rule": "raw.test:7"}
        ]
        assert (closed["name"], closed["up"], closed["down"]) == ("raw.test", len(sent), len(sent))
        assert closed["seconds"] >= 0
        assert "secrets" not in closed


async def test_a_server_may_speak_first_and_end_first() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.write(await reader.readexactly(6))
        await writer.drain()

    async with served(greet) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("raw.test", 7)
        assert await client.until(b"\n") == b"220 hello\r\n"
        await client.send(b"QUIT\r\n")
        assert await client.rest() == b"QUIT\r\n"
        client.writer.close()
        await sandbox.ledger.wait("close")


async def test_text_goes_through_as_it_is_typed() -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.connect("raw.test", 7)
        for character in b"hello\r\nhow are you":
            await client.send(bytes([character]))
            assert await client.read(1) == bytes([character])


@pytest.mark.parametrize("request_line", [b"FROB / HTTP/1.1\r\n", b"get / HTTP/1.1\r\n", b"\r\n\r\n\nGET / HTTP/1.0\n"])
async def test_a_request_in_pieces_of_which_some_went_through_does_not_get_to_its_end(request_line: bytes) -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.connect("raw.test", 7)
        await client.send(request_line[:5])
        assert await client.read(5) == request_line[:5]
        await client.send(request_line[5:7])
        assert await client.read(2) == request_line[5:7]
        assert await client.ask(request_line[7:] + b"Host: evil.test\r\n\r\n") == b""
        assert "in pieces" in sandbox.ledger.reasons()


@pytest.mark.parametrize("port", [7, 80, 443])
async def test_a_greeting_of_the_host_that_was_asked_for_passes_untouched(port: int) -> None:
    rules = policy([f"a.test:{port}", f"127.0.0.1:{port}"])
    async with echoing(rules) as sandbox:
        client = await sandbox.box.connect("A.TEST.", port)
        hello = greeting("a.test")
        for at in range(0, len(hello), 100):
            await client.send(hello[at : at + 100])
        assert await client.read(len(hello)) == hello


@pytest.mark.parametrize("name", ["evil.test", "b.test", None])
async def test_a_greeting_of_another_host_ends_the_connection_and_nothing_is_sent(name: str | None) -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.connect("a.test", 443)
        assert await client.ask(greeting(name)) == b"\x15\x03\x03\x00\x02\x02\x70"
        (line,) = await sandbox.ledger.wait("refuse")
        assert (line["name"], line["port"]) == ("a.test", 443)
        assert "the TLS greeting names" in line["reason"]
        (closed,) = await sandbox.ledger.wait("close")
        assert (closed["up"], closed["down"]) == (0, 0)


async def test_a_greeting_within_a_tunnel_of_the_proxy_is_looked_at_too() -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.proxy()
        await client.send(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test:443\r\n\r\n")
        await client.until(b"\r\n\r\n")
        assert await client.ask(greeting("b.test")) == b"\x15\x03\x03\x00\x02\x02\x70"
        (line,) = await sandbox.ledger.wait("refuse")
        assert line["reason"] == "the TLS greeting names b.test, and a.test was asked for"


@pytest.mark.parametrize(
    ("port", "begun"),
    [
        (None, b"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
        (None, b"GET http://evil.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
        (80, b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
        (443, greeting("evil.test")),
    ],
    ids=["tunnel", "proxy", "request", "greeting"],
)
async def test_who_hangs_up_before_the_answer_leaves_a_line_all_the_same(port: int | None, begun: bytes) -> None:
    async with echoing() as sandbox:
        client = await (sandbox.box.proxy() if port is None else sandbox.box.connect("a.test", port))
        client.writer.write(begun)
        client.writer.transport.abort()
        (line,) = await sandbox.ledger.wait("refuse")
        assert "evil.test" in line["reason"]


@pytest.mark.parametrize(
    ("name", "port", "reason"),
    [
        ("evil.test", 443, "no rule allows evil.test on port 443"),
        ("a.test", 22, "no rule allows a.test on port 22"),
        ("a.test.evil.test", 443, "no rule allows"),
        ("xn--a-test", 443, "no rule allows"),
        ("127.1", 443, "is no host name"),
        ("127.0.0.2", 443, "no rule allows 127.0.0.2"),
        ("denied.a.test", 443, "denies"),
        ("private.a.test", 443, "is at 10.0.0.1, which is not an address of the internet"),
        ("metadata.a.test", 80, "is at 169.254.169.254"),
        ("mapped.a.test", 443, "is at 127.0.0.1"),
        ("mixed.a.test", 443, "is at 10.0.0.1"),
        ("unknown.a.test", 443, "cannot be resolved"),
        ("refusing.a.test", 7, "cannot be reached on port 7"),
    ],
)
async def test_what_may_not_be_reached_is_refused_with_its_reason(name: str, port: int, reason: str) -> None:
    answers = {
        "private.a.test": ["10.0.0.1"],
        "metadata.a.test": ["169.254.169.254"],
        "mapped.a.test": ["::ffff:127.0.0.1"],
        "mixed.a.test": ["1.1.1.1", "10.0.0.1"],
        "refusing.a.test": ["127.0.0.1"],
    }
    rules = policy(["a.test", "*.a.test", "*.a.test:7", "127.0.0.1:7"], ["denied.a.test"])
    async with serving(rules, answers=answers) as sandbox:
        with pytest.raises(WasRefused):
            await sandbox.box.connect(name, port)
        (line,) = await sandbox.ledger.wait("refuse")
        assert (line["name"], line["port"]) == (name, port)
        assert reason in line["reason"]
        assert not sandbox.ledger.of("connect")


async def test_a_name_that_moves_to_a_private_address_is_refused_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.gate.dialer._FRESH_S", 0.0)
    answers = {"a.test": ["127.0.0.1"]}
    async with served(echo) as port:
        rules = policy([f"a.test:{port}", f"127.0.0.1:{port}"])
        async with serving(rules, answers=answers) as sandbox:
            client = await sandbox.box.connect("a.test", port)
            answers["a.test"] = ["127.0.0.2"]
            with pytest.raises(WasRefused):
                await sandbox.box.connect("a.test", port)
            (line,) = await sandbox.ledger.wait("refuse")
            assert "a.test is at 127.0.0.2" in line["reason"]
            await client.send(b"still\n")
            assert await client.read(6) == b"still\n"


async def test_a_redirect_is_followed_by_the_client_and_judged_anew() -> None:
    async def redirect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async with served(redirect) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(GET)
        assert b"169.254.169.254" in await client.until(b"\r\n\r\n")
        follower = await sandbox.box.proxy()
        answer = await follower.ask(b"GET http://169.254.169.254/ HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert "no rule allows 169.254.169.254 on port 80" in sandbox.ledger.reasons()


async def test_other_rules_hold_for_the_next_wish_and_end_what_they_forbid() -> None:
    async with echoing() as sandbox:
        kept = await sandbox.box.connect("raw.test", 7)
        ended = await sandbox.box.connect("a.test", 443)
        web = await sandbox.box.connect("a.test", 80)
        waiting = await sandbox.box.proxy()
        await ended.send(b"SSH-2.0-x\r\n")
        await ended.until(b"\n")
        await sandbox.session.update(policy([*ALLOW[2:]]))
        assert [line["name"] for line in sandbox.ledger.of("close")] == ["a.test", "a.test"]
        assert "the rules changed: no rule allows a.test" in sandbox.ledger.of("close")[0]["reason"]
        assert await ended.rest() == b""
        assert await web.rest() == b""
        await kept.send(b"on\n")
        assert await kept.read(3) == b"on\n"
        assert await sandbox.box.resolve("a.test") == set()
        with pytest.raises(WasRefused):
            await sandbox.box.connect("a.test", 443)
        assert b"403 " in await waiting.ask(b"CONNECT a.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n")
        await sandbox.session.update(policy(ALLOW))
        await sandbox.box.connect("a.test", 443)


async def test_rules_that_deny_an_address_end_connections_to_it() -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.connect("a.test", 443)
        await sandbox.session.update(policy(ALLOW, ["127.0.0.1"]))
        assert await client.rest() == b""
        assert "which a rule denies" in sandbox.ledger.of("close")[0]["reason"]


async def test_a_connection_that_is_being_made_ends_with_the_rule_that_allowed_it() -> None:
    begun, over = threading.Event(), threading.Event()

    def look_up(name: str) -> list[str]:
        begun.set()
        over.wait(PATIENCE_S)
        return ["127.0.0.1"]

    async with serving(policy(["a.test"]), dialer=Dialer(look_up)) as sandbox:
        connecting = asyncio.create_task(sandbox.box.connect("a.test", 443))
        assert await asyncio.to_thread(begun.wait, PATIENCE_S)
        await sandbox.session.update(policy([]))
        with pytest.raises(WasRefused):
            await connecting
        over.set()
        assert not sandbox.ledger.of("connect")


async def test_rules_that_change_while_a_host_is_dialled_are_the_ones_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(echo) as port:
        dialer = Rerouted(port)
        async with serving(policy(ALLOW), dialer=dialer) as sandbox:
            dial = dialer.dial

            async def change(host: str, addresses: Any, port: int) -> Any:
                sandbox.session._shared.policy = policy([])
                return await dial(host, addresses, port)

            monkeypatch.setattr(dialer, "dial", change)
            with pytest.raises(WasRefused):
                await sandbox.box.connect("a.test", 443)
            assert not sandbox.ledger.of("connect")


async def test_connections_beyond_the_bound_are_refused_and_the_next_is_not() -> None:
    async with echoing(limits=Limits(connections=3)) as sandbox:
        clients = [await sandbox.box.connect("a.test", 443) for _ in range(2)]
        await sandbox.box.proxy()
        with pytest.raises(WasRefused):
            await sandbox.box.connect("a.test", 443)
        with pytest.raises(WasRefused):
            await sandbox.box.proxy()
        assert [line["reason"] for line in sandbox.ledger.of("refuse")] == ["more than 3 connections at once"] * 2
        clients[0].writer.close()
        await has_open(sandbox.session, 2)
        await sandbox.box.connect("a.test", 443)


async def test_one_sandbox_leaves_room_for_others_where_the_gate_has_little() -> None:
    async with served(echo) as port:
        dialer = Rerouted(port)
        dialer._most_links = 6
        async with serving(policy(ALLOW), dialer=dialer) as greedy, serving(policy(ALLOW), dialer=dialer) as modest:
            for _ in range(3):
                await greedy.box.connect("a.test", 443)
            with pytest.raises(WasRefused):
                await greedy.box.connect("a.test", 443)
            assert "all sandboxes together" in greedy.ledger.reasons()
            await modest.box.connect("a.test", 443)
            await modest.box.connect("a.test", 443)
        assert dialer.links == 0


async def test_new_connections_beyond_a_rate_are_refused() -> None:
    async with echoing(limits=Limits(connections_per_s=0.001, connections_burst=2)) as sandbox:
        for _ in range(2):
            await sandbox.box.connect("a.test", 443)
        with pytest.raises(WasRefused):
            await sandbox.box.connect("a.test", 443)
        assert "new connections a second" in sandbox.ledger.reasons()


@pytest.mark.parametrize("port", [80, 443])
async def test_clients_that_say_nothing_where_the_web_is_do_not_stay(port: int) -> None:
    async with echoing(limits=Limits(first_bytes_s=0.05, connections=20)) as sandbox:
        silent = [await sandbox.box.connect("a.test", port) for _ in range(20)]
        for client in silent:
            assert await client.rest() == b""
        assert "did not say in 0.05 s what it wants" in sandbox.ledger.reasons()
        await has_open(sandbox.session, 0)
        assert len(sandbox.ledger.of("close")) == 20
        client = await sandbox.box.connect("a.test", port)  # there is room again
        assert client is not None


@pytest.mark.parametrize(
    "begun",
    [b"\x16", greeting("a.test")[:50], b"GET / HT", b"GET / HTTP/1.1\r\nHost: a.test\r\n"],
    ids=["a byte of TLS", "half a greeting", "half a line", "half a head"],  # a greeting is another in each process
)
async def test_clients_that_never_finish_what_they_begin_with_do_not_stay(begun: bytes) -> None:
    async with echoing(limits=Limits(first_bytes_s=0.05)) as sandbox:
        client = await sandbox.box.connect("a.test", 80)
        await client.send(begun)
        await client.rest()
        await sandbox.ledger.wait("refuse")
        (closed,) = await sandbox.ledger.wait("close")
        assert closed["up"] == 0


@pytest.mark.parametrize("begun", [b"", b"CONN", b"GET http://a.test/ HTTP/1.1\r\n"])
async def test_clients_of_the_proxy_that_never_finish_their_request_do_not_stay(begun: bytes) -> None:
    async with echoing(limits=Limits(first_bytes_s=0.05)) as sandbox:
        client = await sandbox.box.proxy()
        if begun:
            await client.send(begun)
        assert (await client.rest()).startswith(b"HTTP/1.1 408 ")
        await sandbox.ledger.wait("refuse")


async def test_connections_without_a_byte_end() -> None:
    async with echoing(limits=Limits(idle_s=0.05, tick_s=0.01)) as sandbox:
        client = await sandbox.box.connect("raw.test", 7)
        await client.send(b"x\n")
        assert await client.rest() == b"x\n"
        (closed,) = await sandbox.ledger.wait("close")
        assert closed["reason"] == "no byte either way for 0.05 s"


async def test_a_body_of_a_byte_now_and_then_holds_up_nobody_and_ends_with_its_rule() -> None:
    web = Web()
    async with served(web) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        slow = await sandbox.box.connect("a.test", 80)
        await slow.send(b"POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000000\r\n\r\n")
        for _ in range(5):
            await slow.send(b"x")
            other = await sandbox.box.connect("a.test", 80)
            await other.send(GET)
            await other.until(b"hello")
        await sandbox.session.update(policy([]))
        assert await slow.rest() == b""
        assert sandbox.session.connections == 0
        assert any(line.get("reason", "").startswith("the rules changed") for line in sandbox.ledger.of("close"))


async def test_without_the_ledger_nothing_goes_out() -> None:
    heard = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read())

    async with served(hear) as port, serving(policy(ALLOW), dialer=Rerouted(port)) as sandbox:
        sandbox.ledger.error = LimitReached("the disk is full")
        with pytest.raises(WasRefused):
            await sandbox.box.connect("raw.test", 7)
        client = await sandbox.box.proxy()
        answer = await client.ask(b"CONNECT raw.test:7 HTTP/1.1\r\nHost: raw.test:7\r\n\r\nsecret\n")
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"the disk is full" in answer
        sandbox.ledger.error = None
    assert heard in ([], [b""], [b"", b""])


async def test_all_connections_end_with_the_agents_side() -> None:
    async with echoing() as sandbox:
        client = await sandbox.box.connect("raw.test", 7)
        sandbox.box.end()
        async with asyncio.timeout(PATIENCE_S):
            await sandbox.serving
        assert await client.rest() == b""
        assert [line["kind"] for line in sandbox.ledger.all] == ["connect", "close"]
        sandbox.box.end()


class Changing:
    """Stands for the part that opens connections to hosts of secrets."""

    def __init__(self) -> None:
        self.heard = b""

    def is_for(self, policy: Policy, name: str, port: int) -> bool:
        return any(name in secret.hosts for secret in policy.secrets.values())

    async def serve(self, policy: Policy, name: str, port: int, client: Duplex, dial: Dial, meter: Meter) -> None:
        self.heard += await client.read()
        if b"bad" in self.heard:
            raise Refused("it is no request that could be sent on")
        server = await dial()
        meter.secrets.add("TOKEN")
        await server.write(b"changed\n")
        await client.write(await server.read())
        self.heard += await client.read()


SECRETS = {"TOKEN": Secret(hosts=("api.test",))}
OPENED = policy(["127.0.0.1"], secrets=SECRETS)


async def test_connections_to_hosts_of_secrets_are_opened_and_the_names_of_those_are_told() -> None:
    opener = Changing()
    async with echoing(OPENED, opener=opener) as sandbox:
        client = await sandbox.box.connect("api.test", 443)
        await client.send(b"hello")
        assert await client.read(8) == b"changed\n"
        client.writer.close()
        (closed,) = await sandbox.ledger.wait("close")
        assert (closed["secrets"], closed["up"], closed["down"]) == (["TOKEN"], 8, 8)
        assert sandbox.ledger.of("connect")[0]["rule"] == "api.test"


async def test_a_request_that_the_opener_has_refused_is_answered_once_and_leaves_a_line() -> None:
    class Answering(Changing):
        async def serve(self, policy: Policy, name: str, port: int, client: Duplex, dial: Dial, meter: Meter) -> None:
            await client.read()
            await client.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            raise Refused("it has no value")

    async with echoing(OPENED, opener=Answering()) as sandbox:
        client = await sandbox.box.proxy()
        answer = await client.ask(b"GET http://api.test/ HTTP/1.1\r\nHost: api.test\r\n\r\n")
        assert answer == b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n"
        (line,) = await sandbox.ledger.wait("refuse")
        assert (line["name"], line["reason"]) == ("api.test", "it has no value")


async def test_what_cannot_be_opened_is_refused_before_anything_is_dialled() -> None:
    async with echoing(OPENED, opener=Changing()) as sandbox:
        client = await sandbox.box.connect("api.test", 443)
        assert await client.ask(b"bad") == b""
        (line,) = await sandbox.ledger.wait("refuse")
        assert line["reason"] == "it is no request that could be sent on"
        assert not sandbox.ledger.of("connect")


async def test_secrets_that_change_end_connections_that_were_opened_for_them() -> None:
    async with echoing(OPENED, opener=Changing()) as sandbox:
        client = await sandbox.box.connect("api.test", 443)
        await client.send(b"hello")
        await client.read(8)
        await sandbox.session.update(policy(["127.0.0.1", "api.test"]))
        assert await client.rest() == b""
        assert sandbox.ledger.of("close")[0]["reason"] == "the secrets changed"


async def test_tunnels_and_requests_of_the_proxy_to_hosts_of_secrets_are_opened() -> None:
    opener = Changing()
    async with echoing(OPENED, opener=opener) as sandbox:
        client = await sandbox.box.proxy()
        await client.send(b"CONNECT api.test:443 HTTP/1.1\r\nHost: api.test:443\r\n\r\nhello")
        await client.until(b"\r\n\r\n")
        assert await client.read(8) == b"changed\n"
        opener.heard = b""
        client = await sandbox.box.proxy()
        await client.send(b"PUT http://api.test/x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 2\r\n\r\nhi" + GET)
        assert await client.read(8) == b"changed\n"
        await sandbox.ledger.wait("close", 1)
        assert opener.heard == b"PUT /x HTTP/1.1\r\nHost: api.test\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


DB = new_id()


class Fleet:
    """Other members, by what they say."""

    async def dial(self, policy: Policy, name: str, port: int) -> tuple[Duplex, SandboxId]:
        if name != "db":
            raise NotFound(f"{name} is not ready")
        ours, theirs = socket.socketpair()
        theirs.sendall(b"I am db\n")
        theirs.close()
        return SocketDuplex(ours), DB


async def test_members_are_reached_by_their_names_and_told_of() -> None:
    rules = policy(reach={"db": frozenset({5432}), "gone": frozenset({5432})})
    async with serving(rules, members=Fleet()) as sandbox:
        assert await sandbox.box.resolve("db") == {5432}
        client = await sandbox.box.connect("db", 5432)
        assert await client.rest() == b"I am db\n"
        client.writer.close()
        await sandbox.ledger.wait("close")
        (line,) = sandbox.ledger.of("connect")
        assert line == {"kind": "connect", "name": "db", "port": 5432, "member": DB, "rule": "reach db:5432"}
        with pytest.raises(WasRefused):
            await sandbox.box.connect("gone", 5432)
        assert "gone is not ready" in sandbox.ledger.reasons()
        with pytest.raises(WasRefused):
            await sandbox.box.connect("db", 80)


async def test_a_sandbox_that_floods_leaves_its_neighbour_its_turns() -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while True:
                writer.write(bytes(1 << 16))
                await writer.drain()

    async with (
        served(flood) as flooding,
        serving(policy(ALLOW), dialer=Rerouted(flooding)) as greedy,
        echoing() as modest,
    ):
        hogs = [await greedy.box.connect("raw.test", 7) for _ in range(20)]
        reading = [asyncio.create_task(hog.rest()) for hog in hogs]
        client = await modest.box.connect("raw.test", 7)
        for _ in range(50):
            await client.send(b"ping\n")
            assert await client.read(5) == b"ping\n"
        assert any(link.meter.down for link in greedy.session._links)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def test_a_share_of_the_loop_is_used_up_and_comes_back_with_the_next_turns() -> None:
    turns, order = Turns(), list[int]()

    async def move(number: int) -> None:
        await turns.mine()
        order.append(number)
        turns.count(1 << 20)

    await turns.mine()
    turns.count(5 << 20)
    given_up = asyncio.create_task(move(-1))
    moves = [asyncio.create_task(move(number)) for number in range(6)]
    await asyncio.sleep(0)
    assert order == []
    given_up.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*moves)
    assert order == [0, 1, 2, 3, 4, 5]


def test_tokens_come_back_at_their_rate_up_to_the_burst() -> None:
    bucket = Bucket(2, 3, now=0)
    assert [bucket.take(0) for _ in range(4)] == [True, True, True, False]
    assert [bucket.take(1) for _ in range(3)] == [True, True, False]
    assert [bucket.take(100) for _ in range(4)] == [True, True, True, False]
    assert bucket.wait_s(100) == 0.5


async def test_refusals_alike_are_one_line_and_a_count_for_a_period() -> None:
    ledger = Lines()
    tally = Tally(ledger, ID, 10, now=0)
    for now in range(5):
        tally.add("resolve", now, name="evil.test", reason="no")
    tally.add("resolve", 5, name="other.test", reason="no")
    assert [line["name"] for line in ledger.all] == ["evil.test", "other.test"]
    tally.flush(9)
    assert len(ledger.all) == 2
    tally.flush(10)
    assert ledger.all[2:] == [{"kind": "resolve", "name": "evil.test", "reason": "no", "count": 4}]
    tally.add("resolve", 11, name="evil.test", reason="no")
    assert len(ledger.all) == 4


async def test_each_connection_that_is_refused_has_its_line_unless_there_are_very_many() -> None:
    ledger = Lines()
    tally = Tally(ledger, ID, 10, now=0)
    for _ in range(5000):
        tally.add("refuse", 1, name="evil.test", port=443, reason="no")
    tally.flush()
    assert 100 < len(ledger.all) < 300
    assert ledger.all[-1]["count"] + len(ledger.all) - 1 == 5000


async def test_a_box_that_asks_for_ever_new_names_does_not_fill_the_ledger() -> None:
    ledger = Lines()
    tally = Tally(ledger, ID, 10, now=0)
    for number in range(5000):
        tally.add("resolve", 1, name=f"{number}.test", reason="no")
    tally.flush()
    assert len(ledger.all) < 300
    assert ledger.all[-1]["count"] + len(ledger.all) - 1 == 5000


async def test_a_ledger_that_is_full_does_not_stop_refusals() -> None:
    async with serving(policy([])) as sandbox:
        sandbox.ledger.error = LimitReached("the disk is full")
        assert await sandbox.box.resolve("evil.test") == set()
        with pytest.raises(WasRefused):
            await sandbox.box.connect("evil.test", 443)
