"""Talking to the agents in containers, by whichever way there is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from skerry.agent.client import AgentClient
from skerry.agent.stream import Stream
from skerry.errors import AgentUnreachable
from skerry.providers import layout, straight
from skerry.providers.engine import states, way
from skerry.providers.engine.api import Engine
from skerry.providers.engine.runtime import Runtime
from skerry.spec import SandboxId

_DIAL_S = 5.0
"""How long an agent that was there before may take to listen."""


class Reach:
    def __init__(self, engine: Engine, runtime: Runtime) -> None:
        self._engine = engine
        self._runtime = runtime
        self._kept: dict[SandboxId, Stream] = {}

    async def dial(self, id: SandboxId) -> Stream:
        """The stream that the box was started through, if nobody has had it yet; else another."""
        kept = self._kept.pop(id, None)
        if kept is not None and kept.is_open:
            return kept
        return await self._open(await states.inspect(self._engine, id), _DIAL_S)

    @asynccontextmanager
    async def client(self, box: states.Inspected) -> AsyncIterator[AgentClient]:
        """Speak with an agent for a while."""
        client = await AgentClient.greet(await self._open(box, _DIAL_S), timeout_s=_DIAL_S)
        try:
            yield client
        finally:
            client.close()

    @asynccontextmanager
    async def first_client(self, id: SandboxId, timeout_s: float) -> AsyncIterator[AgentClient]:
        """Speak with an agent that is just starting; the stream is kept for the next who dials."""
        stream = await self._open(await states.inspect(self._engine, id), timeout_s)
        client = await AgentClient.greet(stream, timeout_s=timeout_s)
        try:
            yield client
        except BaseException:
            client.close()
            raise
        self._kept[id] = client.release()

    async def as_user(self, id: SandboxId, user: str) -> Stream:
        """A stream to an agent of another user, which ends with it."""
        from skerry.providers.engine import profile

        box = await states.inspect(self._engine, id)
        check_running(box)
        await self._runtime.prepare(box.image)
        config = profile.agent_config_for_user(box.config.entrypoint or [])
        argv = [*self._runtime.argv, layout.START, id, config]
        return await way.through_exec(self._engine, box.id, argv, user)

    def forget(self, id: SandboxId) -> None:
        if (kept := self._kept.pop(id, None)) is not None:
            kept.close()

    def close(self) -> None:
        for id in [*self._kept]:
            self.forget(id)

    async def _open(self, box: states.Inspected, timeout_s: float) -> Stream:
        check_running(box)
        if box.state.paused:
            raise AgentUnreachable("the box is paused: let it go on first")
        with suppress(straight.NotShared):
            return await straight.connect(box.state.pid, timeout_s)
        await self._runtime.prepare(box.image)
        argv = [*self._runtime.argv, layout.RELAY, layout.SOCKET, f"{timeout_s:g}"]
        return await way.through_exec(self._engine, box.id, argv)


def check_running(box: states.Inspected) -> None:
    if not box.state.running:
        raise AgentUnreachable(f"the box is {box.state.status or 'not running'}: start it first")
