"""WebSocket client: frames as they come, without a copy; a stream of bytes, or messages."""

from __future__ import annotations

import base64
import hashlib
import os
import struct
from collections.abc import Callable, Mapping
from typing import Any

from skerry.net.http import HttpClient, HttpError
from skerry.net.stream import HIGH_WATER, Buffer, Receiver, Stream

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_FINAL, _OPCODE, _MASKED, _LENGTH = 0x80, 0x0F, 0x80, 0x7F
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10
_NO_MASK = bytes(4)
"""With this mask nothing has to be changed: there is no proxy on the way that might mistake frames for requests."""


class BrokenFrames(Exception):
    """Frames that the protocol does not allow."""


async def connect(
    http: HttpClient, path: str, query: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> WebSocket:
    """Open a WebSocket. Raises HttpError."""
    key = base64.b64encode(os.urandom(16))
    ours = {"Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": key.decode()}
    stream, early, answered = await http.switch(path, query=query, headers={**(headers or {}), **ours})
    expected = base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest()).decode()
    if answered.get("sec-websocket-accept") != expected:
        stream.close()
        raise HttpError(f"{http.address} does not answer as a WebSocket does")
    return WebSocket(stream, early)


class WebSocket(Stream):
    """Stream of binary messages: one for each write, and the content of those received, one after the other."""

    def __init__(self, stream: Stream, early: bytes) -> None:
        self._stream = stream
        self._early = early
        self._header = b""
        self._opcode = 0
        self._is_final = True
        self._left = 0
        self._control = b""
        self.on_message_end: Callable[[], None] | None = None
        self.max_message: int | None = None
        """The most bytes of a message that the server takes; a longer write is several."""
        self.ended_by: tuple[int, str] | None = None
        """Code and reason with which the server has closed it."""

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._stream.start(self)
        early, self._early = self._early, b""
        if early:
            self.received(memoryview(early))

    def write(self, *parts: Buffer) -> None:
        if not self.is_open:
            return
        size = sum(memoryview(part).nbytes for part in parts)
        if self.max_message is None or size <= self.max_message:
            self._stream.write(_head(_BINARY, size), *parts)
            return
        for part in parts:
            view = memoryview(part).cast("B")
            for at in range(0, len(view), self.max_message):
                piece = view[at : at + self.max_message]
                self._stream.write(_head(_BINARY, len(piece)), piece)

    @property
    def buffered(self) -> int:  # type: ignore[override]
        return self._stream.buffered

    async def drained(self) -> None:
        await self._stream.drained()

    def close(self) -> None:
        if self.is_open:
            self._stream.write(_head(_CLOSE, 0))
            self._stream.close()

    def received(self, data: memoryview) -> None:
        try:
            while data.nbytes and self.is_open:
                data = self._take(data) if self._left else self._begin(data)
        except BrokenFrames as error:
            self._end(error)

    def closed(self, error: Exception | None) -> None:
        """Hear that the stream below has ended."""
        self._end(error)

    def _begin(self, data: memoryview) -> memoryview:
        """Take the missing part of a frame's header."""
        missing = _header_size(self._header) - len(self._header)
        self._header += bytes(data[:missing])
        if len(self._header) < _header_size(self._header):
            return data[missing:]
        self._opcode, self._is_final = self._header[0] & _OPCODE, bool(self._header[0] & _FINAL)
        self._left = _length(self._header)
        if self._header[1] & _MASKED or (self._opcode >= _CLOSE and (self._left > 125 or not self._is_final)):
            raise BrokenFrames("a frame that no server may send")
        self._header = b""
        if not self._left:
            self._frame_ended()
        return data[missing:]

    def _take(self, data: memoryview) -> memoryview:
        """Hand over the part of a frame's content that is here."""
        piece, rest = data[: self._left], data[self._left :]
        self._left -= piece.nbytes
        if self._opcode >= _CLOSE:
            self._control += bytes(piece)
        elif self._receiver is not None:
            self._receiver.received(piece)
        if not self._left:
            self._frame_ended()
        return rest

    def _frame_ended(self) -> None:
        control, self._control = self._control, b""
        if self._opcode == _CLOSE:
            if len(control) >= 2:
                self.ended_by = int.from_bytes(control[:2], "big"), control[2:].decode(errors="replace")
            self._end(None)
        elif self._opcode == _PING:
            if self._stream.buffered < HIGH_WATER:  # a server that takes nothing gets no more, however often it asks
                self._stream.write(_head(_PONG, len(control)), control)
        elif self._opcode != _PONG and self._is_final and self.on_message_end is not None:
            self.on_message_end()

    def _release(self) -> None:
        self._stream.close()


def _head(opcode: int, length: int) -> bytes:
    if length < 126:
        return struct.pack(">BB", _FINAL | opcode, _MASKED | length) + _NO_MASK
    if length < 1 << 16:
        return struct.pack(">BBH", _FINAL | opcode, _MASKED | 126, length) + _NO_MASK
    return struct.pack(">BBQ", _FINAL | opcode, _MASKED | 127, length) + _NO_MASK


def _header_size(header: bytes) -> int:
    return {126: 4, 127: 10}.get(header[1] & _LENGTH, 2) if len(header) > 1 else 2


def _length(header: bytes) -> int:
    return int.from_bytes(header[2:], "big") if len(header) > 2 else header[1] & _LENGTH
