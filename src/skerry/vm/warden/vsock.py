"""The socket that answers `CONNECT port`, over the kernel's vsock: for a machine that has a number of its own there."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable

from .loop import READ, WRITE, Loop
from .relay import Relay

_MAX_LINE = 32
_MAX_STREAMS = 256
_RETRY_S = 0.1
_CONTROL_PORT = 51
_PREFIX = b"CONNECT "
_ACCEPTED = b"OK 1073741824\n"


class VsockBridge:
    """The kernel does not tell when a guest is up: it is tried until it is, and then whoever waits at `ready_path` and
    whoever has asked for a port in the meantime is served."""

    def __init__(self, loop: Loop, cid: int, listener: socket.socket, ready_path: str) -> None:
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

    def _on_found(self, guest: socket.socket | None) -> None:
        if guest is None:
            self._loop.later(_RETRY_S, self._look_for_guest)
            return
        guest.close()
        self._is_up = True
        waiting = socket.socket(socket.AF_UNIX)
        waiting.setblocking(False)
        waiting.connect_ex(self._ready_path)
        waiting.close()
        for serve in self._waiting:
            serve()
        self._waiting.clear()

    def dial(self, port: int, then: Callable[[socket.socket | None], None]) -> None:
        """Give `then` a connection to the guest's port, once it is up, or None if it refuses."""
        if self._is_up:
            self._connect(port, then)
        else:
            self._waiting.append(lambda: self._connect(port, then))

    def _connect(self, port: int, then: Callable[[socket.socket | None], None]) -> None:
        guest = self.new_socket()
        guest.setblocking(False)
        code = guest.connect_ex(self.address(port))
        if code in (0, errno.EINPROGRESS):
            self._loop.watch(guest.fileno(), WRITE, lambda _events: self._on_connected(guest, then))
        else:
            guest.close()
            then(None)

    def _on_connected(self, guest: socket.socket, then: Callable[[socket.socket | None], None]) -> None:
        self._loop.forget(guest.fileno())
        if guest.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            guest.close()
            then(None)
        else:
            then(guest)

    def new_socket(self) -> socket.socket:
        return socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)

    def address(self, port: int) -> tuple[int, int] | str:
        return self._cid, port

    def _on_caller(self, _events: int) -> None:
        try:
            client = self._listener.accept()[0]
        except OSError:
            return
        if self._count >= _MAX_STREAMS:
            client.close()
            return
        self._count += 1
        client.setblocking(False)
        _Caller(self._loop, client, self.dial, self._on_end)

    def _on_end(self) -> None:
        self._count -= 1


class _Caller:
    """A connection that has not got its stream yet."""

    def __init__(
        self,
        loop: Loop,
        client: socket.socket,
        dial: Callable[[int, Callable[[socket.socket | None], None]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._client = client
        self._dial = dial
        self._on_end = on_end
        self._line = b""
        self._is_gone = False
        loop.watch(client.fileno(), READ, self._on_line)

    def _on_line(self, _events: int) -> None:
        """Take the one line, and nothing of what may follow it."""
        try:
            byte = self._client.recv(1)
            while byte and byte != b"\n" and len(self._line) < _MAX_LINE:
                self._line += byte
                byte = self._client.recv(1)
        except BlockingIOError:
            return
        except OSError:
            byte = b""
        port = self._line.removeprefix(_PREFIX).strip()
        if byte != b"\n" or not self._line.startswith(_PREFIX) or not port.isdigit():
            self._close()
            return
        self._loop.forget(self._client.fileno())
        self._loop.watch(self._client.fileno(), 0, lambda _events: self._close())
        self._dial(int(port), self._on_dialled)

    def _on_dialled(self, guest: socket.socket | None) -> None:
        if guest is None or self._is_gone:
            if guest is not None:
                guest.close()
            self._close()
            return
        self._loop.forget(self._client.fileno())
        with contextlib.suppress(OSError):  # it has hung up, which the relay sees too
            self._client.send(_ACCEPTED)
        Relay(self._loop, self._client, guest, self._on_end)

    def _close(self) -> None:
        if not self._is_gone:
            self._is_gone = True
            self._loop.forget(self._client.fileno())
            self._client.close()
            self._on_end()
