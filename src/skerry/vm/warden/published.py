"""Sockets that lead to a port of the guest without any handshake, so that any program can use them."""

from __future__ import annotations

import socket
from collections.abc import Callable

from .loop import READ, Loop
from .relay import Relay

_MAX_HANDSHAKE = 32
_MAX_STREAMS = 256


class Published:
    """A listening socket; each connection to it gets one of its own through the channel's socket."""

    def __init__(self, loop: Loop, listener: socket.socket, channel: str, port: int) -> None:
        self._loop = loop
        self._listener = listener
        self._channel = channel
        self._port = port
        self._streams: set[_Stream] = set()
        listener.setblocking(False)
        loop.watch(listener.fileno(), READ, self._on_connection)

    def _on_connection(self, _events: int) -> None:
        try:
            client = self._listener.accept()[0]
        except OSError:
            return
        guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        guest.setblocking(False)
        try:
            if len(self._streams) >= _MAX_STREAMS:
                raise ConnectionRefusedError
            guest.connect(self._channel)
            guest.send(b"CONNECT %d\n" % self._port)
        except OSError:
            client.close()
            guest.close()
            return
        client.setblocking(False)
        self._streams.add(_Stream(self._loop, client, guest, self._streams.discard))


class _Stream:
    """Two connections, joined once the guest's side has said that it is one."""

    def __init__(
        self, loop: Loop, client: socket.socket, guest: socket.socket, on_end: Callable[[_Stream], None]
    ) -> None:
        self._loop = loop
        self._client = client
        self._guest = guest
        self._on_end = on_end
        self._handshake = b""
        loop.watch(guest.fileno(), READ, self._on_handshake)
        loop.watch(client.fileno(), 0, lambda _events: self._close())

    def _on_handshake(self, _events: int) -> None:
        """Byte by byte: what follows the line is already the guest's."""
        while not self._handshake.endswith(b"\n"):
            try:
                byte = self._guest.recv(1)
            except BlockingIOError:
                return
            except OSError:
                byte = b""
            self._handshake += byte
            if not byte or len(self._handshake) > _MAX_HANDSHAKE:
                self._close()
                return
        if not self._handshake.startswith(b"OK "):
            self._close()
            return
        self._forget()
        Relay(self._loop, self._guest, self._client, lambda: self._on_end(self))

    def _forget(self) -> None:
        for each in (self._guest, self._client):
            self._loop.forget(each.fileno())

    def _close(self) -> None:
        self._forget()
        self._guest.close()
        self._client.close()
        self._on_end(self)
