"""Two connections that are joined, to the last byte of each. The warden on the host imports it too."""

from __future__ import annotations

import _socket
import posix
import select

from ..loop import READ, WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = 1 << 14  # bytes of one send: some devices of machines lose what is longer
_ROUNDS = 64
_HUNG_UP = select.EPOLLHUP | select.EPOLLERR


def connect(path: str, follow: bool = True) -> _socket.socket | None:
    """Connect to a unix socket, without waiting; None if nobody listens there. Without `follow` a link is not one."""
    socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
    fd = -1
    try:
        if not follow:
            fd = posix.open(path, posix.O_PATH | posix.O_NOFOLLOW | posix.O_CLOEXEC)
            path = f"/proc/self/fd/{fd}"
        socket.connect(path)
    except OSError:
        socket.close()
        return None
    finally:
        if fd >= 0:
            posix.close(fd)
    return socket


class SocketPair:
    """Owner of both sockets, which closes them once there is nothing more to pass on."""

    def __init__(
        self, loop: Loop, one: _socket.socket, other: _socket.socket, on_end: Callable[[SocketPair], None]
    ) -> None:
        self._loop = loop
        self._on_end = on_end
        self._directions = (_Direction(one, other), _Direction(other, one))
        for each in self._directions:
            each.source.setblocking(False)
            self._watch(each, READ)

    def _watch(self, side: _Direction, events: int) -> None:
        self._loop.watch(side.source.fileno(), events, lambda events: self._on_ready(side, events))

    def _on_ready(self, ready: _Direction, events: int) -> None:
        if events & _HUNG_UP:
            ready.is_gone = True
            self._loop.forget(ready.source.fileno())  # it would be told again and again
        forth, back = self._directions
        try:
            forth.move()
            back.move()
        except OSError:
            self._close()
            return
        if (forth.is_over and back.is_over) or any(each.is_gone and each.is_over for each in self._directions):
            self._close()
            return
        for side, other in ((forth, back), (back, forth)):
            if not side.is_gone:
                self._watch(side, (READ if side.wants_more() else 0) | (WRITE if other.pending else 0))

    def _close(self) -> None:
        for each in self._directions:
            self._loop.forget(each.source.fileno())
            each.source.close()
        self._on_end(self)


class _Direction:
    """One of the two directions, with what was read and not yet written."""

    def __init__(self, source: _socket.socket, target: _socket.socket) -> None:
        self.source = source
        self.pending = b""
        self.is_over = False  # all that the source said has been passed on, and it says no more
        self.is_gone = False  # the source has hung up: it takes nothing any more either
        self._target = target
        self._at_end = False

    def wants_more(self) -> bool:
        return not self.pending and not self._at_end

    def move(self) -> None:
        """Pass on what goes without waiting, and not so much that others wait. Raises OSError if a side is broken."""
        rounds = 0
        try:
            while not self.is_over and (self.is_gone or rounds < _ROUNDS):
                rounds += 1
                if self.wants_more():
                    self.pending = self.source.recv(_CHUNK)
                    self._at_end = not self.pending
                if self.pending:
                    self.pending = self.pending[self._target.send(self.pending) :]
                elif self._at_end:
                    self._target.shutdown(_socket.SHUT_WR)
                    self.is_over = True
        except (BlockingIOError, InterruptedError):
            pass
