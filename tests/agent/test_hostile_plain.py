"""The plain dialect against those who break it: clients that ask for nonsense, agents that answer with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skerry.agent.client import NO_METHOD, AgentClient
from skerry.agent.plain import PlainAgentClient
from skerry.errors import AgentProtocolError, AgentUnreachable, SkerryError
from skerry.sandbox.processes import Exit

from .guest_process import Guest
from .lying_agent import LyingAgent, Message, Script, silent, turns

# clients that lie to our agent

CLOSING = {
    "no JSON": b"ping\n",
    "HTTP": b"POST / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no id": b'{"method":"ping"}\n',
    "a null id": b'{"id":null,"method":"ping"}\n',
    "a float id": b'{"id":1.5,"method":"ping"}\n',
    "a long id": b'{"id":"' + b"x" * 300 + b'","method":"ping"}\n',
    "no method": b'{"id":1}\n',
    "params that are a list": b'{"id":1,"method":"ping","params":[]}\n',
    "a batch": b'[{"id":1,"method":"ping"}]\n',
    "an attachment": b'{"id":1,"method":"ping","bytes":3}\nabc',
    "a notification of the full protocol": b'{"method":"data","params":{"id":1},"bytes":1}\nx',
    "a long first line": b'{"id":1,"method":"exec","params":{"cmd":"' + b"x" * (1 << 20) + b'"}}\n',
    "nesting of 10^5": b'{"id":1,"method":"ping","params":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
}
PING = b'{"id":1,"method":"ping"}\n'


@pytest.mark.parametrize("hostile", CLOSING.values(), ids=CLOSING)
def test_a_first_line_of_no_dialect_closes_the_stream_without_a_word(guest: Guest, hostile: bytes) -> None:
    with guest.wire(greet=False) as wire:
        with contextlib.suppress(OSError):
            wire.socket.sendall(hostile + PING)
        assert wire.receive() == ({}, b"")
    with guest.wire() as wire:
        assert wire.call(1, "ping")["result"] == {}


def test_a_later_request_that_is_none_is_refused_with_the_code_of_json_rpc(guest: Guest) -> None:
    with guest.wire(greet=False) as wire:
        wire.socket.sendall(PING + b'{"id":null,"method":"ping"}\n{"id":2,"method":5}\n{"id":3,"params":[]}\n' + PING)
        answers = [wire.receive()[0] for _ in range(5)]
    assert [answer.get("error", {}).get("code") for answer in answers] == [None, -32600, -32600, -32600, None]
    assert [answer["id"] for answer in answers] == [1, None, 2, 3, 1]


def test_lines_without_end_and_requests_without_end_close_the_stream(guest: Guest) -> None:
    with guest.wire(greet=False) as endless:
        endless.socket.sendall(PING)
        assert endless.receive()[0]["result"] == {"pong": True}
        with contextlib.suppress(OSError):
            for _ in range(20):
                endless.socket.sendall(b"x" * (1 << 20))
        assert endless.is_closed()
    with guest.wire(greet=False) as many:
        many.send({"id": 1, "method": "exec", "params": {"cmd": "sleep 60"}})
        with contextlib.suppress(OSError):
            many.socket.sendall(PING * 100)
        assert many.is_closed()
    assert guest.memory() < 200 << 20


def test_who_takes_no_answer_gets_no_more_of_them(guest: Guest) -> None:
    """The next request begins once the answer before has gone out, so the agent holds one at a time."""
    (guest.home / "f").write_bytes(b"x" * (8 << 20))
    with guest.wire(greet=False) as wire:
        wire.socket.sendall(b'{"id":1,"method":"read_file","params":{"path":"f"}}\n' * 60)
        with guest.wire() as other:
            for id in range(1, 50):
                assert other.call(id, "ping")["result"] == {}
        assert guest.memory() < 200 << 20
        for _ in range(60):
            assert len(wire.receive()[0]["result"]["content"]) == 8 << 20


def test_a_host_that_asks_and_never_reads_loses_its_stream(guest: Guest) -> None:
    """In the full protocol, whose answers are not waited for: 64 MiB may be on their way, and no more."""
    with guest.wire() as wire:
        env = {f"name{number}": "x" * 100_000 for number in range(5)}
        wire.call(1, "set_env", env=env)
        with contextlib.suppress(OSError):
            for id in range(2, 1000):
                wire.send({"id": id, "method": "set_env", "params": {"env": {}}})
        assert guest.memory() < 300 << 20
        seen = 0
        while wire.receive()[0]:
            seen += 1
        assert seen < 998
    with guest.wire() as wire:
        assert wire.call(1, "ping")["result"] == {}


texts = st.one_of(st.text(max_size=5), st.sampled_from(["f", "d", ".", "missing", "true", "sh", "echo x", "\0"]))
odd = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts, st.lists(texts, max_size=2))
requests = st.fixed_dictionaries(
    {"method": st.one_of(st.sampled_from(["ping", "exec", "exec_code", "read_file", "list_dir", "auth", "no"]), odd)},
    optional={
        "id": st.one_of(st.integers(0, 9), odd),
        "params": st.one_of(
            odd,
            st.fixed_dictionaries(
                {},
                optional={name: st.one_of(texts, odd) for name in ("cmd", "lang", "code", "path", "token", "more")},
            ),
        ),
        "bytes": st.one_of(st.integers(0, 4), odd),
        "jsonrpc": odd,
    },
)


@pytest.fixture(scope="module")
def lasting_guest() -> Iterator[Guest]:
    with Guest() as guest:
        (guest.home / "d").mkdir()
        (guest.home / "f").write_bytes(b"x" * 100_000)
        yield guest


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(requests.map(lambda each: json.dumps(each).encode() + b"\n"), st.binary(max_size=50))))
def test_no_conversation_in_the_plain_dialect_ends_the_agent(lasting_guest: Guest, pieces: list[bytes]) -> None:
    with lasting_guest.wire(greet=False) as wire:
        with contextlib.suppress(OSError):
            for piece in pieces:
                wire.socket.sendall(piece)
            wire.socket.shutdown(socket.SHUT_WR)
        assert wire.is_closed()
    with lasting_guest.wire(greet=False) as wire:
        wire.socket.sendall(PING)
        assert wire.receive()[0]["result"] == {"pong": True}


# agents that lie to our client


class PlainLiar(LyingAgent):
    """One that knows no greeting and answers pings; the rest is the script's."""

    def _on_line(self, line: bytes) -> None:
        message = json.loads(line)
        self.messages.append(message)
        loop = asyncio.get_running_loop()
        if message["method"] == "hello":
            refusal = {"id": message["id"], "error": {"code": NO_METHOD, "message": "no such method"}}
            loop.call_soon(self.send, refusal)
        elif message["method"] == "ping":
            loop.call_soon(self.answer, message, {"pong": True})
        else:
            loop.call_soon(self.script, self, message)


