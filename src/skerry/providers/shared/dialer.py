"""Streams to the agents of boxes. The one that a box was started through is kept for whoever dials first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from skerry.agent.client import AgentClient
from skerry.model.spec import SandboxId, Spec
from skerry.net.stream import Stream
from skerry.providers.shared import loopback

DIAL_S = 5.0
"""How long an agent that was there before may take to listen."""

BoxT = TypeVar("BoxT")
"""A box as its provider has to know it to open a stream."""


class FirstStreams:
    """Streams that boxes were started through, so that none is opened twice."""

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


class Dialer(FirstStreams, ABC, Generic[BoxT]):
    """Dials the agents of a provider, which says how a box is found and a stream to it opened."""

    @abstractmethod
    async def find(self, id: SandboxId) -> BoxT:
        """Raises NotFound."""

    @abstractmethod
    async def open(self, box: BoxT, timeout_s: float) -> Stream:
        """Raises AgentUnreachable if the box does not run or its agent does not listen in time."""

    async def dial(self, id: SandboxId) -> Stream:
        return self.take(id) or await self.open(await self.find(id), DIAL_S)

    @asynccontextmanager
    async def client(self, box: BoxT) -> AsyncIterator[AgentClient]:
        """Speak with an agent for a while."""
        client = await AgentClient.greet(await self.open(box, DIAL_S))
        try:
            yield client
        finally:
            client.close()

    @asynccontextmanager
    async def started_client(
        self, id: SandboxId, box: BoxT, spec: Spec, timeout_s: float
    ) -> AsyncIterator[AgentClient]:
        """Speak with an agent that is just starting, and tell it its environment. Raises CreateFailed for a box that is
        not prepared for the rules of its network."""
        stream = await self.open(box, timeout_s)
        async with self.first_client(id, stream, timeout_s) as client:
            if spec.env:
                await client.call("set_env", {"env": spec.env}, type=dict[str, Any])
            await loopback.check(client, spec)
            yield client

    async def set_lifetime(self, client: AgentClient, spec: Spec) -> None:
        """Tell an agent that was started again how much time it has."""
        params = {"lifetime_s": spec.lifetime_s or None, "idle_s": spec.idle_s or None}
        await client.call("set_lifetime", params, type=dict[str, Any])
