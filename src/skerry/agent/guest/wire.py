"""Frames of the agent's protocol, without I/O: bytes in, messages out, and back. `json` costs 7 ms to import, as long
as the rest of the agent's start; its C parts alone cost nothing."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

MAX_LINE = 1 << 20
MAX_ATTACHMENT = 1 << 20


class ProtocolError(Exception):
    """Broken framing, after which the stream is of no more use."""


class _ScannerOptions:
    strict = True
    object_hook = None
    object_pairs_hook = None
    parse_float = float
    parse_int = int

    @staticmethod
    def parse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    memo: dict[str, str] = {}  # noqa: RUF012 (the C scanner looks for it)


def _json_functions() -> tuple[Callable[[str], Any], Callable[[Any], str]]:
    try:
        import _json

        scan = _json.make_scanner(_ScannerOptions())  # type: ignore[arg-type]
        write = _json.make_encoder(None, _refuse, _json.encode_basestring_ascii, None, ":", ",", False, False, True)

        def loads(text: str) -> Any:
            text = text.strip()
            try:
                value, end = scan(text, 0)
            except StopIteration:
                raise ValueError("no JSON value") from None
            if end != len(text):
                raise ValueError("extra data after the JSON value")
            return value

        def dumps(value: Any) -> str:
            return "".join(write(value, 0))

        sample = {"a": [1, 2.5, None, "\u00e9"]}
        if loads(dumps(sample)) == sample:
            return loads, dumps
    except (ImportError, TypeError, AttributeError, ValueError):
        pass  # a private module may change: the public one is slower to start, and right
    import json

    decoder = json.JSONDecoder(parse_constant=_ScannerOptions.parse_constant)
    return decoder.decode, json.JSONEncoder(separators=(",", ":")).encode


def _refuse(value: object) -> None:
    raise TypeError(f"not a JSON value: {value!r}")


loads, dumps = _json_functions()


def encode(message: dict[str, Any]) -> bytes:
    """Encode the line of a frame; an attachment of `message["bytes"]` bytes is for the caller to send after it."""
    return dumps(message).encode("ascii") + b"\n"


class Parser:
    """Parser that cuts a byte stream into frames (message, attachment). A request's attachment comes whole. A
    notification's comes in pieces, as they arrive, with the message each time."""

    def __init__(self) -> None:
        self.max_line = MAX_LINE
        self.line_bytes = 0
        """Length of the line that began the last frame."""
        self._line = bytearray()
        self._message: dict[str, Any] | None = None
        self._whole = bytearray()
        self._missing = 0

    def feed(self, data: bytes | memoryview) -> Iterator[tuple[dict[str, Any], bytes | bytearray | memoryview]]:
        """Yield (message, attachment or piece of it) for all that `data` completes. A piece is a view of `data`."""
        view = memoryview(data)
        while len(view):
            message = self._message
            if message is None:
                view = self._feed_line(view)
                if self._message is not None and not self._missing:
                    yield self._take(), b""
                continue
            piece = view[: self._missing]
            view = view[len(piece) :]
            self._missing -= len(piece)
            if "id" not in message:
                yield message if self._missing else self._take(), piece
            else:
                self._whole += piece
                if not self._missing:
                    whole, self._whole = self._whole, bytearray()
                    yield self._take(), whole

    def _take(self) -> dict[str, Any]:
        message, self._message = self._message, None
        assert message is not None
        return message

    def _feed_line(self, view: memoryview) -> memoryview:
        chunk = bytes(view[:512])
        end = chunk.find(b"\n")
        if end < 0:
            chunk = bytes(view[: self.max_line + 1])
            end = chunk.find(b"\n")
        self._line += chunk if end < 0 else chunk[:end]
        if len(self._line) > self.max_line:
            raise ProtocolError(f"a line is longer than {self.max_line} bytes")
        if end < 0:
            return view[len(chunk) :]
        self._start_frame()
        return view[end + 1 :]

    def _start_frame(self) -> None:
        line, self._line = self._line, bytearray()
        self.line_bytes = len(line)
        try:
            message = loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not a JSON line: {error}") from None
        if not isinstance(message, dict):
            raise ProtocolError("a frame is a JSON object")
        count = message.get("bytes", 0)
        if type(count) is not int or not 0 <= count <= MAX_ATTACHMENT:
            raise ProtocolError(f"a frame's attachment is 0 to {MAX_ATTACHMENT} bytes")
        self._message = message
        self._missing = count
