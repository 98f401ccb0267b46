"""How the host reaches the ports of a machine: over the multiplexer, or over vsock. Both do the same."""

from __future__ import annotations

import _socket
import posix
import time

from .joined import Joined
from .loop import READ
from .mux import READY_PORT, GuestMux, find_device

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import Loop
    from .streams import Stream

HOST_CID = 2
_BACKLOG = 64
_READY_TIMEOUT_S = 2.0
_STREAM = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC


class Ports:
    def __init__(self) -> None:
        self.last_use = 0.0
        """When the last forwarded stream ended."""

    def listener(self, port: int) -> _socket.socket:
        """A socket for the host's streams to this port: they are refused until it is told to listen."""
        raise NotImplementedError

    def release(self, port: int) -> None:
        """Nobody listens there any more."""

    def forward(self, port: int, path: str) -> None:
        """Let the host's streams to this port go to a unix socket."""
        raise NotImplementedError

    def is_used(self) -> bool:
        """Whether a forwarded stream is open."""
        raise NotImplementedError

    def tell_ready(self) -> None:
        """The host is told that we are up."""


class MuxPorts(Ports):
    """Each port is a unix socket of the guest."""

    def __init__(self, loop: Loop, fd: int, folder: str) -> None:
        super().__init__()
        self._folder = folder
        self._forwarded: set[int] = set()
        self._mux = _CountingMux(loop, fd, self)
        posix.mkdir(folder, 0o700)

    def listener(self, port: int) -> _socket.socket:
        path = f"{self._folder}/{port}"
        listener = _socket.socket(_socket.AF_UNIX, _STREAM)
        listener.bind(path)
        self._mux.ports[port] = path
        return listener

    def release(self, port: int) -> None:
        del self._mux.ports[port]
        posix.unlink(f"{self._folder}/{port}")

    def forward(self, port: int, path: str) -> None:
        self._forwarded.add(port)
        self._mux.ports[port] = path

    def is_used(self) -> bool:
        return any(stream.port in self._forwarded for stream in self._mux.streams.values())

    def on_gone(self, stream: Stream) -> None:
        if stream.port in self._forwarded:
            self.last_use = time.monotonic()


class _CountingMux(GuestMux):
    def __init__(self, loop: Loop, fd: int, owner: MuxPorts) -> None:
        super().__init__(loop, fd)
        self._owner = owner

    def on_gone(self, stream: Stream) -> None:
        self._owner.on_gone(stream)


class VsockPorts(Ports):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop
        self._joined: set[Joined] = set()

    def listener(self, port: int) -> _socket.socket:
        listener = _socket.socket(_socket.AF_VSOCK, _STREAM)
        listener.bind((_socket.VMADDR_CID_ANY, port))
        return listener

    def forward(self, port: int, path: str) -> None:
        listener = self.listener(port)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._loop.watch(listener.fileno(), READ, lambda _events: self._accept(listener, path))

    def _accept(self, listener: _socket.socket, path: str) -> None:
        try:
            fd, address = listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        stream = _socket.socket(fileno=fd)
        service = _socket.socket(_socket.AF_UNIX, _STREAM | _socket.SOCK_NONBLOCK)
        try:
            if address[0] != HOST_CID:
                raise PermissionError
            service.connect(path)
        except OSError:
            stream.close()
            service.close()
            return
        self._joined.add(Joined(self._loop, stream, service, self._forget))

    def _forget(self, joined: Joined) -> None:
        self._joined.discard(joined)
        self.last_use = time.monotonic()

    def is_used(self) -> bool:
        return bool(self._joined)

    def tell_ready(self) -> None:
        knock = _socket.socket(_socket.AF_VSOCK, _STREAM)
        try:
            knock.settimeout(_READY_TIMEOUT_S)
            knock.connect((HOST_CID, READY_PORT))
        except OSError:
            pass  # nobody waits for it
        finally:
            knock.close()


def open_ports(loop: Loop, channel: str, folder: str) -> Ports:
    """By the word on the kernel's command line: `vsock`, `port:NAME` of virtio-serial, or `fd:N`, which is open."""
    kind, _, name = channel.partition(":")
    if kind == "vsock":
        return VsockPorts(loop)
    if kind == "fd":
        return MuxPorts(loop, int(name), folder)
    fd = posix.open(find_device(name), posix.O_RDWR | posix.O_NONBLOCK | posix.O_CLOEXEC)
    return MuxPorts(loop, fd, folder)
