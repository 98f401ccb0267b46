"""Ports of a machine that the host can reach, over the multiplexer or over vsock; both do the same."""

from __future__ import annotations

import _socket
import posix
import time

from ..agent import HOST_CID
from ..loop import READ, Loop
from . import multiplexer as mux
from .multiplexer import Broken, Mux, MuxStream, frame
from .socket_pair import SocketPair, connect

_BACKLOG = 64
_READY_TIMEOUT_S = 2.0
_STREAM = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC
_FIRST_ID = 2
_MAX_STREAMS = 2 * mux.MAX_STREAMS  # the host counts them too, and sees the end of some before we do
_LOOK_AGAIN_S = 0.05
_HELLO = frame(mux.HELLO, 0, mux.MAGIC + bytes(mux.NONCE_BYTES))[: mux.HEADER.size + len(mux.MAGIC)]
_VIRTIO_PORTS = "/sys/class/virtio-ports"


class GuestMux(Mux):
    """The guest's end of the multiplexer: each port is a unix socket."""

    last_use = 0.0  # when the last forwarded stream ended

    def __init__(self, loop: Loop, fd: int, folder: str = "") -> None:
        super().__init__(loop, fd, _FIRST_ID)
        self.ports: dict[int, str] = {}  # paths of the sockets that the host may reach
        self._folder = folder
        self._forwarded: set[int] = set()
        self._is_lost = False

    def listener(self, port: int) -> _socket.socket:
        """Bind a socket for the host's streams to this port: they are refused until it is told to listen."""
        path = f"{self._folder}/{port}"
        listener = _socket.socket(_socket.AF_UNIX, _STREAM)
        listener.bind(path)
        self.ports[port] = path
        return listener

    def release(self, port: int) -> None:
        """Forget a port where nobody listens any more."""
        posix.unlink(self.ports.pop(port))

    def forward(self, port: int, path: str) -> None:
        """Let the host's streams to this port go to a unix socket."""
        self._forwarded.add(port)
        self.ports[port] = path

    def is_used(self) -> bool:
        """Whether a forwarded stream is open."""
        return any(stream.port in self._forwarded for stream in self.streams.values())

    def on_gone(self, stream: MuxStream) -> None:
        if stream.port in self._forwarded:
            self.last_use = time.monotonic()

    def parse(self) -> None:
        """Handle frames; after a broken one all up to a greeting is skipped, as the host may be another by now."""
        while True:
            try:
                if self._is_lost and not self.skip_to(_HELLO):
                    return None
                self._is_lost = False
                return super().parse()
            except Broken as broken:
                self.on_broken(str(broken))

    def on_padding(self) -> None:
        del self._in[: len(self._in) - len(self._in.lstrip(b"\0"))]

    def on_hello(self, nonce: bytes) -> None:
        """Begin anew with a host that knows of nothing that was, and tell it that we are up."""
        self.drop_all()
        self.begin(_FIRST_ID)
        self.send(mux.HELLO, 0, mux.MAGIC + nonce)
        self.send(mux.OPEN, _FIRST_ID, mux.NUMBER.pack(mux.READY_PORT))
        self.send(mux.CLOSE, _FIRST_ID)
        self.begin(_FIRST_ID + 2)

    def notify_ready(self) -> None:
        """Tell nothing: the answer to the host's greeting says that we are up."""

    def on_open(self, port: int) -> _socket.socket | None:
        path = self.ports.get(port)
        return None if path is None or len(self.streams) >= _MAX_STREAMS else connect(path)

    def on_broken(self, reason: str) -> None:
        self.drop_all()
        self._is_lost = True

    def on_hang_up(self) -> None:
        """Look again later: no host is there, one will come, and nothing tells when."""
        self.loop.forget(self._fd)
        self.loop.later(_LOOK_AGAIN_S, self.look)


class VsockPorts:
    """The same over vsock, for a host that listens there itself."""

    last_use = 0.0

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._pairs: set[SocketPair] = set()

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
        service = connect(path) if address[0] == HOST_CID else None
        if service is None:
            stream.close()
        else:
            self._pairs.add(SocketPair(self._loop, stream, service, self._forget))

    def _forget(self, pair: SocketPair) -> None:
        self._pairs.discard(pair)
        self.last_use = time.monotonic()

    def is_used(self) -> bool:
        return bool(self._pairs)

    def release(self, port: int) -> None:
        """Nothing is kept of a port."""

    def notify_ready(self) -> None:
        """Tell the host that we are up."""
        knock = _socket.socket(_socket.AF_VSOCK, _STREAM)
        try:
            knock.settimeout(_READY_TIMEOUT_S)
            knock.connect((HOST_CID, mux.READY_PORT))
        except OSError:
            pass  # nobody waits for it
        finally:
            knock.close()


def open_ports(loop: Loop, channel: str, folder: str) -> GuestMux | VsockPorts:
    """Open the channel that the kernel's command line names: `vsock`, `port:NAME` of virtio-serial, or `fd:N`."""
    kind, _, name = channel.partition(":")
    if kind == "vsock":
        return VsockPorts(loop)
    posix.mkdir(folder, 0o700)
    if kind == "fd":
        return GuestMux(loop, int(name), folder)
    return GuestMux(loop, posix.open(_find_device(name), posix.O_RDWR | posix.O_NONBLOCK | posix.O_CLOEXEC), folder)


def _find_device(name: str) -> str:
    """The device of the virtio-serial port that the host has given this name."""
    for port in posix.listdir(_VIRTIO_PORTS):
        with open(f"{_VIRTIO_PORTS}/{port}/name", encoding="utf-8") as file:
            if file.read().strip() == name:
                return f"/dev/{port}"
    raise FileNotFoundError(2, "no virtio-serial port has this name", name)
