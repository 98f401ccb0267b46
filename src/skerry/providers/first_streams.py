"""The streams that boxes were started through: each is kept for whoever dials first, so that none is opened twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from skerry.agent.client import AgentClient
from skerry.agent.stream import Stream
from skerry.spec import SandboxId

DIAL_S = 5.0
"""How long an agent that was there before may take to listen."""


class FirstStreams:
    def __init__(self) -> None:
        self._kept: dict[SandboxId, Stream] = {}

    def take(self, id: SandboxId) -> Stream | None:
        """The one of this box, if it is still open and nobody has had it yet."""
        kept = self._kept.pop(id, None)
        return kept if kept is not None and kept.is_open else None

    @asynccontextmanager
    async def first_client(self, id: SandboxId, stream: Stream, timeout_s: float) -> AsyncIterator[AgentClient]:
        """Speak with an agent that is just starting; the stream is kept for the next who dials."""
        client = await AgentClient.greet(stream, timeout_s=timeout_s)
        try:
            yield client
        except BaseException:
            client.close()
            raise
        self._kept[id] = client.release()

    def forget(self, id: SandboxId) -> None:
        if (kept := self._kept.pop(id, None)) is not None:
            kept.close()

    def close(self) -> None:
        for id in [*self._kept]:
            self.forget(id)


@asynccontextmanager
async def client_on(stream: Stream) -> AsyncIterator[AgentClient]:
    """Speak with an agent for a while."""
    client = await AgentClient.greet(stream, timeout_s=DIAL_S)
    try:
        yield client
    finally:
        client.close()
