"""An agent that lies in its frames: the stream ends with a clear error, at once and in bounded memory."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import time
import tracemalloc
from typing import Any

import pytest

from skerry.agent import client as client_module
from skerry.agent.call import UP_WINDOW, WINDOW
from skerry.agent.client import MAX_LINE, AgentClient
from skerry.errors import AgentProtocolError, AgentUnreachable, CallInterrupted, CallTimeout, SkerryError
from skerry.net.stream import FdStream

from .lying_agent import LyingAgent, client_of, turns

LOOP_S = 1.0
"""How long a single hostile input may hold up the loop; on a quiet machine it is a few milliseconds."""


def frame(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass") + b"\n"


BREAKING = {
    "garbage": b"\x00\xff\xfe garbage\n",
    "an empty line": b"\n",
    "not an object": b"[1,2]\n",
    "a string id": b'{"id":"2","result":{}}\n',
    "a float id": b'{"id":2.0,"result":{}}\n',
    "a boolean id": b'{"id":true,"result":{}}\n',
    "an id of 5,000 digits": b'{"id":' + b"1" * 5000 + b',"result":{}}\n',
    "neither id nor method": b'{"result":{}}\n',
    "a null id": b'{"id":null,"result":{}}\n',
    "nesting of 10^5": b'{"id":2,"result":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "nested objects": b'{"id":2,"result":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}\n",
    "NaN": b'{"id":2,"result":NaN}\n',
    "Infinity": b'{"id":2,"result":-Infinity}\n',
    "a lone surrogate": b'{"id":2,"result":"\\ud800"}\n',
    "a long line": b"x" * (MAX_LINE + 2),
    "a number of 10 million digits": b'{"id":2,"result":' + b"9" * 10_000_000 + b"}\n",
    "a negative attachment": b'{"method":"data","params":{"id":2},"bytes":-1}\n',
    "a huge attachment": b'{"method":"data","params":{"id":2},"bytes":1048577}\n',
    "an absurd attachment": b'{"method":"data","params":{"id":2},"bytes":1e300}\n',
    "an attachment as text": b'{"method":"data","params":{"id":2},"bytes":"5"}\n12345',
    "an answer with an attachment": b'{"id":2,"result":{},"bytes":3}\nabc',
    "data on fd 7": b'{"method":"data","params":{"id":2,"fd":7},"bytes":1}\nx',
    "data on fd 0": b'{"method":"data","params":{"id":2,"fd":0},"bytes":1}\nx',
    "data on fd -1": b'{"method":"data","params":{"id":2,"fd":-1},"bytes":1}\nx',
    "an end with an attachment": b'{"method":"end","params":{"id":2},"bytes":1}\nx',
    "a credit with an attachment": b'{"method":"credit","params":{"id":2,"bytes":1},"bytes":1}\nx',
    "credit for bytes never sent": b'{"method":"credit","params":{"id":2,"bytes":1}}\n',
    "no credit": b'{"method":"credit","params":{"id":2,"bytes":0}}\n',
    "negative credit": b'{"method":"credit","params":{"id":2,"bytes":-5}}\n',
    "huge credit": b'{"method":"credit","params":{"id":2,"bytes":9223372036854775807}}\n',
    "an error without a code": b'{"id":2,"error":{"message":"x"}}\n',
    "an error that is a string": b'{"id":2,"error":"boom"}\n',
    "params that are a list": b'{"method":"data","params":[2],"bytes":1}\nx',
}


@pytest.mark.parametrize("hostile", BREAKING.values(), ids=BREAKING)
async def test_a_broken_frame_ends_the_stream_with_a_protocol_error(hostile: bytes) -> None:
    client, agent = await client_of()
    call = client.open("exec")
    begin = time.perf_counter()
    agent.raw(hostile)
    assert time.perf_counter() - begin < LOOP_S
    with pytest.raises(AgentProtocolError, match="broke the protocol"):
        await call.result(dict[str, Any])
    assert not client.is_open
    assert not agent.is_open
    with pytest.raises(AgentProtocolError):
        client.open("ping")


HOSTILE_RESULTS = {
    "1e400": b"1e400",
    "10^6 digits": b"9" * (MAX_LINE - 100),
    "bytes that are not UTF-8": b'{"a":"\xff"}',
    "a key that is not UTF-8": b'{"\xff":1}',
    "a list": b"[]",
    "null": b"null",
    "a string": b'"x"',
    "350,000 empty lists": b"[" + b"[]," * 340_000 + b"[]]",
}


@pytest.mark.parametrize("result", HOSTILE_RESULTS.values(), ids=HOSTILE_RESULTS)
async def test_an_answer_of_the_wrong_form_is_a_protocol_error(result: bytes) -> None:
    client, agent = await client_of()
    call = client.open("stat")
    agent.raw(b'{"id":2,"result":' + result + b"}\n")
    begin = time.perf_counter()
    with pytest.raises(AgentProtocolError):
        await call.result(dict[str, int])
    assert time.perf_counter() - begin < LOOP_S


async def test_of_duplicate_keys_none_confuses_the_bookkeeping() -> None:
    client, agent = await client_of()
    first, second = client.open("a"), client.open("b")
    agent.raw(b'{"id":2,"id":3,"result":{"n":1},"result":{"n":2}}\n')
    assert first.done != second.done
    answered = first if first.done else second
    assert (await answered.result(dict[str, int]))["n"] in (1, 2)


async def test_unknown_negative_and_huge_ids_belong_to_nobody() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    for id in (-1, 0, 1, 3, 2**62, -(2**62)):
        agent.raw(b'{"id":%d,"result":{"stolen":1}}\n' % id)
        agent.raw(b'{"method":"data","params":{"id":%d},"bytes":3}\nabc' % id)
        agent.raw(b'{"method":"end","params":{"id":%d}}\n' % id)
        agent.raw(b'{"method":"credit","params":{"id":%d,"bytes":99}}\n' % id)
    assert not call.done
    agent.answer({"id": call.id}, {"mine": 1})
    assert await call.result(dict[str, int]) == {"mine": 1}


async def test_a_second_answer_changes_nothing() -> None:
    client, agent = await client_of()
    call = client.open("a")
    agent.answer({"id": call.id}, {"n": 1})
    agent.answer({"id": call.id}, {"n": 2})
    agent.send({"id": call.id, "error": {"code": 1, "message": "no"}})
    assert await call.result(dict[str, int]) == {"n": 1}
    assert client.is_open


async def test_an_agent_that_never_answers_is_a_timeout() -> None:
    client, agent = await client_of()
    with pytest.raises(CallTimeout):
        await client.call("ping", type=dict[str, Any], timeout_s=0.02)
    assert agent.asked("cancel")
    assert client.is_open


async def test_an_agent_that_never_greets_is_unreachable() -> None:
    agent = LyingAgent()
    agent.answer = lambda *_: None  # type: ignore[method-assign]
    with pytest.raises(AgentUnreachable):
        await AgentClient.greet(agent, timeout_s=0.02)
    assert not agent.is_open


@pytest.mark.parametrize("hello", [{}, {"protocol": 2, "agent": "x", "pid": 1, "started": 0}, {"protocol": "1"}, []])
async def test_a_strange_hello_is_refused_and_the_stream_closed(hello: Any) -> None:
    agent = LyingAgent()
    agent.answer = lambda message, _result: agent.send({"id": message["id"], "result": hello})  # type: ignore[method-assign]
    with pytest.raises(AgentProtocolError):
        await AgentClient.greet(agent, timeout_s=5)
    assert not agent.is_open


async def test_a_late_answer_is_matched_to_no_other_call() -> None:
    client, agent = await client_of()
    with pytest.raises(CallTimeout):
        await client.call("slow", type=dict[str, Any], timeout_s=0.02)
    late = agent.asked("slow")[0]
    call = client.open("next")
    assert call.id != late["id"]
    agent.answer(late, {"late": True})
    agent.data(late["id"], b"late")
    assert not call.done
    agent.answer({"id": call.id}, {"late": False})
    assert await call.result(dict[str, bool]) == {"late": False}


async def test_one_byte_at_a_time_is_still_a_conversation() -> None:
    client, agent = await client_of()
    seen: list[bytes] = []
    call = client.open("exec", on_data=lambda fd, data: seen.append(bytes(data)))
    message = b'{"method":"data","params":{"id":2,"fd":2},"bytes":3}\nabc{"id":2,"result":{}}\n'
    for byte in message:
        agent.raw(bytes([byte]))
    assert await call.result(dict[str, Any]) == {}
    assert b"".join(seen) == b"abc"


async def test_one_byte_now_and_then_does_not_put_off_a_deadline() -> None:
    client, agent = await client_of()

    async def drip() -> None:
        agent.raw(b"{")
        while agent.is_open:
            await asyncio.sleep(0.005)
            agent.raw(b" ")

    dripping = asyncio.create_task(drip())
    try:
        with pytest.raises(CallTimeout):
            await client.call("ping", type=dict[str, Any], timeout_s=0.1)
    finally:
        client.close()
        await dripping


async def test_a_silent_agent_is_found_out_though_the_call_has_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_QUIET_S", 0.02)
    client, agent = await client_of()
    async with asyncio.timeout(10):
        with pytest.raises(AgentUnreachable, match="silent"):
            await client.open("exec").result(dict[str, Any])
    assert agent.asked("ping")


async def test_data_beyond_the_window_ends_the_stream() -> None:
    client, agent = await client_of()
    call = client.open("exec", window=1000)
    agent.data(call.id, b"x" * 1000)
    assert client.is_open
    agent.data(call.id, b"x")
    with pytest.raises(AgentProtocolError, match="credit"):
        await call.result(dict[str, Any])


async def test_data_that_nobody_reads_is_bounded_by_the_window() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    tracemalloc.start()
    try:
        for _ in range(20):
            agent.data(call.id, b"x" * (WINDOW // 4))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not client.is_open
    assert peak < 4 * WINDOW


async def test_a_line_without_end_is_cut_off_in_bounded_memory() -> None:
    client, agent = await client_of()
    tracemalloc.start()
    try:
        for _ in range(100):
            agent.raw(b"x" * 100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not client.is_open
    assert peak < 5 * MAX_LINE


async def test_frames_of_one_byte_do_not_multiply_memory() -> None:
    """A piece of one byte costs Python about fifty: the window counts bytes, so the pieces must be bounded too."""
    client, agent = await client_of()
    window = 1 << 16
    call = client.open("exec", window=window)
    piece = b'{"method":"data","params":{"id":%d,"fd":1},"bytes":1}\nx' % call.id
    tracemalloc.start()
    try:
        agent.raw(piece * window)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 32 * window
    client.close()


async def test_a_flood_of_frames_for_no_call_ends_the_stream() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    for _ in range(30):
        agent.raw(b'{"method":"data","params":{"id":777},"bytes":1}\nx' * 1000)
    with pytest.raises(AgentProtocolError, match="no call"):
        await call.result(dict[str, Any])


NOTHING_NEW = {
    "ends of nobody": {"method": "end", "params": {"id": 777}},
    "ends of one call": {"method": "end", "params": {"id": 2}},
    "empty data": {"method": "data", "params": {"id": 2}, "bytes": 0},
    "unknown notifications": {"method": "weather", "params": {"id": 2}},
    "answers to nobody": {"id": 777, "result": {}},
}


@pytest.mark.parametrize("message", NOTHING_NEW.values(), ids=NOTHING_NEW)
async def test_a_flood_of_frames_that_say_nothing_ends_the_stream(message: dict[str, Any]) -> None:
    client, agent = await client_of()
    call = client.open("exec")
    assert call.id == 2
    flood = json.dumps(message).encode() + b"\n"
    tracemalloc.start()
    try:
        for _ in range(30):
            agent.raw(flood * 1000)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 1 << 20
    assert not client.is_open
    with pytest.raises(AgentProtocolError, match="no call"):
        await call.result(dict[str, Any])


async def test_a_few_unknown_notifications_are_passed_over() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    agent.raw(b'{"method":"weather","params":{"id":%d}}\n' % call.id * 1000)
    agent.answer({"id": call.id}, {})
    assert await call.result(dict[str, Any]) == {}


async def test_end_twice_and_data_after_it_harm_nobody() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    agent.data(call.id, b"a")
    for _ in range(2):
        agent.send({"method": "end", "params": {"id": call.id}})
    chunks = [data async for _, data in call.chunks()]
    assert chunks == [b"a"]
    agent.answer({"id": call.id}, {})
    assert await call.result(dict[str, Any]) == {}


@pytest.mark.parametrize("cut", [b"", b'{"id":2,', b'{"method":"data","params":{"id":2},"bytes":10}\nabc'])
async def test_a_stream_that_closes_mid_frame_interrupts_the_call(cut: bytes) -> None:
    client, agent = await client_of()
    call = client.open("exec")
    agent.raw(cut)
    agent.end(ConnectionResetError("gone"))
    with pytest.raises(CallInterrupted, match="gone"):
        await call.result(dict[str, Any])
    with pytest.raises(SkerryError):
        client.open("ping")


async def test_credit_that_never_comes_bounds_what_is_sent() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    sending = asyncio.create_task(call.send(b"x" * (3 * UP_WINDOW)))
    await turns(100)
    assert agent.uploaded == UP_WINDOW
    agent.send({"method": "credit", "params": {"id": call.id, "bytes": 1000}})
    await turns(100)
    assert agent.uploaded == UP_WINDOW + 1000
    agent.send({"id": call.id, "result": {}})
    await asyncio.wait_for(sending, 5)


async def test_two_who_send_at_once_both_get_on_when_credit_comes() -> None:
    client, agent = await client_of()
    call = client.open("exec")
    await call.send(b"x" * UP_WINDOW)
    senders = [asyncio.create_task(call.send(b"y" * 10)) for _ in range(2)]
    await turns()
    agent.send({"method": "credit", "params": {"id": call.id, "bytes": 100}})
    async with asyncio.timeout(2):
        await asyncio.gather(*senders)


async def test_an_abandoned_call_lets_go_of_whoever_reads_it() -> None:
    client, _agent = await client_of()
    call = client.open("exec")

    async def read() -> None:
        async for _ in call.chunks():
            pass

    reading = asyncio.create_task(read())
    await turns()
    call.abandon()
    await turns()
    try:
        assert reading.done()
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_what_comes_for_an_abandoned_call_reaches_nobody() -> None:
    client, agent = await client_of()
    seen = bytearray()
    call = client.open("read_file", on_data=lambda fd, data: seen.extend(data))
    agent.raw(b'{"method":"data","params":{"id":%d},"bytes":6}\nabc' % call.id)
    call.abandon()
    agent.raw(b"def")
    assert seen == b"abc"
    assert client.is_open


async def test_an_error_of_the_callers_own_callback_reaches_the_caller() -> None:
    client, agent = await client_of()

    def fail(_fd: int, _data: memoryview) -> None:
        raise ZeroDivisionError

    call = client.open("exec", on_data=fail)
    asyncio.get_running_loop().call_soon(agent.data, call.id, b"x")
    asyncio.get_running_loop().call_soon(agent.answer, {"id": call.id}, {})
    with pytest.raises(ZeroDivisionError):
        await call.result(dict[str, Any], 1)


async def test_one_bad_agent_harms_only_itself() -> None:
    bad, bad_agent = await client_of()
    good, good_agent = await client_of()
    waiting = bad.open("exec"), good.open("exec")
    bad_agent.raw(b"\xff\n")
    good_agent.answer({"id": waiting[1].id}, {"n": 1})
    assert await waiting[1].result(dict[str, int]) == {"n": 1}
    assert good.is_open
    assert not bad.is_open


async def test_descriptors_that_an_agent_sends_along_are_not_kept(tmp_path: Any) -> None:
    host, peer = socket.socketpair()
    fd = host.detach()
    client = AgentClient(FdStream(fd, fd))
    call = client.open("ping")
    with peer, open(tmp_path / "bait", "w") as bait:
        before = set(os.listdir("/proc/self/fd"))
        bundle = array.array("i", [bait.fileno()] * 50)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, bundle)]
        await asyncio.to_thread(peer.recv, 1 << 16)
        peer.sendmsg([b'{"id":%d,"result":{}}\n' % call.id], ancillary)
        assert await call.result(dict[str, Any], 5) == {}
        assert set(os.listdir("/proc/self/fd")) <= before
    client.close()


async def test_frames_of_one_byte_on_both_descriptors_do_not_multiply_memory() -> None:
    client, agent = await client_of()
    window = 1 << 16
    call = client.open("exec", window=window)
    pieces = b"".join(b'{"method":"data","params":{"id":%d,"fd":%d},"bytes":1}\nx' % (call.id, fd) for fd in (1, 2))
    tracemalloc.start()
    try:
        agent.raw(pieces * (window // 2))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 32 * window
    agent.answer({"id": call.id}, {})
    received = [piece async for piece in call.chunks()]
    assert {fd: sum(len(data) for each, data in received if each == fd) for fd in (1, 2)} == {
        1: window // 2,
        2: window // 2,
    }
    client.close()


async def test_bytes_that_are_on_their_way_when_a_call_is_given_up_are_no_violation() -> None:
    client, agent = await client_of()
    for _ in range(20):
        call = client.open("read_file", window=4096)
        call.abandon()
        for _ in range(4096):
            agent.data(call.id, b"x")
        agent.answer({"id": call.id}, {})
    assert client.is_open
    call.abandon()
    for _ in range(200_000):
        agent.data(call.id, b"x")
    assert not client.is_open, "but there is an end of them"
