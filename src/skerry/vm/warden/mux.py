"""The host's end of the multiplexer: the socket that answers `CONNECT port`, over a machine's one channel (MUX.md)."""

from __future__ import annotations

import _socket
import posix

from skerry.agent.guest.frames import HELLO, MAGIC, MAX_FRAME, MAX_STREAMS, NONCE_BYTES, frame
from skerry.agent.guest.multiplexer import Mux
from skerry.agent.guest.streams import Stream

from .loop import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .loop import Loop

READY_PORT = 1024
_MAX_LINE = 32
_FIRST_ID = 1
_FIRST_HOST_PORT = 1 << 30
"""What is answered to `CONNECT` counts from here, as Firecracker does it."""


class HostMux(Mux):
    def __init__(
        self,
        loop: Loop,
        channel_fd: int,
        listener: _socket.socket,
        ready_path: str,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        super().__init__(loop, channel_fd, _FIRST_ID)
        self._listener = listener
        self._ready_path = ready_path
        self._tell = tell
        self._callers: dict[Caller, int | None] = {}
        """Who has no stream yet, and the port that they wait for."""
        self._is_accepting = False
        self._is_closed = False
        self._greeting = frame(HELLO, 0, MAGIC + posix.urandom(NONCE_BYTES))
        self._is_answered = False
        self._out += bytes(MAX_FRAME) + self._greeting
        self._flush()
        listener.setblocking(False)
        self._count_callers()

    def close(self) -> None:
        """End all streams, the channel, and the listening."""
        if self._is_closed:
            return
        self._is_closed = True
        self.drop_all()
        for caller in list(self._callers):
            caller.close()
        for fd in (self._fd, self._listener.fileno()):
            self.loop.forget(fd)
        posix.close(self._fd)
        self._listener.close()

    # the channel

    def parse(self) -> None:
        """Until the answer to our greeting comes, all that comes was meant for another."""
        if not self._is_answered:
            at = self._in.find(self._greeting)
            if at < 0:
                del self._in[: 1 - len(self._greeting)]
                return
            del self._in[: at + len(self._greeting)]
            self._is_answered = True
            self.on_room()
        super().parse()

    def on_open(self, port: int) -> _socket.socket | None:
        if port != READY_PORT or len(self.streams) >= MAX_STREAMS:
            return None
        waiting = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            waiting.setblocking(False)
            waiting.connect(self._ready_path)
        except OSError:
            waiting.close()
            return None
        return waiting

    def on_accept(self, stream: Stream) -> None:
        stream.greet(b"OK %d\n" % (_FIRST_HOST_PORT + stream.id))

    def on_broken(self, reason: str) -> None:
        self._tell(f"the guest's channel is closed for good: it sent {reason}")
        self.close()

    def on_hang_up(self) -> None:
        self.close()

    # who wants a stream

    def on_gone(self, _stream: Stream) -> None:
        self._count_callers()

    def _count_callers(self) -> None:
        """As many as there may be streams are let in; the others wait at the door."""
        wanted = not self._is_closed and len(self.streams) + len(self._callers) < MAX_STREAMS
        if wanted and not self._is_accepting:
            self.loop.watch(self._listener.fileno(), READ, self._on_caller)
        elif self._is_accepting and not wanted:
            self.loop.forget(self._listener.fileno())
        self._is_accepting = wanted

    def on_room(self) -> None:
        """Open the streams that were waited for, as long as the channel takes it."""
        for caller, port in list(self._callers.items()):
            if self.is_congested or not self._is_answered:
                return
            if port is None or self._callers.pop(caller, None) is None:  # to open one may have opened the next
                continue
            self.loop.forget(caller.socket.fileno())
            self.open(port, caller.socket)

    def _on_caller(self, _events: int) -> None:
        try:
            fd, _ = self._listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        self._callers[Caller(self, _socket.socket(fileno=fd))] = None
        self._count_callers()

    def wait_for(self, caller: Caller, port: int) -> None:
        self._callers[caller] = port
        self.on_room()

    def forget(self, caller: Caller) -> None:
        self._callers.pop(caller, None)
        self._count_callers()


class Caller:
    """A connection that has not got its stream yet."""

    def __init__(self, mux: HostMux, socket: _socket.socket) -> None:
        self.socket = socket
        self._mux = mux
        self._line = b""
        socket.setblocking(False)
        mux.loop.watch(socket.fileno(), READ, self._on_line)

    def _on_line(self, _events: int) -> None:
        """Take the one line, and nothing of what may follow it."""
        try:
            seen = self.socket.recv(_MAX_LINE - len(self._line), _socket.MSG_PEEK)
            self._line += self.socket.recv(seen.find(b"\n") + 1 or len(seen)) if seen else b""
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        if not self._line.endswith(b"\n"):
            if not seen or len(self._line) >= _MAX_LINE:
                self.close()
            return
        port = _port_of(self._line)
        if port is None:
            self.close()
            return
        self._mux.loop.watch(self.socket.fileno(), 0, lambda _events: self.close())
        self._mux.wait_for(self, port)

    def close(self) -> None:
        self._mux.loop.forget(self.socket.fileno())
        self.socket.close()
        self._mux.forget(self)


def _port_of(line: bytes) -> int | None:
    word, _, port = line.rstrip(b"\r\n").partition(b" ")
    return int(port) if word.upper() == b"CONNECT" and port.isdigit() and int(port) < 1 << 32 else None
