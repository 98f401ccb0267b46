"""An agent that lies about its box's network: the stream ends, with a clear error and in bounded memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skerry.agent.network import AgentNetwork, Open, OpenProxy, Resolve, Warning
from skerry.errors import AgentError, AgentProtocolError

from .lying_agent import LyingAgent, Message, client_of

READY = {"ready": True}


def telling(*records: Any, answer: Any = None) -> Any:
    """A script that answers `network` with records, and all else with `answer`, or nothing in it."""

    def script(agent: LyingAgent, message: Message) -> None:
        if message["method"] == "network":
            for record in records:
                agent.data(message["id"], record if isinstance(record, bytes) else json.dumps(record).encode() + b"\n")
        elif "id" in message:
            agent.answer(message, answer or {})

    return script


async def opened(*records: Any, answer: Any = None) -> tuple[AgentNetwork, LyingAgent]:
    client, agent = await client_of(telling(READY, *records, answer=answer))
    return await AgentNetwork.open(client), agent


async def test_wishes_come_as_they_are_told() -> None:
    network, _ = await opened(
        {"resolve": 1, "name": "pypi.org"}, {"open": 2, "name": "pypi.org", "port": 443}, {"open": 5, "proxy": True},
        {"warning": "port\x1b[2J"},
    )  # fmt: skip
    wishes = network.wishes()
    assert [await anext(wishes) for _ in range(4)] == [
        Resolve(1, "pypi.org"), Open(2, "pypi.org", 443), OpenProxy(5), Warning("port\\x1b[2J"),
    ]  # fmt: skip


HOSTILE = {
    "no JSON": b"nonsense\n",
    "a list": [1],
    "nothing in it": {},
    "ready again": READY,
    "a wish that is text": {"resolve": "1", "name": "pypi.org"},
    "a wish that is half": {"resolve": 1.5, "name": "pypi.org"},
    "a wish below zero": {"resolve": -1, "name": "pypi.org"},
    "a wish of 3,000 digits": b'{"resolve":' + b"1" * 3000 + b',"name":"a.b"}\n',
    "no name": {"resolve": 1},
    "an empty name": {"resolve": 1, "name": ""},
    "a name that is a number": {"resolve": 1, "name": 5},
    "a name of 254 letters": {"resolve": 1, "name": "a" * 254},
    "a name in capitals": {"resolve": 1, "name": "PyPI.org"},
    "a name of two lines": {"resolve": 1, "name": "pypi.org\nevil"},
    "a name with a line's end": {"resolve": 1, "name": "pypi.org\n"},
    "a name beyond ASCII": {"resolve": 1, "name": "b\xfccher.de"},
    "no port": {"open": 1, "name": "pypi.org"},
    "port 0": {"open": 1, "name": "pypi.org", "port": 0},
    "port 65536": {"open": 1, "name": "pypi.org", "port": 65536},
    "a port that is text": {"open": 1, "name": "pypi.org", "port": "443"},
    "a proxy that is text": {"open": 1, "proxy": "yes"},
    "a record that is too long": {"warning": "x" * 5000},
    "a record without end": b"x" * 5000,
    "nesting": b'{"x":' + b"[" * 4000 + b"\n",
}


@pytest.mark.parametrize("record", HOSTILE.values(), ids=HOSTILE)
async def test_a_record_of_the_wrong_form_ends_the_stream(record: Any) -> None:
    network, agent = await opened(record)
    with pytest.raises(AgentProtocolError, match="broke the protocol"):
        await anext(network.wishes())
    assert not agent.is_open


async def test_a_number_that_comes_again_ends_the_stream() -> None:
    network, agent = await opened({"resolve": 7, "name": "a.b"}, {"open": 7, "proxy": True})
    wishes = network.wishes()
    await anext(wishes)
    with pytest.raises(AgentProtocolError, match="comes again"):
        await anext(wishes)
    assert not agent.is_open


async def test_wishes_without_number_end_the_stream() -> None:
    network, agent = await opened(*({"open": number, "proxy": True} for number in range(1, 1100)))
    with pytest.raises(AgentProtocolError, match="too much at once"):
        async for _ in network.wishes():
            pass
    assert not agent.is_open


async def test_warnings_without_number_end_the_stream() -> None:
    network, agent = await opened(*({"warning": str(number)} for number in range(100)))
    with pytest.raises(AgentProtocolError, match="warns without end"):
        async for _ in network.wishes():
            pass
    assert not agent.is_open


async def test_a_name_of_very_many_ports_has_as_many_as_an_agent_takes() -> None:
    network, agent = await opened({"resolve": 1, "name": "a.b"})
    await anext(network.wishes())
    await network.resolved(1, range(1, 1000))
    (call,) = agent.asked("resolved")
    assert call["params"]["ports"] == [*range(1, 257)]


async def test_wishes_that_are_answered_may_go_on_for_ever() -> None:
    network, agent = await opened()
    (call,) = agent.asked("network")
    wishes = network.wishes()
    for number in range(1, 3000):
        agent.data(call["id"], json.dumps({"resolve": number, "name": "a.b"}).encode() + b"\n")
        assert await anext(wishes) == Resolve(number, "a.b")
        await network.resolved(number, {443, 80})
    assert agent.asked("resolved")[-1]["params"] == {"wish": 2999, "ports": [80, 443]}


@pytest.mark.parametrize("taken", [[22], [443, 22], "443", [None], [-443]])
async def test_ports_that_nobody_asked_for_are_not_taken(taken: Any) -> None:
    network, agent = await opened({"resolve": 1, "name": "a.b"}, answer={"taken": taken})
    await anext(network.wishes())
    with pytest.raises(AgentProtocolError):
        await network.resolved(1, {443})
    assert not agent.is_open


async def test_an_agent_that_begins_with_a_wish_is_none() -> None:
    client, _ = await client_of(telling({"resolve": 1, "name": "a.b"}))
    with pytest.raises(AgentProtocolError, match="ready"):
        await AgentNetwork.open(client)


@pytest.mark.parametrize("how", ["answer", "end"])
async def test_an_agent_that_ends_its_network_by_itself_breaks_the_protocol(how: str) -> None:
    network, agent = await opened()
    (call,) = agent.asked("network")
    if how == "answer":
        agent.answer(call, {})
    else:
        agent.send({"method": "end", "params": {"id": call["id"]}})
    with pytest.raises(AgentProtocolError, match="by itself"):
        await anext(network.wishes())


async def test_an_agent_that_is_never_ready_is_given_up() -> None:
    client, agent = await client_of()
    with pytest.raises(AgentError, match="has not taken over"):
        await AgentNetwork.open(client, timeout_s=0.02)
    assert agent.asked("cancel")


async def test_records_that_nobody_reads_are_not_taken_without_end() -> None:
    network, agent = await opened()
    (call,) = agent.asked("network")
    line = json.dumps({"warning": "x" * 900}).encode() + b"\n"
    for _ in range(100):
        agent.data(call["id"], line)
    assert not agent.is_open, "it has sent more than it was allowed to"
    with pytest.raises(AgentProtocolError, match="without credit"):
        _ = [wish async for wish in network.wishes()]
