"""Client of an agent that speaks the plain dialect alone: no greeting, no streams, texts in the lines. What it cannot
say is refused, and the first violation ends the stream, as with every agent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Self

import msgspec

from skerry import errors
from skerry.agent.call import NOTHING, UP_WINDOW, WINDOW, Call, OnData
from skerry.agent.client import AgentClient, RpcError, error_of
from skerry.model.results import Count
from skerry.net.stream import Buffer, Stream

MAX_LINE = 16 << 20
_LONGEST_S = 3600.0
"""How long a call may take: an agent that serves one after the other cannot be asked whether it is still there."""
_NAMES = {
    "ping": {},
    "exec": {"shell": "cmd"},
    "exec_code": {"language": "lang"},
    "read_file": {"path": "path"},
    "write_file": {"path": "path"},
    "list_dir": {"path": "path"},
}
"""Parameters of the full protocol, and their names in the plain dialect."""
_PASSED_OVER = frozenset({"limit", "tail", "timeout_s", "atomic", "parents"})
"""Parameters that are this side's to hold, or that each such agent answers in its own way."""


class _Answer(msgspec.Struct):
    id: int | None = None
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: RpcError | None = None


class _Ran(msgspec.Struct):
    exit_code: int
    stdout: str
    stderr: str
    truncated: bool = False


class _Read(msgspec.Struct):
    content: str


class _Written(msgspec.Struct):
    success: bool = True


class _Entry(msgspec.Struct):
    name: str
    is_dir: bool
    size: Count = 0


class _Listed(msgspec.Struct):
    entries: list[_Entry]


class _Request:
    """Call in the words of the plain dialect."""

    def __init__(self, method: str, params: dict[str, Any]) -> None:
        self.method = method
        self.params = params
        self.content: bytearray | None = bytearray() if method == "write_file" else None
        """Bytes that wait for their end; none once it was sent."""
        self.size = 0
        self.timer: asyncio.TimerHandle | None = None


class PlainAgentClient(AgentClient):
    """Calls in the plain dialect behind the interface of the full one, where it has them; others are Unsupported."""

    max_line = max_attachment = MAX_LINE

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._requests: dict[int, _Request] = {}

    @classmethod
    async def ping_first(cls, stream: Stream, timeout_s: float) -> Self:
        """Ask whether the agent is there. Raises AgentUnreachable, AgentProtocolError."""
        client = cls(stream)
        try:
            await client.call("ping", type=dict[str, Any], timeout_s=timeout_s)
        except BaseException as error:
            client.close()
            if isinstance(error, errors.CallTimeout | errors.CallInterrupted):
                raise errors.AgentUnreachable(f"no agent answers: {error}") from error
            raise
        return client

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
        """Begin a call. Raises Unsupported for what the plain dialect has no words for."""
        if self._error is not None:
            raise self._error
        asked = dict(params or {})
        request = _Request(method, _translate(method, asked, bytes(attachment)))
        self._next_id += 1
        call = Call(self, self._next_id, window, on_data).within(_LONGEST_S)
        self._calls[call.id] = call
        self._requests[call.id] = request
        if asked.get("timeout_s"):
            request.timer = self.loop.call_later(asked["timeout_s"], self._time_out, call)
        try:
            if request.content is None:
                self._ask(call.id, request)
        except errors.InvalidSpec:
            request.content = bytearray()  # nothing of it was sent
            call.abandon()
            raise
        return call

    def _ask(self, id: int, request: _Request) -> None:
        self._send({"jsonrpc": "2.0", "id": id, "method": request.method, "params": request.params}, b"")

    def notify(self, method: str, params: Mapping[str, Any], attachment: Buffer = b"") -> None:
        """Do what an agent of the full protocol is told: collect bytes, send them at their end, give a call up."""
        if method == "cancel":
            self._fail_all(errors.CallInterrupted("a call was given up, and this agent is told by hanging up alone"))
        call, request = self._calls.get(params["id"]), self._requests.get(params["id"])
        if call is None or request is None or request.content is None:
            return
        if method == "data":
            request.content += attachment
            call.add_credit(memoryview(attachment).nbytes)
            if len(request.content) > MAX_LINE:
                call.stop(_refused("write_file", f"it takes less than {MAX_LINE} bytes"))
        elif method == "end":
            content, request.content = request.content, None
            request.size = len(content)
            try:
                request.params["content"] = content.decode()
                self._ask(call.id, request)
            except (UnicodeDecodeError, errors.InvalidSpec):
                request.content = bytearray()  # nothing of it was sent
                call.stop(_refused("write_file", f"it takes text in UTF-8 of less than {MAX_LINE} bytes"))

    def forget(self, call: Call) -> bool:
        request = self._drop(call.id)
        return super().forget(call) and request is not None and request.content is None

    def _drop(self, id: int) -> _Request | None:
        request = self._requests.pop(id, None)
        if request is not None and request.timer is not None:
            request.timer.cancel()
        return request

    def release(self) -> Stream:
        """Give the stream away, open. The next to have it finds out anew how its agent speaks."""
        stream = super().release()
        stream.greeted_until = 0.0
        return stream

    def _on_line(self, line: bytes) -> None:
        answer = msgspec.json.decode(line, type=_Answer)
        request = None if answer.id is None else self._requests.get(answer.id)
        call = None if answer.id is None else self._calls.get(answer.id)
        if request is None or call is None or request.content is not None:
            self._break("an answer that nobody asked for")
            return
        try:
            error, result = answer.error, NOTHING
            if error is None:
                result = msgspec.Raw(msgspec.json.encode(_deliver(call, request, answer.result)))
        except (msgspec.DecodeError, RecursionError) as wrong:
            self._break(f"an answer has the wrong form: {wrong}")
            return
        self._drop(call.id)
        self._calls.pop(call.id, None)
        if error is None:
            call.settle(result)
        else:
            call.settle(NOTHING, error_of(error))

    def _time_out(self, call: Call) -> None:
        """End a command whose time is over: to hang up is the only way to tell the agent."""
        call.settle(msgspec.Raw(msgspec.json.encode(_exit(None, timed_out=True))))
        self._fail_all(errors.CallInterrupted("the stream was closed to end a command whose time was over"))

    def _fail_all(self, error: errors.SkerryError, *, close: bool = True) -> None:
        for id in [*self._requests]:
            self._drop(id)
        super()._fail_all(error, close=close)


