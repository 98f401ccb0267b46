"""Plain dialect of the protocol, for clients that know no greeting: JSON-RPC lines alone, one call after the other, and
contents and output as text in the lines. Each call is one of the full protocol, whose streams are collected here."""

from __future__ import annotations

import posix
from _collections import deque
from binascii import a2b_base64

from . import wire
from .channel import Call, Failure, FilePart

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .channel import Buffer, Channel

MAX_LINE = 16 << 20
MAX_CONTENT = 10 << 20
MAX_OUTPUT = 1 << 20
_MAX_WAITING = 64
_MAX_ID = 256
_ROOM = 1 << 18
_LONGEST_ESCAPE = 6

_INVALID_REQUEST, _NO_METHOD, _INVALID_PARAMS, _FAILED = -32600, -32601, -32602, -32000

_FIELDS = {
    "ping": (),
    "exec": ("cmd",),
    "exec_code": ("lang", "code"),
    "read_file": ("path",),
    "write_file": ("path", "content"),
    "list_dir": ("path",),
}


class PlainDialect:
    """The requests of one stream, in their order: the next begins once the answer to the one before has gone out."""

    def __init__(self, channel: Channel, parser: wire.Parser, dispatch: Callable[[Call], None]) -> None:
        self.channel = channel
        self._parser = parser
        self._dispatch = dispatch
        self._waiting: deque[tuple[dict[str, Any], int]] = deque()
        self._waiting_bytes = 0
        self._is_busy = False
        self._count = 0

    def on_request(self, message: dict[str, Any]) -> None:
        """Take a line. Raises ProtocolError, which ends the stream."""
        if "bytes" in message:
            raise wire.ProtocolError("a line of the plain dialect has no attachment")
        size = self._parser.line_bytes
        self._waiting.append((message, size))
        self._waiting_bytes += size
        if len(self._waiting) > _MAX_WAITING or self._waiting_bytes > MAX_LINE:
            raise wire.ProtocolError("more requests than may wait")
        self._work()

    def _work(self) -> None:
        while self._waiting and not self._is_busy and self.channel.open:
            message, size = self._waiting.popleft()
            self._waiting_bytes -= size
            self._is_busy = True
            self._begin(message)

    def _begin(self, message: dict[str, Any]) -> None:
        id: Any = message.get("id")
        method: Any = message.get("method")
        params: Any = message.get("params")
        if params is None:
            params = {}
        is_id = type(id) is int or (type(id) is str and len(id) <= _MAX_ID)
        is_whole = is_id and type(method) is str and type(params) is dict
        must_greet = method == "auth" or not self.channel.greeted
        if must_greet and not (is_whole and self._greet(params.get("token") if method == "auth" else None)):
            self.channel.close()
        elif not is_whole:
            reason = "a request has an id, a method and an object of params"
            self.refuse(id if is_id else None, _INVALID_REQUEST, reason)
        elif method == "auth":
            self.reply({"id": id, "result": {}})
        elif method not in _FIELDS:
            self.refuse(id, _NO_METHOD, f"no method is called {method[:_MAX_ID]!r}")
        else:
            self._call(id, method, params)

    def _greet(self, token: object) -> bool:
        """Say what the full protocol's greeting says; False, and the stream is closed, if that takes another token."""
        self._dispatch(_Greeting(self.channel, 0, "hello", {"token": token}, b""))
        self._parser.max_line = MAX_LINE
        return self.channel.open

    def _call(self, id: Any, method: str, params: dict[str, Any]) -> None:
        fields = _FIELDS[method]
        if set(params) != set(fields) or not all(type(value) is str for value in params.values()):
            what = " and ".join(fields) or "nothing"
            self.refuse(id, _INVALID_PARAMS, f"{method} takes {what}, as text; the full protocol takes more")
            return
        try:
            texts = {name: value.encode("utf-8") for name, value in params.items()}
        except UnicodeError:
            self.refuse(id, _INVALID_PARAMS, "a text in the request is not UTF-8")
            return
        self._count += 1
        call = PlainCall(self, self._count, id, method, params, texts.get("code", b""))
        self.channel.calls[call.id] = call
        self._dispatch(call)
        if call.on_data is not None and method == "write_file":
            call.on_data(memoryview(texts["content"]))
            if call.on_end is not None:  # else it has failed
                call.on_end()

    def refuse(self, id: Any, code: int, message: str, kind: str = "invalid") -> None:
        self.reply({"id": id, "error": {"code": code, "message": message, "data": {"kind": kind}}})

    def reply(self, answer: dict[str, Any]) -> None:
        """Answer the request at hand."""
        self.channel.send({"jsonrpc": "2.0", **answer})
        self.channel.when_sent(self._on_sent)

    def _on_sent(self) -> None:
        self._is_busy = False
        self.channel.loop.soon(self._work)


