"""A call of a relayed stream: its bytes both ways with credit, its answer, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from skerry.agent import call as agent_call
from skerry.agent.call import UP_WINDOW
from skerry.agent.client import AgentClient
from skerry.errors import AgentProtocolError, CallInterrupted, SkerryError
from skerry.model.tenants import Scope
from skerry.sandbox.connection import Connect

if TYPE_CHECKING:
    from skerry.surfaces.rest.agent_stream import Relay

_log = logging.getLogger("skerry.server")
WINDOW = 1 << 18
"""The most bytes of a call that come from a box before the client has taken those before."""
_CREDIT = 1 << 18
"""Bytes up after which the client may send as many more."""


class RelayedCall:
    """A call of a client, as a call of ours: bytes both ways with credit, its answer, and its line in the ledger."""

    scope: ClassVar[Scope] = Scope.READ

    def __init__(
        self, relay: Relay, id: int, method: str, params: dict[str, Any], attachment: bytes, window: int
    ) -> None:
        self.relay = relay
        self.sandbox = relay.sandbox
        self.id = id
        self.method = method
        self.params = params
        self.attachment = attachment
        self.window = window
        self.client: AgentClient | None = None
        self.call: agent_call.Call | None = None
        self._sendable = window
        self._room = asyncio.Event()
        self._up: deque[bytes | None] = deque()
        self._up_room = UP_WINDOW
        self._up_taken = 0
        self._up_came = asyncio.Event()
        self._is_up_over = False
        self._pump: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self.task = asyncio.create_task(self._run())

    # what the client says

    def feed(self, data: bytes | None) -> None:
        """Take bytes up, or their end; after that, nothing more is taken. Raises AgentProtocolError for more than the
        window."""
        if self._is_up_over or data == b"":  # else what costs no credit could be kept without end
            return
        self._is_up_over = data is None
        if data is not None:
            self._up_room -= len(data)
            if self._up_room < 0:
                raise AgentProtocolError("data without credit")
            self.relay.waits(len(data))
        self._up.append(data)
        self._up_came.set()
        self._ensure_pump()

    def credit(self, count: int) -> bool:
        """Let the box send more; False if that was never sent."""
        self._sendable += count
        self._room.set()
        return count > 0 and self._sendable <= self.window

    def cancel(self) -> None:
        self._is_cancelled = True
        if self.call is not None:
            self.call.cancel()
        else:
            self.task.cancel()

    # what is done

    async def _run(self) -> None:
        try:
            try:
                result = await self.work()
            except SkerryError as error:
                await self.relay.refuse(self.id, error)
            except asyncio.CancelledError:
                if not self._is_cancelled:
                    raise
                await self.relay.refuse(self.id, CallInterrupted("the call was cancelled"))
            except Exception:  # whatever it is, the client is not left waiting, and our log has more
                _log.exception("%s of a stream to sandbox %s failed", self.method, self.sandbox.id)
                await self.relay.refuse(self.id, SkerryError("the server failed; its log has more"))
            else:
                await self.relay.answer(self.id, result)
        finally:
            self.relay.ended(self.id)
            self.relay.waits(-sum(len(each) for each in self._up if each))
            if self._pump is not None:
                self._pump.cancel()
            if self.call is not None:
                self.call.abandon()

    async def work(self) -> Any:
        """Do it, and give the answer."""
        connect, _ = self.sandbox.connection.of_user(self.relay.user, self.sandbox.spec.user)
        return await self.pass_on(connect)

    async def pass_on(self, connect: Connect) -> msgspec.Raw:
        """Make the call at the agent, and pass on what comes."""
        self.client = await connect()
        call = self.client.open(
            self.method, self.params, attachment=self.attachment, window=min(self.window, WINDOW)
        )  # fmt: skip
        return await self.follow(call)

    async def follow(self, call: agent_call.Call) -> msgspec.Raw:
        """Pass on the bytes of an open call both ways, and give its answer."""
        self.call = call
        self._ensure_pump()
        async for fd, data in call.chunks():
            await self._down(fd, data)
        if not call.done:
            await self.relay.notify("end", {"id": self.id})
        return await call.result(msgspec.Raw)

    async def _down(self, fd: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            if self._sendable <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            part = view[: self._sendable]
            self._sendable -= len(part)
            self.count_down(len(part))
            await self.relay.notify("data", {"id": self.id, "fd": fd}, part)
            view = view[len(part) :]

    def count_down(self, count: int) -> None:
        """Hear of bytes that went to the client."""

    def count_up(self, count: int) -> None:
        """Hear of bytes that went to the box."""

    def _ensure_pump(self) -> None:
        if self._pump is None and self.call is not None and self._up:
            self._pump = asyncio.create_task(self._send_up(self.call))

    async def _send_up(self, call: agent_call.Call) -> None:
        while (piece := await self.next_up()) is not None:
            await call.send(piece)
            self.count_up(len(piece))
        call.end()

    async def next_up(self) -> bytes | None:
        """The next bytes of the client; None at their end."""
        while not self._up:
            self._up_came.clear()
            await self._up_came.wait()
        piece = self._up.popleft()
        if piece is not None:
            self.relay.waits(-len(piece))
            self._up_taken += len(piece)
            if self._up_taken >= _CREDIT:
                self._up_room += self._up_taken
                taken, self._up_taken = self._up_taken, 0
                await self.relay.notify("credit", {"id": self.id, "bytes": taken})
        return piece

    def give_back(self, piece: bytes) -> None:
        """Put bytes back before all others."""
        if piece:
            self.relay.waits(len(piece))
            self._up.appendleft(piece)
            self._up_taken -= len(piece)
