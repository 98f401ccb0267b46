"""Two connections that are one: what either side says the other hears, to the last byte."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from .loop import READ, WRITE, Loop

_BUFFER = 64 * 1024
_ROUNDS = 16
_HUNG_UP = select.EPOLLHUP | select.EPOLLERR


class Relay:
    """It owns both, and closes them once there is nothing more to pass on."""

    def __init__(self, loop: Loop, one: socket.socket, other: socket.socket, on_end: Callable[[], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._forth, self._back = _Way(one, other), _Way(other, one)
        for way in (self._forth, self._back):
            way.source.setblocking(False)
        loop.watch(one.fileno(), READ, lambda events: self._on_ready(self._forth, events))
        loop.watch(other.fileno(), READ, lambda events: self._on_ready(self._back, events))

    def _on_ready(self, ready: _Way, events: int) -> None:
        if events & _HUNG_UP:
            ready.is_gone = True
            self._loop.forget(ready.source.fileno())  # it would be told again and again
        ways = (self._forth, self._back)
        broken = not (self._forth.move() and self._back.move())
        if broken or all(way.is_over for way in ways) or any(way.is_gone and way.is_over for way in ways):
            for way in ways:
                self._loop.forget(way.source.fileno())
                way.source.close()
            self._on_end()
            return
        for way, other in (ways, ways[::-1]):
            if not way.is_gone:
                wanted = (READ if way.wants_more() else 0) | (WRITE if other.data else 0)
                self._loop.change(way.source.fileno(), wanted)


class _Way:
    """One direction of a relay, with what was read and not yet written."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.data = b""
        self.is_over = False
        """All that the source said has been passed on, and it says no more."""
        self.is_gone = False
        """The source has hung up: it takes nothing any more either."""
        self._target = target
        self._ended = False

    def wants_more(self) -> bool:
        return not self.data and not self._ended

    def move(self) -> bool:
        """Pass on what goes without waiting, and not so much that others wait; False if a side is broken."""
        rounds = 0
        try:
            while not self.is_over and (self.is_gone or rounds < _ROUNDS):
                rounds += 1
                if self.wants_more():
                    self.data = self.source.recv(_BUFFER)
                    self._ended = not self.data
                if self.data:
                    self.data = self.data[self._target.send(self.data) :]
                elif self._ended:
                    self._target.shutdown(socket.SHUT_WR)
                    self.is_over = True
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True