class _Greeting(Call):
    """Greeting that the client did not say: its answer is not for the client."""

    def answer(self, result: dict[str, Any]) -> None:
        self.close()

    def fail(self, failure: Failure) -> None:
        self.channel.close()


class PlainCall(Call):
    """Call whose streams go into its answer."""

    def __init__(
        self, dialect: PlainDialect, number: int, id: Any, method: str, params: dict[str, Any], attachment: bytes
    ) -> None:
        super().__init__(dialect.channel, number, method, _full_params(method, params), attachment)
        self._dialect = dialect
        self._theirs = id
        self._outputs = {1: bytearray(), 2: bytearray()}

    def room(self) -> int:
        return _ROOM if self.open else 0

    def send(self, data: Buffer | FilePart, fd: int = 1) -> None:
        if isinstance(data, FilePart):
            content = posix.pread(data.file.fd, data.count, data.offset)
            data.file.shrank |= len(content) < data.count
            data = content
        self._outputs[fd] += data
        if len(self._outputs[fd]) > MAX_CONTENT and self.open:
            if self.on_close is not None:
                self.channel.loop.soon(self.on_close)
            self.fail(Failure("limit", f"more than {MAX_CONTENT} bytes; the full protocol has no such limit"))

    def send_end(self) -> None:
        """The answer says it."""

    def acknowledge(self, count: int) -> None:
        """All of it came with the request."""

    def answer(self, result: dict[str, Any]) -> None:
        if not self.open:
            return
        try:
            answer = {"id": self._theirs, "result": self._result(result)}
            large = sum(map(len, self._outputs.values())) > MAX_LINE // _LONGEST_ESCAPE
            if large and len(wire.encode(answer)) > MAX_LINE:
                raise Failure("limit", f"the answer is longer than {MAX_LINE} bytes")
        except Failure as failure:
            self.fail(failure)
            return
        self.close()
        self._dialect.reply(answer)

    def fail(self, failure: Failure) -> None:
        if self.open:
            self.close()
            code = _INVALID_PARAMS if failure.kind == "invalid" else _FAILED
            self._dialect.refuse(self._theirs, code, str(failure), failure.kind)

    def _result(self, full: dict[str, Any]) -> dict[str, Any]:
        """Turn the answer of the full protocol, with what was collected, into the plain one. Raises Failure."""
        out, err = (bytes(self._outputs[fd]) for fd in (1, 2))
        if self.method == "ping":
            return {"pong": True}
        if self.method == "write_file":
            return {"success": True}
        if self.method == "list_dir":
            return {"entries": [_entry(wire.loads(line.decode())) for line in out.split(b"\n") if line]}
        if self.method == "read_file":
            try:
                return {"content": out.decode("utf-8")}
            except UnicodeDecodeError:
                raise Failure("invalid", "the file is not UTF-8 text: only the full protocol can read it") from None
        code = full["exit_code"] if full["signal"] is None else 128 + full["signal"]
        texts = {"stdout": out.decode("utf-8", "replace"), "stderr": err.decode("utf-8", "replace")}
        return {"exit_code": code, **texts, **({"truncated": True} if full["truncated"] else {})}


def _full_params(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """Name the parameters as the full protocol does."""
    if method == "exec":
        return {"shell": params["cmd"], "limit": MAX_OUTPUT}
    if method == "exec_code":
        return {"language": params["lang"], "limit": MAX_OUTPUT}
    if method == "write_file":
        return {"path": params["path"], "parents": True}
    return params


def _entry(record: dict[str, Any]) -> dict[str, Any]:
    name = record["name"] if "name" in record else a2b_base64(record["name64"]).decode("utf-8", "replace")
    return {"name": name, "is_dir": record["type"] == "dir", "size": record["size"]}
