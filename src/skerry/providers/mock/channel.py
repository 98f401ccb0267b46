"""The mock agent's end of a stream: frames in, calls out, each with its two byte streams and their credit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from skerry.agent.guest import wire
from skerry.agent.guest.channel import Failure, failure_of
from skerry.providers.mock.kernel import Bell
from skerry.providers.mock.stream import MemoryStream

if TYPE_CHECKING:
    from skerry.providers.mock.kernel import Process

WINDOW = 1 << 20
_GARBAGE = b'{"jsonrpc": not a frame \xff\xfe\n'
Handler = Callable[["Call"], Awaitable[dict[str, Any]]]


class Call:
    """A call from its request to its answer."""

    def __init__(self, channel: Channel, message: dict[str, Any], attachment: bytes) -> None:
        params = message.get("params")
        self.channel = channel
        self.id: int = message["id"]
        self.method = str(message.get("method"))
        self.params: dict[str, Any] = params if isinstance(params, dict) else {}
        self.attachment = attachment
        self.task: asyncio.Task[None] | None = None
        self.process: object = None
        """What a `signal` or `resize` of this call means."""
        self._on_data: Callable[[bytes], None] = self._keep
        self._on_end: Callable[[], None] = self._end
        self.on_cancel: Callable[[], None] = self._cancel
        window = self.params.get("window")
        self._room = window if type(window) is int and window > 0 else WINDOW
        self._pending: deque[tuple[int, bytes]] = deque()
        self._received: deque[bytes] = deque()
        self._ended = False
        self._bell = Bell()

    def post(self, data: bytes, fd: int = 1) -> None:
        """Send as soon as there is credit; `flushed` waits for that."""
        if data and not self.channel.is_closed:
            self._pending.append((fd, data))
            self._flush()

    async def flushed(self, process: Process | None = None) -> None:
        while self._pending and not self.channel.is_closed:
            await self._bell.wait(process, outside=True)

    async def send(self, data: bytes) -> None:
        self.post(data)
        await self.flushed()

    def drop_pending(self) -> None:
        self._pending.clear()
        self._bell.ring()

    def _flush(self) -> None:
        while self._pending and self._room > 0:
            fd, data = self._pending.popleft()
            size = min(self._room, wire.MAX_ATTACHMENT)
            if len(data) > size:
                self._pending.appendleft((fd, data[size:]))
            part = data[:size]
            self._room -= len(part)
            self.channel.send({"method": "data", "params": {"id": self.id, "fd": fd}, "bytes": len(part)}, part)
        if not self._pending:
            self._bell.ring()

    def send_end(self) -> None:
        self.channel.send({"method": "end", "params": {"id": self.id}})

    def acknowledge(self, count: int) -> None:
        if count and self.id in self.channel.calls:
            self.channel.send({"method": "credit", "params": {"id": self.id, "bytes": count}})

    async def read(self) -> bytes:
        """The next bytes from the host; none at their end."""
        while not self._received and not self._ended:
            await self._bell.wait(None)
        data = self._received.popleft() if self._received else b""
        self.acknowledge(len(data))
        return data

    def route(self, on_data: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        """Hand over what came already, and all that comes, instead of keeping it for `read`."""
        self._on_data, self._on_end = on_data, on_end
        while self._received:
            on_data(self._received.popleft())
        if self._ended:
            on_end()

    async def read_all(self) -> bytes:
        chunks = []
        while chunk := await self.read():
            chunks.append(chunk)
        return b"".join(chunks)

    def notified(self, method: str, params: dict[str, Any], attachment: bytes) -> None:
        if method == "data":
            self._on_data(attachment)
        elif method == "end":
            self._on_end()
        elif method == "cancel":
            self.on_cancel()
        elif method == "credit" and type(params.get("bytes")) is int:
            self._room += params["bytes"]
            self._flush()

    def _keep(self, data: bytes) -> None:
        self._received.append(data)
        self._bell.ring()

    def _end(self) -> None:
        self._ended = True
        self._bell.ring()

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Channel:
    """One stream to the agent."""

    def __init__(self, stream: MemoryStream, handlers: dict[str, Handler], *, garbage: bool) -> None:
        self.calls: dict[int, Call] = {}
        self.is_closed = False
        self.on_close: Callable[[], None] = lambda: None
        self.frozen: list[bytes] | None = None
        """What came while the box stood still."""
        self.hangs = False
        self.garbage = garbage
        self._stream = stream
        self._handlers = handlers
        self._parser = wire.Parser()
        self._greeted = False
        stream.start(self)

    def freeze(self) -> None:
        self.frozen = [] if self.frozen is None else self.frozen

    def thaw(self) -> None:
        held, self.frozen = self.frozen or [], None
        for data in held:
            self.received(memoryview(data))

    def received(self, data: memoryview) -> None:
        if self.frozen is not None:
            self.frozen.append(bytes(data))
            return
        if self.hangs:
            return
        try:
            for message, attachment in self._parser.feed(data):
                self._on_frame(message, bytes(attachment))
        except wire.ProtocolError:
            self.close()

    def _on_frame(self, message: dict[str, Any], attachment: bytes) -> None:
        if type(message.get("id")) is int and "method" in message:
            self._open(Call(self, message, attachment))
            return
        params = message.get("params")
        call = self.calls.get(params.get("id", -1)) if isinstance(params, dict) else None
        if call is not None and isinstance(params, dict):
            call.notified(str(message.get("method")), params, attachment)

    def _open(self, call: Call) -> None:
        if not self._greeted and call.method != "hello":
            self.close()
            return
        self._greeted = True
        if self.garbage and call.method != "hello":
            self._stream.write(_GARBAGE)
            return
        self.calls[call.id] = call
        call.task = asyncio.get_running_loop().create_task(self._answer(call))
        call.task.add_done_callback(lambda task: self._ended(call, task))

    async def _answer(self, call: Call) -> None:
        handler = self._handlers.get(call.method)
        if handler is None:
            self._reply(call, error={"code": -32601, "message": f"no method is called {call.method!r}"})
            return
        try:
            result = await handler(call)
            await call.flushed()
        except OSError as problem:
            self._fail(call, failure_of(problem))
        except Failure as failure:
            self._fail(call, failure)
        except Exception as bug:  # the caller is told, as the real agent does
            self._fail(call, Failure("failed", f"{type(bug).__name__}: {bug}"))
        else:
            self._reply(call, result=result)

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        if task.cancelled() and not self.is_closed:
            self._fail(call, Failure("cancelled", "cancelled"))

    def _fail(self, call: Call, failure: Failure) -> None:
        self._reply(call, error={"code": -32000, "message": str(failure), "data": {"kind": failure.kind}})

    def _reply(self, call: Call, **answer: dict[str, Any]) -> None:
        if self.calls.pop(call.id, None) is not None:
            self.send({"jsonrpc": "2.0", "id": call.id, **answer})

    def send(self, message: dict[str, Any], attachment: bytes = b"") -> None:
        if not self.is_closed and not self.hangs:
            self._stream.write(wire.encode(message), attachment)

    def close(self, error: Exception | None = None) -> None:
        self._stream.end(error)

    def closed(self, error: Exception | None) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for call in list(self.calls.values()):
            call.drop_pending()
            if call.task is not None:
                call.task.cancel()
        self.calls.clear()
        self.on_close()
