"""The stream of the gate to one box: up, broken, opened again, and given up for as long as there is no box."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
from agent.lying_agent import LyingAgent
from agent.no_boxes import NoBoxes

from skerry.agent.client import AgentClient
from skerry.aio import backoff
from skerry.errors import AgentUnreachable, SandboxGone
from skerry.gate.base import Policy
from skerry.gate.box import Box
from skerry.model.rules import Rules
from skerry.model.spec import SandboxId, new_id
from skerry.net.stream import Stream
from skerry.providers.base import BoxState, BoxStatus

POLICY = Policy(id=new_id(), rules=Rules())
OTHER = Policy(id=POLICY.id, rules=Rules.of(["pypi.org"]))


class Boxes(NoBoxes):
    """One box, which runs or does not, and the streams to it."""

    name = "boxes"

    def __init__(self) -> None:
        self.state: BoxState | None = BoxState.RUNNING
        self.streams: list[LyingAgent] = []

    async def dial(self, id: SandboxId) -> Stream:
        if self.state is not BoxState.RUNNING:
            raise AgentUnreachable("it does not run")
        self.streams.append(LyingAgent())
        return self.streams[-1]

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return {} if self.state is None else {POLICY.id: BoxStatus(state=self.state)}


class FakeSession:
    """A session that lasts until it is broken, and notes its policies."""

    connections = 3

    def __init__(self, policy: Policy) -> None:
        self.policies = [policy]
        self.broken = asyncio.Event()

    async def serve(self) -> None:
        await self.broken.wait()
        raise AgentUnreachable("the stream broke")

    async def update(self, policy: Policy) -> None:
        self.policies.append(policy)


async def until(is_so: Callable[[], bool]) -> None:
    for delay_s in backoff(0.0, 0.001, 30):
        if is_so():
            return
        await asyncio.sleep(delay_s)
    raise AssertionError("never happened")


class World:
    def __init__(self) -> None:
        self.provider = Boxes()
        self.sessions: list[FakeSession] = []
        self.box = Box(POLICY, self.provider, self.begin)  # type: ignore[arg-type]

    async def begin(self, policy: Policy, client: AgentClient) -> FakeSession:
        assert client.is_open
        self.sessions.append(FakeSession(policy))
        return self.sessions[-1]

    async def next_session(self, count: int) -> None:
        await until(lambda: len(self.sessions) >= count and self.box.is_up)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.box.end()
    assert not any(stream.is_open for stream in world.provider.streams)


async def test_a_broken_stream_is_opened_again_with_the_policy_of_then(world: World) -> None:
    world.box.start()
    await world.box.wait_until_up()
    assert world.box.connections == 3
    await world.box.change(OTHER)
    assert world.sessions[0].policies == [POLICY, OTHER]
    world.sessions[0].broken.set()
    await world.next_session(2)
    assert world.sessions[1].policies == [OTHER]
    assert [stream.is_open for stream in world.provider.streams] == [False, True]


async def test_a_policy_that_changes_while_a_box_is_dialled_holds_when_it_is_up(world: World) -> None:
    is_begun, goes_on = asyncio.Event(), asyncio.Event()

    async def begin(policy: Policy, client: AgentClient) -> FakeSession:
        is_begun.set()
        await goes_on.wait()
        return await world.begin(policy, client)

    world.box = Box(POLICY, world.provider, begin)  # type: ignore[arg-type]
    world.box.start()
    await is_begun.wait()
    await world.box.change(OTHER)
    goes_on.set()
    await world.box.wait_until_up()
    assert world.sessions[0].policies[-1] == OTHER


async def test_a_box_that_was_restarted_by_hand_gets_its_network_back(world: World) -> None:
    world.box.start()
    await world.box.wait_until_up()
    world.provider.state = BoxState.STOPPED
    world.sessions[0].broken.set()
    await until(lambda: not world.box.is_up and bool(world.box.error))
    assert not world.box.is_gone
    world.provider.state = BoxState.RUNNING
    await world.next_session(2)


@pytest.mark.parametrize("state", [None, BoxState.DEAD, BoxState.REMAINS])
async def test_who_waits_for_a_box_that_has_ended_hears_so_at_once(world: World, state: BoxState | None) -> None:
    world.provider.state = state
    world.box.start()
    with pytest.raises(SandboxGone, match="it does not run"):
        await world.box.wait_until_up()
    assert world.box.is_gone


async def test_a_hurry_dials_at_once(world: World) -> None:
    world.provider.state = BoxState.DEAD
    world.box.start()
    with pytest.raises(SandboxGone):
        await world.box.wait_until_up()
    world.provider.state = BoxState.RUNNING
    world.box.hurry()
    await world.box.wait_until_up()


async def test_a_mistake_of_ours_ends_no_more_than_the_stream(world: World) -> None:
    async def begin(policy: Policy, client: AgentClient) -> FakeSession:
        if len(world.provider.streams) == 1:
            raise ZeroDivisionError
        return await world.begin(policy, client)

    world.box = Box(POLICY, world.provider, begin)  # type: ignore[arg-type]
    world.box.start()
    await world.box.wait_until_up()
    assert not world.provider.streams[0].is_open


async def test_an_end_closes_the_stream_and_it_can_be_started_again(world: World) -> None:
    world.box.start()
    await world.box.wait_until_up()
    await world.box.end()
    assert not world.box.is_up
    assert not world.provider.streams[0].is_open
    world.box.start()
    await world.box.wait_until_up()
    assert len(world.sessions) == 2
