"""Two sockets, each of which gets what the other says."""

from __future__ import annotations

import _socket

from .loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop

_CHUNK = 1 << 14
"""No more per call: some devices of machines lose what is longer."""


class _Way:
    """One direction."""

    def __init__(self, source: _socket.socket, target: _socket.socket) -> None:
        self.source = source
        self.target = target
        self.pending = b""
        self.is_over = False

    def move(self) -> None:
        """Pass on what there is. Raises OSError when an end is gone."""
        try:
            if not self.pending and not self.is_over:
                self.pending = self.source.recv(_CHUNK)
                if not self.pending:
                    self.is_over = True
                    self.target.shutdown(_socket.SHUT_WR)
            while self.pending:
                self.pending = self.pending[self.target.send(self.pending) :]
        except (BlockingIOError, InterruptedError):
            pass


class Joined:
    def __init__(
        self, loop: Loop, one: _socket.socket, other: _socket.socket, on_end: Callable[[Joined], None]
    ) -> None:
        self._loop = loop
        self._sockets = (one, other)
        self._ways = (_Way(one, other), _Way(other, one))
        self._on_end = on_end
        for socket in self._sockets:
            socket.setblocking(False)
        self._watch()

    def _watch(self) -> None:
        for socket in self._sockets:
            events = 0
            for way in self._ways:
                if way.source is socket and not way.pending and not way.is_over:
                    events |= READ
                if way.target is socket and way.pending:
                    events |= WRITE
            if events:
                self._loop.watch(socket.fileno(), events, self._on_ready)
            else:
                self._loop.forget(socket.fileno())

    def _on_ready(self, _events: int) -> None:
        try:
            for way in self._ways:
                way.move()
        except OSError:
            self.close()
            return
        if all(way.is_over and not way.pending for way in self._ways):
            self.close()
        else:
            self._watch()

    def close(self) -> None:
        for socket in self._sockets:
            self._loop.forget(socket.fileno())
            socket.close()
        self._on_end(self)
