"""The box of one sandbox, as the gate has it: the stream on which its agent asks for connections, opened again whenever
it breaks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from skerry.agent.client import AgentClient
from skerry.aio import backoff
from skerry.errors import AgentUnreachable, SandboxGone, SkerryError
from skerry.gate.base import Policy
from skerry.gate.session import Session
from skerry.providers.base import BoxState, Provider

_DIAL_S = 30.0
"""How long a box may take until its network is up: an emulated machine of a busy host is slow."""
_LOOK_S = 10.0
_RETRY_S = (0.05, 15.0)
_STEADY_S = 10.0
"""Seconds after which a stream that breaks is opened again at once: before, somebody may break it on purpose."""
_ENDED = (BoxState.DEAD, BoxState.REMAINS)
_log = logging.getLogger("skerry.gate")


Begin = Callable[[Policy, AgentClient], Awaitable[Session]]
"""Bring the network of a box up: it is, by the agent's word, when the session is there."""


class Box:
    """Network of one sandbox, for as long as that lives."""

    def __init__(self, policy: Policy, provider: Provider, begin: Begin) -> None:
        self.policy = policy
        self.version = 0
        """Version of the record that it follows."""
        self.error = ""
        """Why its agent was not reached last."""
        self.is_gone = False
        """Whether the host says that there is no such box, or that it has ended."""
        self.provider = provider
        """What dials its agent; one with newer settings from the next time on."""
        self._begin = begin
        self._session: Session | None = None
        self._told = asyncio.Event()
        """Set when there is something new to know: it is up, or is gone."""
        self._hurry = asyncio.Event()
        self._awaited = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._session is not None

    @property
    def is_awaited(self) -> bool:
        """Whether somebody waits until it is up."""
        return self._awaited > 0

    @property
    def connections(self) -> int:
        return 0 if self._session is None else self._session.connections

    def start(self) -> None:
        """Dial, now and whenever the stream breaks."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"box {self.policy.id}")

    def hurry(self) -> None:
        """Dial at once, if the stream is broken: something has changed."""
        self.is_gone = False
        self._hurry.set()

    async def end(self) -> None:
        """Close the stream, and with it all connections of the box."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def change(self, policy: Policy) -> None:
        """Hold another policy; what that forbids is ended when this returns."""
        self.policy = policy
        if self._session is not None:
            await self._session.update(policy)

    async def wait_until_up(self) -> None:
        """Wait until the box's network is up. Raises SandboxGone or AgentUnreachable."""
        self._awaited += 1
        try:
            async with asyncio.timeout(_DIAL_S):
                while not self.is_up:
                    if self.is_gone:
                        raise SandboxGone(f"its box is gone: {self.error}")
                    self._told.clear()
                    await self._told.wait()
        except TimeoutError:
            raise AgentUnreachable(self.error or f"its agent did not answer within {_DIAL_S:g} s") from None
        finally:
            self._awaited -= 1

    async def _keep(self) -> None:
        waits = backoff(*_RETRY_S)
        while True:
            self._hurry.clear()
            since = time.monotonic()
            try:
                await self._serve()
                self.error = "its stream ended"
            except (SkerryError, OSError) as error:  # a timeout is an OSError too
                self.error = str(error) or f"its agent did not answer within {_DIAL_S:g} s"
            except Exception as error:  # a mistake of ours with one sandbox is no end of the others' network
                _log.exception("the network of sandbox %s failed", self.policy.id)
                self.error = type(error).__name__
            self.is_gone = await self._is_box_gone()
            self._told.set()
            if time.monotonic() - since > _STEADY_S or self._hurry.is_set():
                waits = backoff(*_RETRY_S)
            _log.debug("the network of sandbox %s is down: %s", self.policy.id, self.error)
            with suppress(TimeoutError):
                async with asyncio.timeout(next(waits)):
                    await self._hurry.wait()

    async def _serve(self) -> None:
        """Serve one stream to its end."""
        client: AgentClient | None = None
        try:
            async with asyncio.timeout(_DIAL_S):
                client = await AgentClient.greet(await self.provider.dial(self.policy.id), timeout_s=_DIAL_S)
                policy = self.policy
                session = await self._begin(policy, client)
            if policy is not self.policy:
                await session.update(self.policy)
            self._session, self.is_gone, self.error = session, False, ""
            self._told.set()
            await session.serve()
        finally:
            self._session = None
            if client is not None:
                client.close()

    async def _is_box_gone(self) -> bool:
        """Whether the host has no such box any more; while it does not tell, there is one."""
        try:
            async with asyncio.timeout(_LOOK_S):
                status = (await self.provider.discover()).get(self.policy.id)
        except (SkerryError, OSError) as error:
            _log.debug("the host does not tell of sandbox %s: %s", self.policy.id, error)
            return False
        return status is None or status.state in _ENDED
