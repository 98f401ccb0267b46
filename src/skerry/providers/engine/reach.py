"""Talking to the agents in containers, by whichever way there is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from skerry.agent.client import AgentClient
from skerry.agent.stream import Stream
from skerry.errors import AgentUnreachable
from skerry.providers import layout, straight, users
from skerry.providers.engine import states, way
from skerry.providers.engine.api import Engine
from skerry.providers.engine.runtime import Runtime
from skerry.providers.first_streams import DIAL_S, FirstStreams, client_on
from skerry.spec import SandboxId


class Reach:
    def __init__(self, engine: Engine, runtime: Runtime, *, may_be_here: bool) -> None:
        self._engine = engine
        self._runtime = runtime
        self._may_be_here = may_be_here
        self._first = FirstStreams()

    async def dial(self, id: SandboxId) -> Stream:
        """The stream that the box was started through, if nobody has had it yet; else another."""
        return self._first.take(id) or await self._open(await states.inspect(self._engine, id), DIAL_S)

    @asynccontextmanager
    async def client(self, box: states.Inspected) -> AsyncIterator[AgentClient]:
        """Speak with an agent for a while."""
        async with client_on(await self._open(box, DIAL_S)) as client:
            yield client

    @asynccontextmanager
    async def first_client(self, id: SandboxId, timeout_s: float) -> AsyncIterator[AgentClient]:
        """Speak with an agent that is just starting."""
        stream = await self._open(await states.inspect(self._engine, id), timeout_s)
        async with self._first.first_client(id, stream, timeout_s) as client:
            yield client

    async def as_user(self, id: SandboxId, user: str) -> Stream:
        """A stream to an agent of another user, which ends with it."""
        box = await states.inspect(self._engine, id)
        check_running(box)
        await self._runtime.prepare(box.image)
        first = msgspec.json.decode((box.config.entrypoint or [""])[-1], type=dict[str, Any])
        argv = [*self._runtime.argv, layout.START, id, users.agent_config(first)]
        return await way.through_exec(self._engine, box.id, argv, user)

    def forget(self, id: SandboxId) -> None:
        self._first.forget(id)

    def close(self) -> None:
        self._first.close()

    async def _open(self, box: states.Inspected, timeout_s: float) -> Stream:
        check_running(box)
        if box.state.paused:
            raise AgentUnreachable("the box is paused: let it go on first")
        # A process of that number is on every machine.
        is_here = self._may_be_here and straight.is_of(box.state.pid, box.id)
        if is_here:
            with suppress(straight.NotShared):
                return await straight.connect(box.state.pid, timeout_s)
        await self._runtime.prepare(box.image)
        argv = [*self._runtime.argv, layout.RELAY, layout.SOCKET, f"{timeout_s:g}"]
        process = straight.process_of(box.state.pid, box.id) if is_here else None
        return await way.through_exec(self._engine, box.id, argv, process=process)


def check_running(box: states.Inspected) -> None:
    if not box.state.running:
        raise AgentUnreachable(f"the box is {box.state.status or 'not running'}: start it first")
