"""Sockets of a machine on the host: those that answer `CONNECT port`, and those that lead to one port of the guest."""

from __future__ import annotations

import _socket
import errno
import posix

from skerry.agent.guest.loop import READ, WRITE, Loop, ignore_errors
from skerry.agent.guest.vm.socket_pair import SocketPair, connect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_LINE = 32
_MAX_STREAMS = 256
_RETRY_S = 0.1
_CONTROL_PORT = 51
_KIND, _LINK = 0o170000, 0o120000
_ACCEPTED = b"OK 1073741824\n"


def accept(listener: _socket.socket) -> _socket.socket | None:
    """Take a connection; None if there is none after all, or no descriptor for it."""
    try:
        fd, _ = listener._accept()  # type: ignore[attr-defined]
    except OSError:
        return None
    connection = _socket.socket(fileno=fd)
    connection.setblocking(False)
    return connection


class Handshake:
    """Connection that says one line before it is a stream. Nothing after the line is read."""

    def __init__(
        self,
        loop: Loop,
        socket: _socket.socket,
        on_line: Callable[[Handshake, bytes], None],
        on_gone: Callable[[Handshake], None],
    ) -> None:
        self.socket = socket
        self._loop = loop
        self._line = b""
        self._on_line = on_line
        self._on_gone = on_gone
        loop.watch(socket.fileno(), READ, self._on_ready)

    def _on_ready(self, _events: int) -> None:
        try:
            seen = self.socket.recv(_MAX_LINE - len(self._line), _socket.MSG_PEEK)
            self._line += self.socket.recv(seen.find(b"\n") + 1 or len(seen)) if seen else b""
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        if self._line.endswith(b"\n"):
            self._loop.watch(self.socket.fileno(), 0, lambda _events: self.close())
            self._on_line(self, self._line)
        elif not seen or len(self._line) >= _MAX_LINE:
            self.close()

    def take(self) -> _socket.socket:
        """Give the connection away."""
        self._loop.forget(self.socket.fileno())
        return self.socket

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            self.take().close()
            self._on_gone(self)


def asked_port(line: bytes) -> int | None:
    """Parse a line `CONNECT port`; None for any other line."""
    word, _, port = line.strip().partition(b" ")
    return int(port) if word.upper() == b"CONNECT" and port.isdigit() and int(port) < 1 << 32 else None


def _connect_to_guest(channel: str) -> _socket.socket | None:
    """Connect to the channel; None if nobody listens there. A warden that is root, beside a jail, follows the link of
    root's that leads into the jail, and none of the machine's, which would lead to sockets of the host."""
    if posix.geteuid() != 0:  # it reaches no more than the machine does
        return connect(channel)
    try:
        found = posix.lstat(channel)
        if found.st_mode & _KIND == _LINK and found.st_uid == 0:
            channel = f"{channel.rpartition('/')[0] or '.'}/{posix.readlink(channel)}"
    except OSError:
        return None
    return connect(channel, follow=False)


class Published:
    """Listening socket that leads to a port of the guest without a handshake, so that any program can use it."""

    def __init__(self, loop: Loop, listener: _socket.socket, channel: str, port: int) -> None:
        self._loop = loop
        self._listener = listener
        self._channel = channel
        self._port = port
        self._count = 0
        listener.setblocking(False)
        loop.watch(listener.fileno(), READ, self._on_connection)

    def _on_connection(self, _events: int) -> None:
        client = accept(self._listener)
        if client is None:
            return
        guest = _connect_to_guest(self._channel) if self._count < _MAX_STREAMS else None
        if guest is None:
            client.close()
            return
        self._count += 1
        ignore_errors(guest.send, b"CONNECT %d\n" % self._port)  # if it has hung up, the handshake sees it too

        def on_answer(handshake: Handshake, line: bytes) -> None:
            if not line.startswith(b"OK "):
                handshake.close()
                return
            self._loop.forget(client.fileno())
            SocketPair(self._loop, handshake.take(), client, self._on_end)

        def on_refused(handshake: Handshake) -> None:
            self._loop.forget(client.fileno())
            client.close()
            self._on_end()

        asking = Handshake(self._loop, guest, on_answer, on_refused)
        self._loop.watch(client.fileno(), 0, lambda _events: asking.close())

    def _on_end(self, _pair: SocketPair | None = None) -> None:
        self._count -= 1


class VsockBridge:
    """Socket that answers `CONNECT port` over the kernel's vsock, for a machine that has a number of its own there. The
    kernel does not tell when a guest is up: it is tried until it is, and then whoever waits at `ready_path` and whoever
    has asked for a port in the meantime is served."""

    def __init__(self, loop: Loop, cid: int, listener: _socket.socket, ready_path: str) -> None:
        self._loop = loop
        self._cid = cid
        self._listener = listener
        self._ready_path = ready_path
        self._is_up = False
        self._waiting: list[Callable[[], None]] = []
        self._count = 0
        listener.setblocking(False)
        loop.watch(listener.fileno(), READ, self._on_caller)
        self._look_for_guest()

    def _look_for_guest(self) -> None:
        self._connect(_CONTROL_PORT, self._on_found)

    def _on_found(self, guest: _socket.socket | None) -> None:
        if guest is None:
            self._loop.later(_RETRY_S, self._look_for_guest)
            return
        guest.close()
        self._is_up = True
        waiting = connect(self._ready_path, follow=False)
        if waiting is not None:
            waiting.close()
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for serve in waiting:
            serve()

    def _connect(self, port: int, then: Callable[[_socket.socket | None], None]) -> None:
        """Give `then` a connection to the guest's port, or None if it refuses."""
        guest = self.new_socket()
        guest.setblocking(False)

        def on_answer(_events: int) -> None:
            self._loop.forget(guest.fileno())
            if guest.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR):
                guest.close()
                then(None)
            else:
                then(guest)

        if guest.connect_ex(self.address(port)) in (0, errno.EINPROGRESS):
            self._loop.watch(guest.fileno(), WRITE, on_answer)
        else:
            guest.close()
            then(None)

    def new_socket(self) -> _socket.socket:
        return _socket.socket(_socket.AF_VSOCK, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)

    def address(self, port: int) -> tuple[int, int] | str:
        return self._cid, port

    def _on_caller(self, _events: int) -> None:
        client = accept(self._listener)
        if client is not None and self._count < _MAX_STREAMS:
            self._count += 1
            Handshake(self._loop, client, self._on_line, self._on_end)
        elif client is not None:
            client.close()

    def _on_line(self, caller: Handshake, line: bytes) -> None:
        port = asked_port(line)
        if port is None:
            caller.close()
            return
        self._waiting.append(lambda: self._connect(port, lambda guest: self._join(caller, guest)))
        if self._is_up:
            self._serve_waiting()

    def _join(self, caller: Handshake, guest: _socket.socket | None) -> None:
        if guest is None:
            caller.close()
            return
        if caller.socket.fileno() < 0:
            guest.close()  # it has hung up meanwhile
            return
        client = caller.take()
        ignore_errors(client.send, _ACCEPTED)  # if it has hung up, the pair sees it too
        SocketPair(self._loop, client, guest, self._on_end)

    def _on_end(self, _ended: Handshake | SocketPair) -> None:
        self._count -= 1
