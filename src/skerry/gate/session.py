"""The network of one sandbox: wishes of its box are answered by its policy, within bounds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from skerry.agent.network import AgentNetwork, Open, OpenProxy, Resolve
from skerry.errors import SkerryError
from skerry.gate.base import Members, Opener, Policy, Recorder, Refused
from skerry.gate.bounds import Bucket, Limits, Pace, Tally
from skerry.gate.decide import host_of, ports_of, shown
from skerry.gate.dialer import Dialer
from skerry.gate.link import Link, Shared
from skerry.gate.proxy import serve_proxy
from skerry.gate.relay import Ahead, finish

_MOST_ANSWERS = 256
"""Answers that are on their way to the agent. An agent that takes none gets no more wishes read."""
_TALLY_S = 10.0
_PAUSE_S = 0.005
"""Between wishes that are too many: refusing them takes of what others need too."""
_log = logging.getLogger("skerry.gate")


class Session:
    """Serves one sandbox, over the `network` call of its agent."""

    def __init__(
        self,
        network: AgentNetwork,
        policy: Policy,
        *,
        dialer: Dialer,
        recorder: Recorder,
        opener: Opener | None = None,
        members: Members | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._network = network
        self._limits = limits or Limits()
        self._shared = Shared(policy, dialer, recorder, opener, members, self._limits)
        self._loop = asyncio.get_running_loop()
        now = self._loop.time()
        self._tally = Tally(recorder, policy.id, _TALLY_S, now)
        self._new = Bucket(self._limits.connections_per_s, self._limits.connections_burst, now)
        self._names = Bucket(self._limits.names_per_s, self._limits.names_burst, now)
        self._answers = asyncio.Semaphore(_MOST_ANSWERS)
        self._links: dict[Link, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """Number of connections that are open or being opened."""
        return len(self._links)

    @property
    def policy(self) -> Policy:
        """What decides the next wish."""
        return self._shared.policy

    async def serve(self) -> None:
        """Serve until the agent ends its side. All connections end with it. Raises SkerryError if that breaks."""
        self._begin(self._keep_watch())
        try:
            async for wish in self._network.wishes():
                if isinstance(wish, Resolve):
                    if wait_s := self._names.wait_s(self._loop.time()):
                        await asyncio.sleep(wait_s)
                    self._names.take(self._loop.time())
                    await self._answer(self._resolve(wish))
                elif isinstance(wish, Open | OpenProxy):
                    await self._admit(wish)
                else:
                    self._tally.add("refuse", self._loop.time(), reason=f"its agent says: {wish.text}")
        finally:
            while self._tasks:  # one that ends may begin another, to tell of it
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks)
            self._tally.flush()

    async def update(self, policy: Policy) -> None:
        """Decide by another policy from now on, and end the connections that it forbids; waits for their ends."""
        before, self._shared.policy = self._shared.policy, policy
        if policy.egress != before.egress:
            self._shared.pace = None if policy.egress is None else Pace(policy.egress)
        ended = []
        for link, task in self._links.items():
            why = self._forbidden(link, before)
            if why is not None:
                link.end(why)
                ended.append(task)
        if ended:
            await asyncio.wait(ended)

    def _forbidden(self, link: Link, before: Policy) -> str | None:
        """Why a connection has to end, if so."""
        if not link.host:
            return None
        if link.is_opened and before.secrets != self.policy.secrets:
            return "the secrets changed"
        try:
            link.check(self.policy)
        except Refused as error:
            return f"the rules changed: {error}"
        return None

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _answer(self, work: Coroutine[Any, Any, None]) -> None:
        """Answer a wish while others are read."""
        await self._answers.acquire()

        async def answer() -> None:
            try:
                await work
            except (SkerryError, OSError) as error:  # whoever wished is gone, or all of the agent is
                _log.debug("a wish of sandbox %s was not answered: %s", self.policy.id, error)

        self._begin(answer()).add_done_callback(lambda _: self._answers.release())

    async def _resolve(self, wish: Resolve) -> None:
        ports: frozenset[int] = frozenset()
        name = shown(wish.name)
        try:
            name = host_of(wish.name)
            ports = ports_of(self.policy, name)
            reason = f"no rule allows {name}"
        except Refused as error:
            reason = str(error)
        if not ports:
            self._tally.add("resolve", self._loop.time(), name=name, reason=reason)
        for port in await self._network.resolved(wish.wish, sorted(ports)):
            reason = f"a program of the box has port {port} at all addresses, and would be reached as {name}"
            self._tally.add("resolve", self._loop.time(), name=name, reason=reason)

    async def _admit(self, wish: Open | OpenProxy) -> None:
        """Begin to serve a connection, if there is room for it."""
        limits = self._limits
        reason = None
        if len(self._links) >= limits.connections:
            reason = f"more than {limits.connections} connections at once"
        elif len(self._links) >= self._shared.dialer.room:
            reason = "all sandboxes together have as many connections as the gate can have"
        elif not self._new.take(self._loop.time()):
            reason = f"more than {limits.connections_per_s:g} new connections a second"
        if reason is not None:
            self._tally.add("refuse", self._loop.time(), reason=reason)
            await self._answer(self._network.refuse(wish.wish))
            await asyncio.sleep(_PAUSE_S)
            return
        link = Link(self._shared)
        task = self._begin(self._serve(wish, link))
        link.begin(task)
        self._links[link] = task
        self._shared.dialer.links += 1
        task.add_done_callback(lambda _: self._forget(link))

    def _forget(self, link: Link) -> None:
        del self._links[link]
        self._shared.dialer.links -= 1

    async def _serve(self, wish: Open | OpenProxy, link: Link) -> None:
        """Serve a connection to its end. Its box sees it end if all went well, and else broken off."""
        try:
            try:
                await self._join(wish, link)
            except Refused as error:
                about = {"name": link.host, "port": link.port} if link.host else {"name": "proxy"}
                self._tally.add("refuse", self._loop.time(), **about, reason=str(error))
            await link.close()
            if link.client is not None:
                await finish(link.client)
        except (SkerryError, OSError) as error:
            _log.debug("a connection of sandbox %s to %s ended: %s", self.policy.id, link.host, error)
        except asyncio.CancelledError:
            if link.why is None:
                raise
        finally:
            await link.close()
            if link.client is not None:
                await link.client.close()
        if link.client is None:
            await self._answer(self._network.refuse(wish.wish))

    async def _join(self, wish: Open | OpenProxy, link: Link) -> None:
        """Join a connection with what it is for. Raises Refused, SkerryError or OSError."""
        if isinstance(wish, OpenProxy):
            link.client = Ahead(self._network.take(wish.wish))
            await serve_proxy(link.client, link, self._limits.first_bytes_s)
        else:
            link.host, link.port = shown(wish.name), wish.port
            join = await link.open(host_of(wish.name), wish.port)
            link.client = Ahead(self._network.take(wish.wish))
            await join(link.client)

    async def _keep_watch(self) -> None:
        """End what is idle, and write down what was counted."""
        limits = self._limits
        while True:
            await asyncio.sleep(limits.tick_s)
            now = self._loop.time()
            for link in self._links:
                if now - link.moved_at >= limits.idle_s:
                    link.end(f"no byte either way for {limits.idle_s:g} s")
            self._tally.flush(now)