async def plain_client_of(script: Script = silent) -> tuple[AgentClient, PlainLiar]:
    agent = PlainLiar(script)
    client = await AgentClient.greet(agent)
    assert isinstance(client, PlainAgentClient)
    return client, agent


RAN = {"exit_code": 0, "stdout": "", "stderr": ""}
WRONG: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "no code": {"stdout": "", "stderr": ""},
    "a code as text": {**RAN, "exit_code": "0"},
    "bytes as a list": {**RAN, "stdout": [1]},
    "a null": {**RAN, "stderr": None},
}


@pytest.mark.parametrize("result", WRONG.values(), ids=WRONG)
async def test_a_plain_answer_of_the_wrong_form_ends_the_stream(result: Any) -> None:
    client, _ = await plain_client_of(lambda agent, message: agent.answer(message, result))
    with pytest.raises(AgentProtocolError, match="wrong form"):
        await client.call("exec", {"shell": "true"}, type=Exit)
    assert not client.is_open


async def test_an_exit_code_is_never_more_than_a_byte() -> None:
    client, _ = await plain_client_of(lambda agent, message: agent.answer(message, {**RAN, "exit_code": -1}))
    assert (await client.call("exec", {"shell": "true"}, type=Exit)).exit_code == 255
    client.close()


UNASKED: dict[str, Message] = {
    "another id": {"id": 99, "result": RAN},
    "no id": {"result": RAN},
    "a notification": {"method": "data", "params": {"id": 2}, "bytes": 1},
    "a second answer": {"id": 1, "result": {}},
}


