"""The host's end of an agent's stream. It trusts no byte that comes: the first violation ends the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from skerry.agent.call import NOTHING, WINDOW, Call, OnData
from skerry.agent.stream import Buffer, Stream
from skerry.errors import (
    AgentError,
    AgentProtocolError,
    AgentUnreachable,
    CallInterrupted,
    CallTimeout,
    DiskFull,
    InterpreterNotFound,
    InvalidSpec,
    LimitReached,
    NotFound,
    PathDenied,
    PathExists,
    PathInvalid,
    PathNotFound,
    SkerryError,
    Unsupported,
)

T = TypeVar("T")

PROTOCOL = 1
MAX_LINE = 1 << 20
MAX_ATTACHMENT = 1 << 20
CONTROL_TIMEOUT_S = 30.0
_MAX_STRAYS = 10_000
_QUIET_S = 10.0


class _RpcError(msgspec.Struct):
    code: int
    message: str
    data: dict[str, Any] = {}


class _Params(msgspec.Struct):
    id: int = -1
    fd: int = 1
    bytes: int = 0


class _Frame(msgspec.Struct):
    id: int | None = None
    method: str | None = None
    params: _Params | None = None
    result: msgspec.Raw = msgspec.Raw(b"{}")
    error: _RpcError | None = None
    bytes: int = 0


class Hello(msgspec.Struct, frozen=True):
    """How the agent introduces itself."""

    protocol: int
    agent: str
    pid: int
    started: float


_decode_frame = msgspec.json.Decoder(_Frame).decode
_encode = msgspec.json.Encoder().encode


class AgentClient:
    """Calls to one agent over one stream; many may be open at once."""

    def __init__(self, stream: Stream) -> None:
        self.loop = asyncio.get_running_loop()
        self._stream = stream
        self._calls: dict[int, Call] = {}
        self._next_id = 0
        self._line = bytearray()
        self._missing = 0
        self._target: tuple[Call, int] | None = None
        self._strays = 0
        self._error: SkerryError | None = None
        self._last_heard = self.loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
        stream.start(self)

    @classmethod
    async def greet(cls, stream: Stream, *, token: str | None = None, timeout_s: float = 10.0) -> AgentClient:
        """Say hello on a fresh stream; a connection that nobody answers is not one."""
        client = cls(stream)
        params: dict[str, Any] = {"protocol": PROTOCOL} if token is None else {"protocol": PROTOCOL, "token": token}
        try:
            hello = await client.call("hello", params, type=Hello, timeout_s=timeout_s)
            if hello.protocol != PROTOCOL:
                raise AgentProtocolError(f"the agent speaks protocol {hello.protocol}, this program {PROTOCOL}")
        except (CallTimeout, CallInterrupted) as error:
            client.close()
            raise AgentUnreachable(f"no agent answers: {error}") from error
        except BaseException:
            client.close()
            raise
        return client

    @property
    def is_open(self) -> bool:
        return self._error is None

    async def call(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        type: type[T],
        attachment: Buffer = b"",
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> T:
        """One request, one answer, by a deadline."""
        return await self.open(method, params, attachment=attachment).result(type, timeout_s)

    def open(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        attachment: Buffer = b"",
        on_data: OnData | None = None,
        window: int = WINDOW,
    ) -> Call:
        """Begin a call that has byte streams. With `on_data` bytes are handed over as they come; without, `chunks`
        gives them. The view that `on_data` gets is only valid during the call."""
        if self._error is not None:
            raise self._error
        self._next_id += 1
        call = Call(self, self._next_id, window, on_data)
        self._calls[call.id] = call
        if window != WINDOW:
            params = {**(params or {}), "window": window}
        request: dict[str, Any] = {"jsonrpc": "2.0", "id": call.id, "method": method, "params": params or {}}
        self._send(request, attachment)
        if self._watchdog is None:
            self._last_heard = self.loop.time()
            self._watchdog = self.loop.call_later(_QUIET_S, self._check_alive)
        return call

    def notify(self, method: str, params: Mapping[str, Any], attachment: Buffer = b"") -> None:
        if self._error is None:
            self._send({"method": method, "params": params}, attachment)

    def _send(self, message: dict[str, Any], attachment: Buffer) -> None:
        count = memoryview(attachment).nbytes
        if count:
            message["bytes"] = count
        try:
            line = _encode(message)
        except (TypeError, ValueError) as error:
            self._calls.pop(message.get("id", 0), None)
            raise InvalidSpec(f"this cannot be sent to the agent: {error}") from None
        if len(line) >= MAX_LINE or count > MAX_ATTACHMENT:
            self._calls.pop(message.get("id", 0), None)
            raise InvalidSpec(f"the request is larger than {MAX_LINE} bytes; give bulk data as a file or stdin")
        if count:
            self._stream.write(line + b"\n", attachment)
        else:
            self._stream.write(line + b"\n")

    async def drained(self) -> None:
        await self._stream.drained()

    def forget(self, call: Call) -> bool:
        """Drop a call whose answer nobody wants; True if it was still open. Nothing more reaches it."""
        if self._target is not None and self._target[0] is call:
            self._target = None
        return self._calls.pop(call.id, None) is not None

    def decode(self, raw: msgspec.Raw, type: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=type)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self._break(f"an answer has the wrong form: {error}")
            assert self._error is not None
            raise self._error from None

    def release(self) -> Stream:
        """Give the stream away, open, to be greeted again; this client is at its end."""
        self._fail_all(CallInterrupted("the stream was given away"), close=False)
        return self._stream

    def close(self) -> None:
        self._fail_all(CallInterrupted("the stream was closed on this side"))

    # Receiver

    def received(self, data: memoryview) -> None:
        self._last_heard = self.loop.time()
        at, size = 0, len(data)
        while at < size and self._error is None:
            if self._missing:
                take = min(self._missing, size - at)
                self._missing -= take
                if self._target is not None:
                    call, fd = self._target
                    call.deliver(fd, data[at : at + take])
                at += take
            else:
                at = self._read_line(data, at)

    def closed(self, error: Exception | None) -> None:
        why = f"the stream to the agent broke: {error}" if error else "the agent closed the stream"
        self._fail_all(CallInterrupted(why))

    def _read_line(self, data: memoryview, at: int) -> int:
        piece = bytes(data[at : at + 512])
        end = piece.find(b"\n")
        if end < 0:
            piece = bytes(data[at : at + MAX_LINE])
            end = piece.find(b"\n")
        if end < 0 or self._line:
            self._line += piece if end < 0 else piece[:end]
            if len(self._line) > MAX_LINE:
                self._break("a line is too long")
            if end < 0:
                return at + len(piece)
            line, self._line = bytes(self._line), bytearray()
        else:
            line = piece[:end]
        try:
            frame = _decode_frame(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._break(f"a line is not a frame: {error}")
        else:
            self._on_frame(frame)
        return at + end + 1

    def _on_frame(self, frame: _Frame) -> None:
        if not 0 <= frame.bytes <= MAX_ATTACHMENT:
            self._break("an attachment is too long")
        elif frame.method is not None:
            self._on_notification(frame.method, frame.params or _Params(), frame.bytes)
        elif frame.id is None or frame.bytes:
            self._break("a frame is neither an answer nor a notification")
        else:
            call = self._calls.pop(frame.id, None)
            if call is None:
                self._stray()
            elif frame.error is not None:
                call.settle(NOTHING, _error_of(frame.error))
            else:
                call.settle(frame.result)

    def _on_notification(self, method: str, params: _Params, count: int) -> None:
        self._missing = count
        call = self._calls.get(params.id)
        self._target = (call, params.fd) if call is not None else None
        if call is None:
            self._stray()
        elif method == "data":
            if params.fd not in (1, 2) or not call.receivable(count):
                self._break("data without credit, or on no known descriptor")
        elif count:
            self._break(f"{method!r} with an attachment")
        elif method == "credit":
            if not call.add_credit(params.bytes):
                self._break("credit for bytes that were never sent")
        elif method == "end":
            call.end_data()

    def _stray(self) -> None:
        """An answer to a call that we gave up, or an invention: harmless, unless there is no end of it."""
        self._strays += 1
        if self._strays > _MAX_STRAYS:
            self._break("too many frames belong to no call")

    def _break(self, why: str) -> None:
        self._fail_all(AgentProtocolError(f"the agent broke the protocol: {why}. Destroy this sandbox"))

    def _fail_all(self, error: SkerryError, *, close: bool = True) -> None:
        if self._error is not None:
            return
        self._error = error
        if self._watchdog is not None:
            self._watchdog.cancel()
        calls, self._calls = self._calls, {}
        if close:
            self._stream.close()
        for call in calls.values():
            call.settle(NOTHING, error)

    def _check_alive(self) -> None:
        """A call may take for ever, an agent may not be silent for ever: it answers pings while it works."""
        self._watchdog = None
        if not self._calls:
            return
        quiet = self.loop.time() - self._last_heard
        if quiet > 2.5 * _QUIET_S:
            self._fail_all(AgentUnreachable(f"the agent has been silent for {quiet:.0f} s"))
            return
        self._watchdog = self.loop.call_later(_QUIET_S, self._check_alive)
        if quiet > 0.9 * _QUIET_S:
            self._next_id += 1
            self._calls[self._next_id] = Call(self, self._next_id, WINDOW, None)
            self._send({"jsonrpc": "2.0", "id": self._next_id, "method": "ping"}, b"")


_KINDS: dict[str, type[SkerryError]] = {
    "invalid": InvalidSpec,
    "not_found": PathNotFound,
    "exists": PathExists,
    "denied": PathDenied,
    "not_a_directory": PathInvalid,
    "is_a_directory": PathInvalid,
    "not_empty": PathInvalid,
    "not_regular": PathInvalid,
    "name_too_long": PathInvalid,
    "no_space": DiskFull,
    "limit": LimitReached,
    "cancelled": CallInterrupted,
    "no_process": NotFound,
    "refused": NotFound,
    "no_interpreter": InterpreterNotFound,
    "failed": AgentError,
}


def _error_of(error: _RpcError) -> SkerryError:
    kind = error.data.get("kind")
    message = error.message[:4096]
    if kind == "unsupported":
        return Unsupported("call", "agent", message)
    cls = _KINDS.get(kind, AgentError) if isinstance(kind, str) else AgentError
    return cls(message)
