"""Many streams over one channel: what both ends of `vm/MUX.md` have in common. The host imports it too."""

from __future__ import annotations

import posix

from .frames import (
    ACCEPT,
    CLOSE,
    CREDIT,
    DATA,
    END,
    HEADER,
    HELLO,
    LENGTHS,
    MAGIC,
    MAX_FRAME,
    NUMBER,
    OPEN,
    REFUSE,
    Broken,
    frame,
)
from .streams import HUNG_UP, READ, WRITE, Stream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket
    from collections.abc import Callable
    from typing import Any, Protocol

    class Events(Protocol):
        def watch(self, fd: int, events: int, handler: Callable[[int], None], /) -> None: ...
        def forget(self, fd: int) -> None: ...
        def later(self, seconds: float, action: Callable[[], None], /) -> Any: ...


_READ_BYTES = 1 << 16
_HIGH = 1 << 16
_MAX_QUEUED = 1 << 20


class Mux:
    """One end of a channel. What differs between the ends is in the methods that a subclass gives."""

    def __init__(self, loop: Events, fd: int, first_id: int) -> None:
        self.loop = loop
        self.streams: dict[int, Stream] = {}
        self.held: set[Stream] = set()
        """Streams that would send if the channel took more."""
        self._fd = fd
        self._in = bytearray()
        self._out = bytearray()
        self._blocked = False
        self.begin(first_id)
        posix.set_blocking(fd, False)
        self.look()

    def begin(self, first_id: int) -> None:
        """Count streams from here on; the other side has none yet."""
        self._next_id = first_id
        self._their_last = -1

    def look(self) -> None:
        self.loop.watch(self._fd, READ | WRITE if self._blocked else READ, self._on_ready)

    @property
    def is_congested(self) -> bool:
        return len(self._out) >= _HIGH

    # what a subclass does

    def on_hello(self, nonce: bytes) -> None:
        raise Broken("a greeting in the middle")

    def on_padding(self) -> None:
        raise Broken("padding")

    def on_open(self, port: int) -> socket | None:
        """A socket to join to a new stream of the other side; None refuses it."""
        raise NotImplementedError

    def on_accept(self, stream: Stream) -> None:
        raise Broken("an answer that nobody waits for")

    def on_room(self) -> None:
        """The channel takes more."""

    def on_gone(self, stream: Stream) -> None:
        """One stream less."""

    def on_broken(self, reason: str) -> None:
        raise NotImplementedError

    def on_hang_up(self) -> None:
        raise NotImplementedError

    # streams

    def open(self, port: int, socket: socket) -> None:
        id = self._next_id
        self._next_id += 2
        self.streams[id] = Stream(self, id, port, socket, accepted=False)
        self.send(OPEN, id, NUMBER.pack(port))

    def drop(self, stream: Stream, tell: bool) -> None:
        """A stream is gone; the other side is told unless it knows."""
        if self.streams.get(stream.id) is not stream:
            return
        del self.streams[stream.id]
        self.held.discard(stream)
        stream.close()
        if tell:
            self.send(CLOSE, stream.id)
        self.on_gone(stream)

    def drop_all(self) -> None:
        for stream in list(self.streams.values()):
            self.drop(stream, tell=False)
        self._out.clear()

    # the channel

    def send(self, kind: int, stream: int = 0, payload: bytes = b"") -> None:
        self._out += frame(kind, stream, payload)
        if len(self._out) > _MAX_QUEUED:
            raise Broken("it asks for answers and takes none")
        if not self._blocked:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                with memoryview(self._out) as view, view[:MAX_FRAME] as part:
                    sent = posix.write(self._fd, part)
                del self._out[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._blocked = True
            self.loop.later(0, self.on_hang_up)
            return
        if self._blocked != bool(self._out):
            self._blocked = not self._blocked
            self.look()
        if not self.is_congested:
            held, self.held = self.held, set()
            for stream in held:
                stream.watch()
            self.on_room()

    def _on_ready(self, events: int) -> None:
        try:
            if events & WRITE:
                self._flush()
            if events & READ:
                self._receive()
            elif events & HUNG_UP:
                self.on_hang_up()
        except Broken as broken:
            self.on_broken(str(broken))

    def _receive(self) -> None:
        try:
            data = posix.read(self._fd, _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.on_hang_up()
            return
        self._in += data
        self.parse()

    def parse(self) -> None:
        """Take every whole frame out of what has come."""
        while len(self._in) >= HEADER.size:
            if not self._in[0]:
                self.on_padding()
                continue
            kind, zero, length, id = HEADER.unpack_from(self._in)
            if zero or length != LENGTHS.get(kind, length) or not (kind in LENGTHS or (kind == DATA and length)):
                raise Broken("a frame of no known kind")
            end = HEADER.size + length
            if end > MAX_FRAME:
                raise Broken("a frame that is too long")
            if len(self._in) < end:
                return
            payload = bytes(self._in[HEADER.size : end])
            del self._in[:end]
            self._on_frame(kind, id, payload)

    def _on_frame(self, kind: int, id: int, payload: bytes) -> None:
        if kind == HELLO:
            if id or not payload.startswith(MAGIC):
                raise Broken("a greeting in another language")
            self.on_hello(payload[len(MAGIC) :])
            return
        if kind == OPEN:
            self._on_open(id, *NUMBER.unpack(payload))
            return
        stream = self.streams.get(id)
        if stream is None:
            if id > self._their_last if id % 2 != self._next_id % 2 else id >= self._next_id:
                raise Broken("a stream that never was")
        elif kind == DATA:
            stream.on_data(memoryview(payload))
        elif kind == CREDIT:
            stream.on_credit(*NUMBER.unpack(payload))
        elif kind == END:
            stream.on_end()
        elif kind == CLOSE:
            self.drop(stream, tell=False)
        elif stream.accepted:
            raise Broken("an answer that nobody waits for")
        elif kind == ACCEPT:
            self.on_accept(stream)
        else:
            self.drop(stream, tell=False)

    def _on_open(self, id: int, port: int) -> None:
        if not id or id % 2 == self._next_id % 2 or id <= self._their_last:
            raise Broken("a number for a stream that is not its own to give")
        self._their_last = id
        socket = self.on_open(port)
        if socket is None:
            self.send(REFUSE, id)
            return
        self.send(ACCEPT, id)
        socket.setblocking(False)
        self.streams[id] = Stream(self, id, port, socket, accepted=True)
