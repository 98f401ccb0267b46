"""Client of an agent: the host's end of its stream. It trusts no byte: the first violation ends the stream."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from skerry import errors
from skerry.agent.call import NOTHING, UP_WINDOW, WINDOW, Call, OnData
from skerry.model.results import Id, Time
from skerry.net.stream import Buffer, Stream

_log = logging.getLogger("skerry.agent")

T = TypeVar("T")

PROTOCOL = 1
MAX_LINE = 1 << 20
MAX_ATTACHMENT = 1 << 20
CONTROL_TIMEOUT_S = 30.0
"""How long an agent may take for a short answer, its first too: that waits until whatever leads to the agent has
started, which in an emulated machine of a busy host takes more than ten seconds."""
NO_METHOD = -32601
_MAX_STRAYS = 10_000
_STRAYS_OF_A_CALL = 64
"""Frames that may still be on their way when a call is given up, so that a stream may live for long."""
_MAX_GIVEN_UP = 1024
_QUIET_S = 10.0
_GREETED_S = 1.0  # how long an answer to a greeting is good for whoever gets the stream next


class RpcError(msgspec.Struct):
    """Error of JSON-RPC, as the wire has it."""

    code: int
    message: str
    data: Any = None


class _Params(msgspec.Struct):
    id: int = -1
    fd: int = 1
    bytes: int = 0


class _Frame(msgspec.Struct):
    id: int | None = None
    method: str | None = None
    params: _Params | None = None
    result: msgspec.Raw = msgspec.Raw(b"{}")
    error: RpcError | None = None
    bytes: int = 0


class Hello(msgspec.Struct, frozen=True):
    """Answer to the first request."""

    protocol: int
    agent: str
    pid: Id
    started: Time


_decode_frame = msgspec.json.Decoder(_Frame).decode
_encode = msgspec.json.Encoder().encode


class AgentClient:
    """Calls to one agent over one stream; many may be open at once."""

    max_line = MAX_LINE
    max_attachment = MAX_ATTACHMENT

    def __init__(self, stream: Stream) -> None:
        self.loop = asyncio.get_running_loop()
        self._stream = stream
        self._calls: dict[int, Call] = {}
        self._next_id = 0
        self._line = bytearray()
        self._missing = 0
        self._target: tuple[Call, int] | None = None
        self._strays = 0
        self._given_up: dict[int, int] = {}
        """Calls that were dropped before their answer, and how many bytes may be on their way for each."""
        self._error: errors.SkerryError | None = None
        self.on_broken: Callable[[], Awaitable[None]] | None = None
        """Asked why the other side ended the stream: it may raise a better error."""
        self._last_heard = self.loop.time()
        self._watchdog: asyncio.TimerHandle | None = None
        stream.start(self)

    @classmethod
    async def greet(
        cls, stream: Stream, *, token: str | None = None, timeout_s: float = CONTROL_TIMEOUT_S
    ) -> AgentClient:
        """Say hello on a fresh stream, with its token if it has one; an agent that knows no hello gets a client that
        speaks the plain dialect. Raises AgentUnreachable if nobody answers, or AgentProtocolError."""
        client = cls(stream)
        token = token or stream.token
        if client.loop.time() < stream.greeted_until:
            return client
        params: dict[str, Any] = {"protocol": PROTOCOL} if token is None else {"protocol": PROTOCOL, "token": token}
        try:
            hello = await client.call("hello", params, type=Hello, timeout_s=timeout_s)
            if hello.protocol != PROTOCOL:
                raise errors.AgentProtocolError(f"the agent speaks protocol {hello.protocol}, this program {PROTOCOL}")
        except BaseException as error:
            if isinstance(error, errors.AgentError) and error.rpc_code == NO_METHOD and client.is_open:
                from skerry.agent.plain import PlainAgentClient

                return await PlainAgentClient.ping_first(client.release(), timeout_s)
            client.close()
            if isinstance(error, errors.CallTimeout):
                why = f"no agent answers, or others use all of its streams: {error}; try again"
                raise errors.AgentUnreachable(why) from error
            if isinstance(error, errors.CallInterrupted):
                raise errors.AgentUnreachable(f"no agent answers: {error}") from error
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
        """Send a request and await its answer, by a deadline."""
        return await self.open(method, params, attachment=attachment).result(type, timeout_s)

    def open(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        attachment: Buffer = b"",
        on_data: OnData | None = None,
        window: int = WINDOW,
        up_window: int = UP_WINDOW,
    ) -> Call:
        """Begin a call that has byte streams. With `on_data` bytes are handed over as they come; without, `chunks`
        gives them. The view that `on_data` gets is only valid during the call. The windows bound what is on its way
        down, and up; PROTOCOL.md says what that one is for the method."""
        if self._error is not None:
            raise self._error
        self._next_id += 1
        call = Call(self, self._next_id, window, on_data, up_window)
        self._calls[call.id] = call
        params = {**(params or {}), **({} if window == WINDOW else {"window": window})}
        self._send({"jsonrpc": "2.0", "id": call.id, "method": method, "params": params}, attachment)
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
            raise errors.InvalidSpec(f"this cannot be sent to the agent: {error}") from None
        if len(line) >= self.max_line or count > MAX_ATTACHMENT:
            self._calls.pop(message.get("id", 0), None)
            raise errors.InvalidSpec(
                f"the request is larger than {self.max_line} bytes; give bulk data as a file or stdin"
            )
        self._stream.write(line + b"\n", *((attachment,) if count else ()))

    async def drained(self) -> None:
        await self._stream.drained()

    def forget(self, call: Call) -> bool:
        """Drop a call whose answer nobody wants; True if it was still open. Nothing more reaches it."""
        if self._target is not None and self._target[0] is call:
            self._target = None
        if self._calls.pop(call.id, None) is None:
            return False
        self._given_up[call.id] = call.unused_credit
        if len(self._given_up) > _MAX_GIVEN_UP:
            del self._given_up[next(iter(self._given_up))]
        return True

    def decode(self, raw: msgspec.Raw, type: type[T]) -> T:
        """Check an answer. Raises AgentProtocolError, and ends the stream, if it has the wrong form."""
        try:
            return msgspec.json.decode(raw, type=type)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise self.violated(f"an answer has the wrong form: {error}") from None

    async def explain(self, error: errors.SkerryError) -> None:
        """Raise a better error for a call, if it ended with the stream and somebody knows why that did."""
        if error is self._error and self.on_broken is not None:
            try:
                await self.on_broken()
            except errors.SkerryError as better:
                raise better from error

    def release(self) -> Stream:
        """Give the stream away, open; this client is at its end. After a moment it has to be greeted again."""
        self._stream.greeted_until = self.loop.time() + _GREETED_S
        self.on_broken = None
        self._fail_all(errors.CallInterrupted("the stream was given away"), close=False)
        return self._stream

    def close(self) -> None:
        self.on_broken = None
        self._fail_all(errors.CallInterrupted("the stream was closed on this side"))

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
        if self._calls:
            _log.debug("%s, with %s calls open", why, len(self._calls))
        self._fail_all(errors.CallInterrupted(why))

    def _read_line(self, data: memoryview, at: int) -> int:
        piece = bytes(data[at : at + 512])
        end = piece.find(b"\n")
        if end < 0:
            piece = bytes(data[at : at + self.max_line])
            end = piece.find(b"\n")
        if end < 0 or self._line:
            self._line += piece if end < 0 else piece[:end]
            if len(self._line) > self.max_line:
                self._break("a line is too long")
            if end < 0:
                return at + len(piece)
            line, self._line = bytes(self._line), bytearray()
        else:
            line = piece[:end]
        try:
            self._on_line(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            self._break(f"a line is not a frame: {error}")
        return at + end + 1

    def _on_line(self, line: bytes) -> None:
        self._on_frame(_decode_frame(line))

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
                if self._given_up.pop(frame.id, None) is None:
                    self._stray()
            elif frame.error is not None:
                call.settle(NOTHING, error_of(frame.error, relayed=self._stream.is_relayed))
            else:
                call.settle(frame.result)

    def _on_notification(self, method: str, params: _Params, count: int) -> None:
        self._missing = count
        call = self._calls.get(params.id)
        self._target = (call, params.fd) if call is not None else None
        if call is None:
            if method != "data" or not self._is_late(params.id, count):
                self._stray()
        elif method == "data":
            if params.fd not in (1, 2) or not call.receivable(count):
                self._break("data without credit, or on no known descriptor")
            elif not count:
                self._stray()
        elif count:
            self._break(f"{method!r} with an attachment")
        elif method == "credit":
            if not call.add_credit(params.bytes):
                self._break("credit for bytes that were never sent")
        elif method != "end" or not call.end_data():
            self._stray()

    def _is_late(self, id: int, count: int) -> bool:
        """Whether bytes are for a call that was given up, and within what it had given credit for."""
        left = self._given_up.get(id, 0)
        if not 0 < count <= left:
            return False
        self._given_up[id] = left - count
        return True

    def violated(self, why: str) -> errors.SkerryError:
        """End the stream for what breaks the protocol in a call's bytes; returns the error to raise."""
        self._break(why)
        assert self._error is not None
        return self._error

    def _stray(self) -> None:
        """Count a frame for no open call, or with no news: harmless, unless there is no end of them."""
        self._strays += 1
        if self._strays > _MAX_STRAYS + _STRAYS_OF_A_CALL * self._next_id:
            self._break("too many frames belong to no call, or say nothing")

    def _break(self, why: str) -> None:
        why = errors.printable(why)
        _log.warning("an agent broke the protocol, so its stream is closed: %s", why)
        self._fail_all(errors.AgentProtocolError(f"the agent broke the protocol: {why}. Destroy this sandbox"))

    def _fail_all(self, error: errors.SkerryError, *, close: bool = True) -> None:
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
        """Ping an agent that is silent, and give it up in the end: a call may take for ever, but pings are answered."""
        self._watchdog = None
        if not self._calls:
            return
        quiet = self.loop.time() - self._last_heard
        if quiet > 2.5 * _QUIET_S:
            _log.warning("an agent has been silent for %.0f s, so its stream is closed", quiet)
            self._fail_all(errors.AgentUnreachable(f"the agent has been silent for {quiet:.0f} s"))
            return
        self._watchdog = self.loop.call_later(_QUIET_S, self._check_alive)
        if quiet > 0.9 * _QUIET_S:
            self._next_id += 1
            self._calls[self._next_id] = Call(self, self._next_id, WINDOW, None)
            self._send({"jsonrpc": "2.0", "id": self._next_id, "method": "ping"}, b"")


