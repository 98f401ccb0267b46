"""Multiplexer of `vm/MUX.md`, many streams over one channel: what both ends have in common, the host's warden too."""

from __future__ import annotations

import _socket
import posix
import select
from _struct import Struct

from ..loop import READ, WRITE, Loop, Timer, ignore_errors

HUNG_UP = select.EPOLLHUP | select.EPOLLERR
READY_PORT = 1024  # port of the host that the guest opens once it is up
MAGIC = b"skerry mux 1".ljust(16, b"\0")
NONCE_BYTES = 16
WINDOW = 1 << 16
MAX_FRAME = 1 << 14
MAX_STREAMS = 256
HELLO, OPEN, ACCEPT, REFUSE, DATA, END, CLOSE, CREDIT = range(1, 9)
HEADER = Struct("<BBHI")
NUMBER = Struct("<I")
MAX_PAYLOAD = MAX_FRAME - HEADER.size
LENGTHS = {HELLO: len(MAGIC) + NONCE_BYTES, OPEN: 4, ACCEPT: 0, REFUSE: 0, END: 0, CLOSE: 0, CREDIT: 4}
_LINGER_S = 30
_READ_BYTES = 1 << 16
_HIGH = 1 << 16
_MAX_QUEUED = 1 << 20


class Broken(Exception):
    """Violation of the protocol by the other side."""


def frame(kind: int, stream: int = 0, payload: bytes = b"") -> bytes:
    return HEADER.pack(kind, 0, len(payload), stream) + payload