def _translate(method: str, params: dict[str, Any], attachment: bytes) -> dict[str, Any]:
    """Parameters in the plain dialect. Raises Unsupported."""
    if method not in _NAMES:
        raise _refused(method, f"it knows {', '.join(_NAMES)} alone")
    if "argv" in params:
        raise _refused("argv", "it gives each command to a shell: give a string in the place of a list")
    names = _NAMES[method]
    for name, value in params.items():
        says_nothing = value is None or value is False or (name, value) in (("offset", 0), ("depth", 1))
        if name not in names and name not in _PASSED_OVER and not says_nothing:
            raise _refused(f"{method}: {name}", "it has no word for that")
    wanted = {names[name]: value for name, value in params.items() if name in names}
    if method == "exec_code":
        try:
            wanted["code"] = attachment.decode()
        except UnicodeDecodeError:
            raise _refused(method, "it takes code in UTF-8 alone") from None
    return wanted


def _refused(what: str, reason: str) -> errors.Unsupported:
    return errors.Unsupported(what, "agent", f"this one speaks the plain dialect, and {reason}")


def _deliver(call: Call, request: _Request, raw: msgspec.Raw) -> dict[str, Any]:
    """Hand the contents of an answer to its call; returns the answer of the full protocol. Raises DecodeError."""
    match request.method:
        case "exec" | "exec_code":
            ran = msgspec.json.decode(raw, type=_Ran)
            _say(call, 1, ran.stdout.encode())
            _say(call, 2, ran.stderr.encode())
            return _exit(ran.exit_code & 0xFF, truncated=ran.truncated)
        case "read_file":
            content = msgspec.json.decode(raw, type=_Read).content.encode()
            _say(call, 1, content)
            return {"size": len(content), "bytes_sent": len(content)}
        case "write_file":
            if not msgspec.json.decode(raw, type=_Written).success:
                raise msgspec.DecodeError("neither a success nor an error")
            return {"size": request.size}
        case "list_dir":
            entries = msgspec.json.decode(raw, type=_Listed).entries
            folder = request.params["path"].rstrip("/")
            lines = [msgspec.json.encode(_record(folder, entry)) + b"\n" for entry in entries]
            _say(call, 1, b"".join(lines))
            return {"count": len(entries)}
    return {}


def _say(call: Call, fd: int, data: bytes) -> None:
    if data:
        call.deliver(fd, memoryview(data))


def _exit(code: int | None, *, timed_out: bool = False, truncated: bool = False) -> dict[str, Any]:
    return {"exit_code": code, "signal": None, "timed_out": timed_out, "truncated": truncated, "duration_s": 0.0}


def _record(folder: str, entry: _Entry) -> dict[str, Any]:
    """Entry of a folder; the plain dialect tells neither mode nor owner nor time, so they are 0."""
    unknown = {"mode": 0, "uid": 0, "gid": 0, "mtime": 0.0}
    kind = "dir" if entry.is_dir else "file"
    return {"name": entry.name, "path": f"{folder}/{entry.name}", "type": kind, "size": entry.size, **unknown}
