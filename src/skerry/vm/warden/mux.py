"""The host's end of the multiplexer: the socket that answers `CONNECT port`, over a machine's one channel (MUX.md)."""

from __future__ import annotations

import _socket
import posix

from skerry.agent.guest.loop import READ, Loop
from skerry.agent.guest.vm import multiplexer as mux
from skerry.agent.guest.vm.multiplexer import MAX_STREAMS, Mux, MuxStream
from skerry.agent.guest.vm.socket_pair import connect

from .sockets import Handshake, accept, asked_port

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_FIRST_ID = 1
_FIRST_HOST_PORT = 1 << 30  # first number that is answered to `CONNECT`, as Firecracker counts


class HostMux(Mux):
    """Host's end, which lets callers wait until the guest has answered and the channel has room."""

    def __init__(
        self,
        loop: Loop,
        channel_fd: int,
        listener: _socket.socket,
        ready_path: str,
        tell: Callable[[str], object] = lambda text: None,
    ) -> None:
        super().__init__(loop, channel_fd, _FIRST_ID)
        self._listener = listener
        self._ready_path = ready_path
        self._tell = tell
        self._callers: dict[Handshake, int | None] = {}
        """Connections without a stream yet, and the ports that they wait for."""
        self._is_accepting = False
        self._is_closed = False
        self._greeting = mux.frame(mux.HELLO, 0, mux.MAGIC + posix.urandom(mux.NONCE_BYTES))
        self._is_answered = False
        self._out += bytes(mux.MAX_FRAME) + self._greeting
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

    def parse(self) -> None:
        """Handle frames; all before the answer to our greeting was meant for another, and is dropped."""
        if not self._is_answered:
            if not self.skip_to(self._greeting):
                return
            del self._in[: len(self._greeting)]
            self._is_answered = True
            self.on_room()
        super().parse()

    def on_open(self, port: int) -> _socket.socket | None:
        if port != mux.READY_PORT or len(self.streams) >= MAX_STREAMS:
            return None
        return connect(self._ready_path, follow=False)

    def on_accept(self, stream: MuxStream) -> None:
        stream.greet(b"OK %d\n" % (_FIRST_HOST_PORT + stream.id))

    def on_broken(self, reason: str) -> None:
        self._tell(f"the guest's channel is closed for good: it sent {reason}")
        self.close()

    def on_hang_up(self) -> None:
        self.close()

    def on_gone(self, _stream: MuxStream) -> None:
        self._count_callers()

    def _count_callers(self) -> None:
        """Accept as many as there may be streams; the others wait in the backlog."""
        wanted = not self._is_closed and len(self.streams) + len(self._callers) < MAX_STREAMS
        if wanted and not self._is_accepting:
            self.loop.watch(self._listener.fileno(), READ, self._on_caller)
        elif self._is_accepting and not wanted:
            self.loop.forget(self._listener.fileno())
        self._is_accepting = wanted

    def on_room(self) -> None:
        """Open the streams that callers wait for, as long as the channel takes it."""
        for caller, port in list(self._callers.items()):
            if self.is_congested or not self._is_answered:
                return
            if port is None or self._callers.pop(caller, None) is None:  # to open one may have opened the next
                continue
            self.open(port, caller.take())

    def _on_caller(self, _events: int) -> None:
        client = accept(self._listener)
        if client is not None:
            self._callers[Handshake(self.loop, client, self._on_line, self._on_caller_gone)] = None
            self._count_callers()

    def _on_line(self, caller: Handshake, line: bytes) -> None:
        port = asked_port(line)
        if port is None:
            caller.close()
        else:
            self._callers[caller] = port
            self.on_room()

    def _on_caller_gone(self, caller: Handshake) -> None:
        self._callers.pop(caller, None)
        self._count_callers()