class MuxStream:
    """Stream of a channel, with the socket of this side that it is joined to."""

    def __init__(self, mux: Mux, id: int, port: int, socket: _socket.socket, accepted: bool) -> None:
        self.id = id
        self.port = port
        self.accepted = accepted
        self._mux = mux
        self._socket = socket
        self._fd = socket.fileno()
        self._may_send = WINDOW
        self._may_receive = WINDOW
        self._passed_on = 0
        self._pending = bytearray()
        self._sent_end = False
        self._got_end = False
        self._sent = 0
        self._linger: Timer | None = None
        self.watch()

    def greet(self, text: bytes) -> None:
        """Open the stream, with some words of this side's own first, which are no part of it."""
        self.accepted = True
        self._passed_on -= len(text)
        self._pass_on(text)

    def watch(self) -> None:
        events = 0
        if self.accepted and not self._sent_end and self._may_send:
            if self._mux.is_congested:
                self._mux.held.add(self)
            else:
                events |= READ
        if self._pending:
            events |= WRITE
        if events or self._linger is None:
            self._mux.loop.watch(self._fd, events, self._on_ready)
        else:  # one that hung up is always ready, whatever was asked for
            self._mux.loop.forget(self._fd)

    def _on_ready(self, events: int) -> None:
        if not self.accepted:
            self._mux.drop(self, tell=True)
            return
        if self._pending and events & (WRITE | HUNG_UP) and not self._flush():
            return
        if events & ~WRITE and not self._sent_end:
            self._read()
        if self._mux.streams.get(self.id) is self:
            if events & HUNG_UP and self._linger is None:
                self._wait_for_progress()
            self.watch()

    def _wait_for_progress(self) -> None:
        """Send the rest of a socket that hung up, as long as the other side takes any of it; else drop the stream."""
        seen = self._sent

        def look() -> None:
            if self._sent == seen:
                self._mux.drop(self, tell=True)
            else:
                self._wait_for_progress()

        self._linger = self._mux.loop.later(_LINGER_S, look)

    def _read(self) -> None:
        if not self._may_send or self._mux.is_congested:
            return
        try:
            data = self._socket.recv(min(self._may_send, MAX_PAYLOAD))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self._mux.drop(self, tell=True)
            return
        if data:
            self._may_send -= len(data)
            self._sent += len(data)
            self._mux.send(DATA, self.id, data)
        else:
            self._sent_end = True
            self._mux.send(END, self.id)
            self._finish_if_done()

    def on_data(self, data: memoryview) -> None:
        if not self.accepted or self._got_end or len(data) > self._may_receive:
            raise Broken("data that no credit was given for")
        self._may_receive -= len(data)
        self._pass_on(data)

    def _pass_on(self, data: bytes | memoryview) -> None:
        was_waiting = bool(self._pending)
        self._pending += data
        if not was_waiting and self._flush():
            self.watch()

    def _flush(self) -> bool:
        """Write pending bytes to the socket; False if the stream is gone."""
        try:
            while self._pending:
                sent = self._socket.send(self._pending)
                del self._pending[:sent]
                self._passed_on += sent
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._mux.drop(self, tell=True)
            return False
        if self._passed_on >= WINDOW // 4 and not self._got_end:
            self._may_receive += self._passed_on
            self._mux.send(CREDIT, self.id, NUMBER.pack(self._passed_on))
            self._passed_on = 0
        return not self._got_end or self._pending != b"" or self._end_output()

    def on_end(self) -> None:
        if not self.accepted or self._got_end:
            raise Broken("an end that was told before")
        self._got_end = True
        if not self._pending:
            self._end_output()

    def _end_output(self) -> bool:
        ignore_errors(self._socket.shutdown, _socket.SHUT_WR)
        return self._finish_if_done()

    def _finish_if_done(self) -> bool:
        if self._sent_end and self._got_end and not self._pending:
            self._mux.drop(self, tell=False)
            return False
        return True

    def on_credit(self, count: int) -> None:
        if not 0 < count <= WINDOW - self._may_send:
            raise Broken("credit for what was not sent")
        self._may_send += count
        self.watch()

    def close(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
        self._mux.loop.forget(self._fd)
        self._socket.close()


class Mux:
    """One end of a channel; a subclass answers to what the other end asks for."""

    def __init__(self, loop: Loop, fd: int, first_id: int) -> None:
        self.loop = loop
        self.streams: dict[int, MuxStream] = {}
        self.held: set[MuxStream] = set()  # streams that would send if the channel took more
        self._fd = fd
        self._in = bytearray()
        self._out = bytearray()
        self._blocked = False
        self.begin(first_id)
        posix.set_blocking(fd, False)
        self.look()

    def begin(self, first_id: int) -> None:
        """Number streams from here on; the other side has none yet."""
        self._next_id = first_id
        self._their_last = -1

    def look(self) -> None:
        self.loop.watch(self._fd, READ | WRITE if self._blocked else READ, self._on_ready)

    @property
    def is_congested(self) -> bool:
        return len(self._out) >= _HIGH

    def on_hello(self, nonce: bytes) -> None:
        raise Broken("a greeting in the middle")

    def on_padding(self) -> None:
        raise Broken("padding")

    def on_open(self, port: int) -> _socket.socket | None:
        """Give a socket for a new stream of the other side; None refuses it."""
        raise NotImplementedError

    def on_accept(self, stream: MuxStream) -> None:
        raise Broken("an answer that nobody waits for")

    def on_room(self) -> None:
        """Hear that the channel takes more."""

    def on_gone(self, stream: MuxStream) -> None:
        """Hear that a stream has ended."""

    def on_broken(self, reason: str) -> None:
        raise NotImplementedError

    def on_hang_up(self) -> None:
        raise NotImplementedError

    def open(self, port: int, socket: _socket.socket) -> None:
        id = self._next_id
        self._next_id += 2
        self.streams[id] = MuxStream(self, id, port, socket, accepted=False)
        self.send(OPEN, id, NUMBER.pack(port))

    def drop(self, stream: MuxStream, tell: bool) -> None:
        """End a stream, and tell the other side unless it knows."""
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

    def skip_to(self, greeting: bytes) -> bool:
        """Drop all that came before a greeting; False if it has not come yet."""
        at = self._in.find(greeting)
        del self._in[: at if at >= 0 else 1 - len(greeting)]
        return at >= 0

    def parse(self) -> None:
        """Handle every whole frame that has come."""
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
        stream = self.streams.get(id)
        if kind == HELLO:
            if id or not payload.startswith(MAGIC):
                raise Broken("a greeting in another language")
            self.on_hello(payload[len(MAGIC) :])
        elif kind == OPEN:
            self._on_open(id, *NUMBER.unpack(payload))
        elif stream is None:
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
        self.streams[id] = MuxStream(self, id, port, socket, accepted=True)
