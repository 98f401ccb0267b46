"""A stream of the multiplexer, at either end: a socket of that side, and what it may send and must keep."""

from __future__ import annotations

import _socket
import select

from .frames import CREDIT, DATA, END, MAX_PAYLOAD, NUMBER, WINDOW, Broken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .multiplexer import Mux

READ, WRITE, HUNG_UP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP | select.EPOLLERR
_LINGER_S = 30


class Stream:
    """A socket of this side, joined to a stream of the channel."""

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
        self._linger: Any = None
        self.watch()

    def greet(self, text: bytes) -> None:
        """The stream is open: begin with some words of this side's own, which are no part of it."""
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
        """Whoever was there has gone: what it left is sent, but not waited for if the other side takes nothing."""
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
        if self._pending:
            self._pending += data
            return
        self._pending += data
        if self._flush():
            self.watch()

    def _flush(self) -> bool:
        """False if the stream is gone."""
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
        try:
            self._socket.shutdown(_socket.SHUT_WR)
        except OSError:
            pass
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