@pytest.mark.parametrize("message", UNASKED.values(), ids=UNASKED)
async def test_what_nobody_asked_for_ends_the_stream(message: Message) -> None:
    client, _ = await plain_client_of(lambda agent, _message: agent.send(message))
    with pytest.raises(AgentProtocolError):
        await client.call("exec", {"shell": "true"}, type=Exit)


async def test_an_answer_to_what_was_not_sent_yet_ends_the_stream() -> None:
    client, agent = await plain_client_of()
    call = client.open("write_file", {"path": "f"})
    agent.send({"id": call.id, "result": {"success": True}})
    with pytest.raises(AgentProtocolError):
        await call.result(dict[str, Any])


async def test_a_line_without_end_ends_the_stream_in_bounded_memory() -> None:
    client, agent = await plain_client_of()
    call = client.open("exec", {"shell": "true"})
    for _ in range(17):
        agent.raw(b"x" * (1 << 20))
    with pytest.raises(AgentProtocolError, match="too long"):
        await call.result(Exit)


async def test_who_refuses_the_greeting_and_then_says_nothing_is_given_up() -> None:
    agent = PlainLiar()
    agent.answer = lambda _message, _result: None  # type: ignore[method-assign]
    with pytest.raises(AgentUnreachable):
        await AgentClient.greet(agent, timeout_s=0.05)
    assert not agent.is_open


async def test_a_plain_agent_that_hangs_up_interrupts_every_call() -> None:
    client, agent = await plain_client_of()
    calls = [client.open("exec", {"shell": "true"}), client.open("write_file", {"path": "f"})]
    agent.end()
    for call in calls:
        with pytest.raises(SkerryError):
            await call.result(dict[str, Any])


values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
entries = st.lists(st.fixed_dictionaries({"name": values, "is_dir": values}, optional={"size": values}), max_size=2)
answers = st.fixed_dictionaries(
    {"id": st.one_of(st.integers(0, 6), values)},
    optional={
        "result": st.one_of(
            values, st.just(RAN), st.fixed_dictionaries({"entries": entries}), st.just({"content": "x"})
        ),
        "error": st.one_of(
            values, st.fixed_dictionaries({"code": values, "message": values}, optional={"data": values})
        ),
    },
)


async def converse(pieces: list[bytes]) -> None:
    unhandled: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
    client, agent = await plain_client_of()
    calls = [client.open("exec", {"shell": "x"}), client.open("list_dir", {"path": "/"})]
    calls += [client.open("read_file", {"path": "f"}), client.open("write_file", {"path": "f"})]

    async def write() -> None:
        await calls[3].send(b"x" * 100)
        calls[3].end()

    async def read() -> None:
        async for _ in calls[1].chunks():
            pass

    tasks = [asyncio.create_task(write()), asyncio.create_task(read())]
    tasks += [asyncio.create_task(call.result(dict[str, Any])) for call in calls]
    await turns(3)
    for piece in pieces:
        agent.raw(piece)
        await turns(2)
    agent.end()
    async with asyncio.timeout(10):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    strange = [each for each in results if isinstance(each, BaseException) and not isinstance(each, SkerryError)]
    assert not strange, strange
    assert not unhandled, unhandled
    assert not client.is_open


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(answers.map(lambda each: json.dumps(each).encode() + b"\n"), st.binary(max_size=50))))
def test_random_answers_end_in_an_error_of_ours(pieces: list[bytes]) -> None:
    asyncio.run(converse(pieces))
