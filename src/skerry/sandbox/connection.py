"""Streams from a handle to the agents of its box: the box's own agent, and one for each other user."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

from skerry import trace
from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.aio import backoff
from skerry.errors import (
    AgentUnreachable,
    CallTimeout,
    NotFound,
    ProviderError,
    SandboxGone,
    SkerryError,
    Unsupported,
    WrongState,
)
from skerry.model import states
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import BoxState, Capability, HasUsers, Provider

_GREETING_S = CONTROL_TIMEOUT_S
_LOOK_S = 3.0
"""How long a box that does not answer is looked for, until it is said to hang."""
_STOPPED_S = 1.0
"""How long it has to be stopped, until it is said to be just that."""
_BY_HAND = frozenset({State.PAUSED, State.ASLEEP, State.STOPPED})
"""States that others may have put it in, or out of, without a word to this handle."""
_STANDING = frozenset({BoxState.PAUSED, BoxState.ASLEEP})
_WAKE_TRIES = 3
"""How often a call wakes a sandbox that others put to sleep again."""
_log = logging.getLogger("skerry.sandbox")
Connect = Callable[[], Awaitable[AgentClient]]


class Connection:
    """Open streams of one handle. A stream that broke is opened again by the next call: agents stay."""

    def __init__(
        self,
        id: SandboxId,
        known_env: Callable[[AgentClient], Awaitable[dict[str, str]]],
        look: Callable[[], Awaitable[None]],
        wake: Callable[[], Awaitable[None]],
    ) -> None:
        """`known_env` gives the environment for an agent of another user, who may be root. `look` asks the host what
        became of a box that does not answer, and has the state follow. `wake` wakes one that sleeps, if it is one that
        calls wake."""
        self._id = id
        self._known_env = known_env
        self._look = look
        self._wake = wake
        self._waking = asyncio.Lock()
        self._provider: Provider | None = None
        self.state: State | None = None
        """The sandbox's state as far as this handle knows; None before it is started."""
        self.known_at = 0.0
        """When it was told that, by the monotonic clock."""
        self._client: AgentClient | None = None
        self._of_others: dict[str, AgentClient] = {}
        self._dialling = asyncio.Lock()

    @property
    def provider(self) -> Provider:
        """The provider of the box. Raises WrongState before the sandbox is started."""
        if self._provider is None:
            raise self._unusable()
        return self._provider

    def attach(self, state: State, provider: Provider | None = None) -> None:
        """Note the sandbox's state, and the provider of its box."""
        self.state = state
        self.known_at = time.monotonic()
        self._provider = provider or self._provider

    @property
    def client(self) -> AgentClient | None:
        """The client of the box's own agent, if its stream is open."""
        return self._client if self._client is not None and self._client.is_open else None

    def clients(self) -> list[AgentClient]:
        """Clients of all agents whose streams are open."""
        known = (self._client, *self._of_others.values())
        return [client for client in known if client is not None and client.is_open]

    async def connect(self) -> AgentClient:
        """The open stream to the box's own agent, or a new one. Raises WrongState, AgentUnreachable, or SandboxGone
        if there is no box any more."""
        if self._client is not None and self._client.is_open:
            return self._client
        for again in range(_WAKE_TRIES, 0, -1):
            if self.state in _BY_HAND or self.state is State.LOST:
                await self._follow_host()
            await self._wake_up()
            async with self._dial_lock():
                if self._client is not None and self._client.is_open:
                    break
                if self._client is not None:
                    _log.debug("the stream to sandbox %s broke: dial again", self._id)
                try:
                    self._client = await self._open()
                    break
                except WrongState:
                    if self.state is not State.ASLEEP or again == 1:
                        raise
        assert self._client is not None
        return self._client

    async def _wake_up(self) -> None:
        """Wake it if it sleeps, once for all who call."""
        if self.state is not State.ASLEEP:
            return
        async with self._waking:
            if self.state is State.ASLEEP:
                await self._wake()

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Open no stream meanwhile: who calls waits, and then sees the state that it has."""
        async with self._dialling:
            yield

    async def _open(self) -> AgentClient:
        """A new stream to the box's own agent. Raises WrongState if somebody stopped or paused it by hand."""
        try:
            return await self._dial()
        except (AgentUnreachable, NotFound, ProviderError) as error:
            await self._follow_host()
            if self.state in _BY_HAND:
                raise self._unusable() from error
            hangs = isinstance(error.__cause__, CallTimeout)
            if isinstance(error, NotFound) or (not hangs and await self._is_gone()):
                raise SandboxGone(f"the box of sandbox {self._id} is gone: {error}") from error
            raise

    async def _dial(self) -> AgentClient:
        with trace.span("skerry.dial", provider=self.provider.name, sandbox=self._id):
            client = await AgentClient.greet(await self.provider.dial(self._id), timeout_s=_GREETING_S)
        client.on_broken = self._explain
        return client

    async def _explain(self) -> None:
        """Raise SandboxGone if that is why a stream broke: a box that lives takes another."""
        try:
            async with asyncio.timeout(_GREETING_S + _LOOK_S):
                await self.connect()
        except SandboxGone:
            raise
        except (SkerryError, OSError) as error:  # a timeout is an OSError too
            _log.debug("the stream to sandbox %s broke, and there is no other: %s", self._id, error)

    async def _is_gone(self) -> bool:
        """Whether the host has no such box any more. A host tells of one that has just ended that it runs, or is
        stopped, until it knows more."""
        stopped = backoff(0.01, 0.2, _STOPPED_S)
        try:
            async with asyncio.timeout(_LOOK_S):
                for delay_s in backoff(0.01, 0.2):
                    status = (await self.provider.discover()).get(self._id)
                    if status is None or status.state in (BoxState.DEAD, BoxState.REMAINS):
                        return True
                    if status.state in _STANDING or (status.state is BoxState.STOPPED and not next(stopped, 0)):
                        return False
                    await asyncio.sleep(delay_s)
        except (SkerryError, OSError) as error:
            _log.debug("the host does not tell of sandbox %s: %s", self._id, error)
        return False

    async def _follow_host(self) -> None:
        try:
            await self._look()
        except SkerryError as error:
            _log.debug("what became of sandbox %s is not known: %s", self._id, error)

    def of_user(self, user: str | None, own: str | None, *, background: bool = False) -> tuple[Connect, str | None]:
        """A function that reaches an agent for a command of `user` in a box whose own user is `own`, and the user to
        name in the call: an agent that is not root can be nobody else. Raises Unsupported for a background command of
        another."""
        if user is None:
            return self.connect, None
        if Capability.USERS not in self.provider.capabilities:
            return self.connect, user
        if user == own:
            return self.connect, None
        if background:
            reason = "a process of another user ends with the stream that began it; start it in the foreground"
            raise Unsupported("background", self.provider.name, reason)
        return partial(self._connect_as, user), None

    async def _connect_as(self, user: str) -> AgentClient:
        """A stream to an agent that runs as another user, and ends with the stream."""
        client = self._of_others.get(user)
        if client is not None and client.is_open:
            return client
        env = await self._known_env(await self.connect())
        async with self._dial_lock():
            client = self._of_others.get(user)
            if client is None or not client.is_open:
                stream = await cast("HasUsers", self.provider).dial_as(self._id, user)
                client = await AgentClient.greet(stream, timeout_s=_GREETING_S)
                try:
                    if env:
                        await client.call("set_env", {"env": env}, type=dict[str, Any])
                except BaseException:
                    client.close()
                    raise
                client.on_broken = self._explain
                self._of_others[user] = client
            return client

    async def terminate(self, grace_s: float) -> None:
        """Ask all processes in the box to end, and wait until they have, at most so long. Never raises for what the
        box does: it may be gone, hang or lie, and is ended by force then."""
        if grace_s <= 0 or self.state is not State.READY or self.provider.runs_nothing(self._id):
            return
        try:
            async with asyncio.timeout(grace_s):
                async with self._dial_lock():
                    self._client = self.client or await self._dial()
                asked = []
                for client in self.clients():
                    client.on_broken = None  # whatever became of it, it is to end
                    asked.append(client.open("terminate", {"grace_s": grace_s}))
                for call in asked:
                    await call.result(dict[str, Any])
        except Exception as error:  # whatever a provider raises must not keep a box from its end
            _log.debug("sandbox %s ends by force: %s", self._id, str(error) or f"it took longer than {grace_s:g} s")

    def close(self) -> None:
        """Close all streams. The next call opens one again."""
        for client in self.clients():
            client.close()
        self._of_others.clear()
        self._client = None

    @asynccontextmanager
    async def _dial_lock(self) -> AsyncIterator[None]:
        if self.state is not State.READY:
            raise self._unusable()
        async with self._dialling:
            yield

    def _unusable(self) -> WrongState:
        how = "enter it with `with`, or use create()" if self.state is None else states.unusable(self.state)
        kind = SandboxGone if self.state in (State.DESTROYED, State.LOST) else WrongState
        return kind(f"sandbox {self._id} cannot be used: {how}")