def digest_of(token: str) -> str:
    """Digest by which an agent knows its token. It tells nothing of the token, so it may stand where others read it."""
    return hashlib.blake2b(token.encode(), digest_size=32).hexdigest()


_KINDS: dict[str, type[errors.SkerryError]] = {
    "invalid": errors.InvalidSpec,
    "not_found": errors.PathNotFound,
    "exists": errors.PathExists,
    "denied": errors.PathDenied,
    "read_only": errors.PathReadOnly,
    "not_a_directory": errors.PathNotFolder,
    "is_a_directory": errors.PathIsFolder,
    "not_empty": errors.PathNotEmpty,
    "not_regular": errors.PathNotFile,
    "name_too_long": errors.PathTooLong,
    "loop": errors.PathInvalid,
    "io": errors.FileError,
    "no_space": errors.DiskFull,
    "limit": errors.BoxFull,
    "cancelled": errors.CallInterrupted,
    "no_process": errors.NotFound,
    "no_watch": errors.NotFound,
    "no_user": errors.UserNotFound,
    "too_long": errors.ArgumentsTooLong,
    "refused": errors.NotFound,
    "no_interpreter": errors.InterpreterNotFound,
}


def error_of(error: RpcError, *, relayed: bool = False) -> errors.SkerryError:
    """Turn an agent's error into ours, which keeps its code; a server of ours names ours."""
    if not isinstance(error.data, dict):
        error.data = {}
    code, field = error.data.get("code"), error.data.get("field")
    if relayed and isinstance(code, str):
        found = errors.of_code(code, errors.printable(error.message), field=field if isinstance(field, str) else None)
    else:
        found = _error_of(error)
    found.rpc_code = error.code
    return found


def _error_of(error: RpcError) -> errors.SkerryError:
    kind = error.data.get("kind")
    message = errors.printable(error.message[:4096])  # lines of its own would look like more of ours
    cls = _KINDS.get(kind, errors.AgentError) if isinstance(kind, str) else errors.AgentError
    return errors.Unsupported("call", "agent", message) if kind == "unsupported" else cls(message)
