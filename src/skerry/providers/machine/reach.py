"""Streams to the agents of machines, and to their first processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.agent.stream import Stream
from skerry.errors import AgentUnreachable, NotFound
from skerry.providers.first_streams import DIAL_S, FirstStreams
from skerry.providers.machine import guest
from skerry.providers.machine.boxes import Box
from skerry.spec import SandboxId
from skerry.vm.base import AGENT_PORT


class _Agent(msgspec.Struct):
    port: int


class Reach:
    def __init__(self) -> None:
        self._first = FirstStreams()

    async def dial(self, box: Box) -> Stream:
        """The stream that the box was started through, if nobody has had it yet; else another."""
        _check(box)
        return self._first.take(box.id) or await box.vm.dial(AGENT_PORT, DIAL_S)

    @asynccontextmanager
    async def first_client(self, box: Box) -> AsyncIterator[AgentClient]:
        """Speak with an agent that has just come up."""
        stream = await box.vm.dial(AGENT_PORT, CONTROL_TIMEOUT_S)
        async with self._first.first_client(box.id, stream, CONTROL_TIMEOUT_S) as client:
            yield client

    async def as_user(self, box: Box, user: str) -> Stream:
        """A stream to an agent of another user, which ends with it."""
        _check(box)
        async with guest.control(box.vm, DIAL_S) as client:
            agent = await client.call("agent_as", {"user": user}, type=_Agent)
            return await box.vm.dial(agent.port, DIAL_S)

    def forget(self, id: SandboxId) -> None:
        self._first.forget(id)

    def close(self) -> None:
        self._first.close()


def _check(box: Box) -> None:
    if not box.path.is_dir():
        raise NotFound(f"there is no box {box.id}")
    if not box.vm.is_running():
        raise AgentUnreachable("the machine does not run: start it first, or destroy it")
