"""Calls to an agent, from their request to their answer, with their two byte streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from skerry.errors import AgentUnreachable, CallInterrupted, CallTimeout
from skerry.net.stream import Buffer, wake

if TYPE_CHECKING:
    from skerry.agent.client import AgentClient

T = TypeVar("T")
OnData = Callable[[int, memoryview], object]

WINDOW = 1 << 20
UP_WINDOW = 4 << 20
NOTHING = msgspec.Raw(b"{}")
_UP_CHUNK = 1 << 19
_JOINED = 1 << 16
_MANY = 1024


class Call:
    """One call: its answer, bytes up with credit, bytes down as chunks or to a callback, and its deadline."""

    def __init__(
        self, client: AgentClient, id: int, window: int, on_data: OnData | None, up_window: int = UP_WINDOW
    ) -> None:
        self.id = id
        self._client = client
        self._answer: asyncio.Future[msgspec.Raw] = client.loop.create_future()
        self._on_data = on_data
        self._window = window
        self._receivable = window
        self._consumed = 0
        self._chunks: deque[tuple[int, bytes | bytearray]] = deque()
        self._ended = False
        self._readers: list[asyncio.Future[None]] = []
        self._up_window = up_window
        self._sendable = up_window
        self._senders: list[asyncio.Future[None]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._patience_s: float | None = None
        self._last_progress = client.loop.time()

    def receivable(self, count: int) -> bool:
        self._last_progress = self._client.loop.time()
        self._receivable -= count
        return self._receivable >= 0

    @property
    def unused_credit(self) -> int:
        """Bytes that the agent may send without more credit."""
        return max(0, self._receivable)

    def deliver(self, fd: int, data: memoryview) -> None:
        if self._on_data is not None:
            try:
                self._on_data(fd, data)
            except Exception as error:  # the caller's own trouble, such as a full disk: it ends this call only
                self.stop(error)
            self.consume(len(data))
        else:
            self._keep(fd, data)
            wake(self._readers)

    def _keep(self, fd: int, data: memoryview) -> None:
        """Join small pieces; where there are many also across the other descriptor's, as the two have no order."""
        near = 2 if len(self._chunks) > _MANY else 1
        for at in range(-1, -1 - min(near, len(self._chunks)), -1):
            kept_fd, kept = self._chunks[at]
            if kept_fd == fd and len(kept) + len(data) <= _JOINED:
                assert isinstance(kept, bytearray)
                kept.extend(data)
                return
        self._chunks.append((fd, bytearray(data) if len(data) < _JOINED else bytes(data)))

    def add_credit(self, count: int) -> bool:
        self._last_progress = self._client.loop.time()
        self._sendable += count
        wake(self._senders)
        return count > 0 and self._sendable <= self._up_window

    def end_data(self) -> bool:
        """Take the end of the bytes down; False if it had come before."""
        first, self._ended = not self._ended, True
        wake(self._readers)
        return first

    def settle(self, result: msgspec.Raw, error: Exception | None = None) -> None:
        if self._answer.done():
            return
        if self._deadline is not None:
            self._deadline.cancel()
        if error is not None:
            self._answer.set_exception(error)
            self._answer.exception()  # a call may be dropped unawaited: asyncio need not complain
        else:
            self._answer.set_result(result)
        self._ended = True
        wake(self._readers)
        wake(self._senders)

    @property
    def done(self) -> bool:
        return self._answer.done()

    def consume(self, count: int) -> None:
        """Let the agent send as many more bytes as were used up, not for every little piece."""
        self._consumed += count
        if self._consumed * 4 >= self._window and not self._answer.done():
            self._client.notify("credit", {"id": self.id, "bytes": self._consumed})
            self._receivable += self._consumed
            self._consumed = 0

    async def chunks(self) -> AsyncIterator[tuple[int, bytes]]:
        """Yield the bytes down, as (fd, bytes), to their end; then raise if the call failed."""
        while True:
            while self._chunks:
                fd, data = self._chunks.popleft()
                self.consume(len(data))
                yield fd, bytes(data)
            if self._ended:
                if self._answer.done():
                    try:
                        self._answer.result()
                    except (AgentUnreachable, CallInterrupted) as error:
                        await self._client.explain(error)
                        raise
                return
            await self._wait(self._readers)

    def _wait(self, among: list[asyncio.Future[None]]) -> asyncio.Future[None]:
        among.append(self._client.loop.create_future())
        return among[-1]

    async def send(self, data: Buffer) -> None:
        """Send bytes up, waiting for the agent's credit. Quiet once the call has ended: its answer tells why."""
        view = memoryview(data).cast("B")
        while view and not self._answer.done():
            if self._sendable <= 0:
                await self._wait(self._senders)
                continue
            part = view[: min(self._sendable, _UP_CHUNK)]
            self._sendable -= len(part)
            self._client.notify("data", {"id": self.id}, part)
            view = view[len(part) :]
            await self._client.drained()

    def end(self) -> None:
        """End the bytes up."""
        if not self._answer.done():
            self._client.notify("end", {"id": self.id})

    def cancel(self) -> None:
        """Ask the agent to end the call now; its answer still comes."""
        if not self._answer.done():
            self._client.notify("cancel", {"id": self.id})

    def within(self, timeout_s: float | None) -> Self:
        """Give the whole call a deadline, sending and receiving included."""
        if timeout_s is not None and not self._answer.done():
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = self._client.loop.call_later(timeout_s, self._expire, timeout_s)
        return self

    def patiently(self, patience_s: float) -> Self:
        """Let the call take for ever, as long as bytes move either way, at least this often."""
        self._patience_s = patience_s
        return self.within(patience_s)

    async def result(self, type: type[T], timeout_s: float | None = None) -> T:
        """Await the answer, by a deadline if one is given. If the wait is cancelled, the call is given up."""
        self.within(timeout_s)
        try:
            return self._client.decode(await self._answer, type)
        except asyncio.CancelledError:
            self.abandon()
            raise
        except (AgentUnreachable, CallInterrupted) as error:
            await self._client.explain(error)
            raise

    def abandon(self) -> None:
        """Cancel, and drop whatever still comes."""
        if self._client.forget(self):
            self._client.notify("cancel", {"id": self.id})
            self.settle(NOTHING, CallInterrupted("the call was given up"))

    def stop(self, error: Exception) -> None:
        """End the call with an error of ours."""
        self.settle(NOTHING, error)
        self.abandon()

    def _expire(self, timeout_s: float) -> None:
        if self._patience_s is not None:
            left = self._last_progress + self._patience_s - self._client.loop.time()
            if left > 0:
                self._deadline = self._client.loop.call_later(left, self._expire, timeout_s)
                return
        self.stop(CallTimeout(f"the agent did not answer within {timeout_s:g} s"))
