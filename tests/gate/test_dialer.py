"""Names and connections on real sockets of the loopback."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from loopback import served

from skerry.gate.base import Late, Refused, Unreachable
from skerry.gate.dialer import Dialer, SocketDuplex, is_own_address

from .box import PATIENCE_S, policy

LOOPBACK = ipaddress.ip_address("127.0.0.1")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


async def read_all(duplex: SocketDuplex) -> bytes:
    found = b""
    async with asyncio.timeout(PATIENCE_S):
        while data := await duplex.read():
            found += data
    return found


def never(name: str) -> Sequence[str]:
    raise AssertionError(f"{name} was looked up")


class Names:
    """A resolver that is asked for one answer after the other."""

    def __init__(self, *answers: list[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        return self._answers.pop(0)


async def test_the_checked_address_is_dialled_and_bytes_go_both_ways() -> None:
    async with served(echo) as port:
        rules = policy([f"a.test:{port}", f"127.0.0.1:{port}"])
        dialer = Dialer(Names(["127.0.0.1"]))
        addresses = await dialer.find(rules, "a.test", port)
        assert addresses == (LOOPBACK,)
        duplex, address = await dialer.dial("a.test", addresses, port)
        assert address == LOOPBACK
        sent = bytes(range(256)) * 8192

        async def send() -> None:
            await duplex.write(sent)
            await duplex.close_write()

        sending = asyncio.create_task(send())
        assert await read_all(duplex) == sent
        await sending
        await duplex.close()
        await duplex.close()


async def test_names_of_the_configuration_are_not_looked_up() -> None:
    rules = policy(["db.internal:5432"], hosts={"db.internal": ("10.1.0.5", "::ffff:10.1.0.6")})
    addresses = await Dialer(never).find(rules, "db.internal", 5432)
    assert addresses == (ipaddress.ip_address("10.1.0.5"), ipaddress.ip_address("10.1.0.6"))


async def test_an_address_is_not_looked_up() -> None:
    assert await Dialer(never).find(policy(["10.1.0.0/16"]), "10.1.0.5", 443) == (ipaddress.ip_address("10.1.0.5"),)


@pytest.mark.parametrize(
    "answer", [["127.0.0.1"], ["1.1.1.1", "10.0.0.1"], ["::ffff:169.254.169.254"], ["64:ff9b::a00:1"]]
)
async def test_a_name_of_which_one_address_may_not_be_reached_is_refused(answer: list[str]) -> None:
    with pytest.raises(Refused, match="not an address of the internet"):
        await Dialer(Names(answer), is_own=lambda _: False).find(policy(["a.test"]), "a.test", 443)


async def test_a_name_that_first_is_global_and_then_private_is_judged_by_what_is_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = Names(["1.1.1.1"], ["127.0.0.1"])
    dialer = Dialer(names, is_own=lambda _: False)
    rules = policy(["a.test"])
    checked = await dialer.find(rules, "a.test", 443)
    assert checked == (ipaddress.ip_address("1.1.1.1"),)
    assert await dialer.find(rules, "a.test", 443) == checked  # for a while the answer is kept
    assert names.asked == ["a.test"]
    monkeypatch.setattr("skerry.gate.dialer._FRESH_S", 0.0)
    dialer = Dialer(Names(["1.1.1.1"], ["127.0.0.1"]), is_own=lambda _: False)
    await dialer.find(rules, "a.test", 443)
    with pytest.raises(Refused, match="is at 127"):
        await dialer.find(rules, "a.test", 443)


async def test_a_name_that_is_not_known_is_unreachable() -> None:
    def unknown(name: str) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(Unreachable, match="cannot be resolved: Name or service not known"):
        await Dialer(unknown).find(policy(["a.test"]), "a.test", 443)
    with pytest.raises(Unreachable, match="cannot be resolved"):
        await Dialer(Names(["fe80::1%eth0"])).find(policy(["a.test"]), "a.test", 443)


async def test_many_who_ask_for_a_name_at_once_ask_one_time() -> None:
    names = Names(["1.1.1.1"])
    dialer = Dialer(names, is_own=lambda _: False)
    found = await asyncio.gather(*(dialer.find(policy(["a.test"]), "a.test", 443) for _ in range(50)))
    assert len(set(found)) == 1
    assert names.asked == ["a.test"]


@asynccontextmanager
async def hanging() -> AsyncIterator[Callable[[str], Sequence[str]]]:
    """A resolver that answers only at the end."""
    over = threading.Event()

    def look_up(name: str) -> Sequence[str]:
        over.wait(PATIENCE_S)
        return ["1.1.1.1"]

    try:
        yield look_up
    finally:
        over.set()


async def test_a_resolver_that_hangs_is_given_up_and_holds_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.gate.dialer._LOOKUP_S", 0.05)
    monkeypatch.setattr("skerry.gate.dialer._LOOKUPS_OF_ONE", 3)
    async with hanging() as look_up:
        dialer = Dialer(look_up)
        before = threading.active_count()
        rules = policy(["*.test"])
        asked = (dialer.find(rules, f"a{number}.test", 443) for number in range(20))
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert threading.active_count() == before + 3
        assert [type(each) for each in found] == [Late] * 3 + [Refused] * 17


async def test_an_address_that_refuses_is_followed_by_the_next() -> None:
    async with served(echo) as port:
        nobody = ipaddress.ip_address("127.0.0.2")
        duplex, address = await Dialer(never).dial("a.test", (nobody, LOOPBACK), port)
        assert address == LOOPBACK
        await duplex.close()


async def test_a_host_that_refuses_is_unreachable() -> None:
    async with served(echo) as port:
        pass
    with pytest.raises(Unreachable, match=f"a.test cannot be reached on port {port}: .*refused"):
        await Dialer(never).dial("a.test", (LOOPBACK,), port)


async def test_a_host_that_does_not_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.gate.dialer._DIAL_S", 0.1)
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        others = []
        try:
            for _ in range(8):  # what is beyond its queue gets no answer
                other = socket.socket()
                other.setblocking(False)
                other.connect_ex(full.getsockname())
                others.append(other)
            with pytest.raises(Late, match="did not answer"):
                await Dialer(never).dial("a.test", (LOOPBACK,), full.getsockname()[1])
        finally:
            for other in others:
                other.close()


async def test_whoever_waits_for_a_connection_that_is_closed_hears_of_it() -> None:
    async with served(echo) as port:
        duplex, _ = await Dialer(never).dial("a.test", (LOOPBACK,), port)
        reading = asyncio.create_task(duplex.read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await duplex.close()
        with pytest.raises(OSError, match="was closed"):
            await reading


async def test_a_read_that_is_cancelled_loses_nothing() -> None:
    async with served(echo) as port:
        duplex, _ = await Dialer(never).dial("a.test", (LOOPBACK,), port)
        reading = asyncio.create_task(duplex.read())
        await asyncio.sleep(0)
        reading.cancel()
        await duplex.write(b"hello")
        await duplex.close_write()
        assert await read_all(duplex) == b"hello"
        await duplex.close()


def test_addresses_of_this_machine_are_known() -> None:
    assert is_own_address(LOOPBACK)
    assert is_own_address(ipaddress.ip_address("127.1.2.3"))
    assert not is_own_address(ipaddress.ip_address("192.0.2.7"))
    assert not is_own_address(ipaddress.ip_address("2001:db8::7"))


def test_addresses_of_this_machine_are_known_where_all_can_be_bound_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry.gate.dialer._can_bind", lambda *_: True)
    assert is_own_address(LOOPBACK)
    assert not is_own_address(ipaddress.ip_address("192.0.2.7"))
