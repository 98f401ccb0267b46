"""The guest's end of the multiplexer: the host's streams to a port go to the unix socket that stands for it."""

from __future__ import annotations

import _socket
import posix

from .frames import CLOSE, HEADER, HELLO, MAGIC, MAX_STREAMS, NONCE_BYTES, NUMBER, OPEN, Broken, frame
from .multiplexer import Mux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .multiplexer import Events

READY_PORT = 1024
_FIRST_ID = 2
_MAX_STREAMS = 2 * MAX_STREAMS
"""The host counts them too, and sees the end of some before we do."""
_LOOK_AGAIN_S = 0.05
_HELLO = frame(HELLO, 0, MAGIC + bytes(NONCE_BYTES))[: HEADER.size + len(MAGIC)]
_PORTS = "/sys/class/virtio-ports"


class GuestMux(Mux):
    def __init__(self, loop: Events, fd: int) -> None:
        super().__init__(loop, fd, _FIRST_ID)
        self.ports: dict[int, str] = {}
        """The paths of the sockets that the host may reach."""
        self._is_lost = False

    def parse(self) -> None:
        """The host may be another by now: then nothing makes sense until it greets."""
        while True:
            try:
                if self._is_lost and not self._find_greeting():
                    return None
                return super().parse()
            except Broken as broken:
                self.on_broken(str(broken))

    def _find_greeting(self) -> bool:
        at = self._in.find(_HELLO)
        if at < 0:
            del self._in[: 1 - len(_HELLO)]
            return False
        del self._in[:at]
        self._is_lost = False
        return True

    def on_padding(self) -> None:
        del self._in[: len(self._in) - len(self._in.lstrip(b"\0"))]

    def on_hello(self, nonce: bytes) -> None:
        """A host that knows of nothing that was: begin anew, and tell it that we are up."""
        self.drop_all()
        self.begin(_FIRST_ID)
        self.send(HELLO, 0, MAGIC + nonce)
        self.send(OPEN, _FIRST_ID, NUMBER.pack(READY_PORT))
        self.send(CLOSE, _FIRST_ID)
        self.begin(_FIRST_ID + 2)

    def on_open(self, port: int) -> _socket.socket | None:
        path = self.ports.get(port)
        if path is None or len(self.streams) >= _MAX_STREAMS:
            return None
        socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
        try:
            socket.connect(path)
        except OSError:
            socket.close()
            return None
        return socket

    def on_broken(self, reason: str) -> None:
        self.drop_all()
        self._is_lost = True

    def on_hang_up(self) -> None:
        """No host is there; one will come, but nothing tells when."""
        self.loop.forget(self._fd)
        self.loop.later(_LOOK_AGAIN_S, self.look)


def find_device(name: str) -> str:
    """The device of the virtio-serial port that the host has given this name."""
    for port in posix.listdir(_PORTS):
        with open(f"{_PORTS}/{port}/name", encoding="utf-8") as file:
            if file.read().strip() == name:
                return f"/dev/{port}"
    raise FileNotFoundError(2, "no virtio-serial port has this name", name)
