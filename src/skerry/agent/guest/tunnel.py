"""Bytes to and from a port in the box."""

from __future__ import annotations

import _socket
import os
from _collections import deque

from .channel import Call, Failure
from .loop import READ, WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent

_CHUNK = 1 << 18
_LOOPBACK = {"127.0.0.1": _socket.AF_INET, "localhost": _socket.AF_INET, "::1": _socket.AF_INET6}


class Tunnel:
    """A connection to a port of the box, joined to a call's two byte streams."""

    def __init__(self, agent: Agent, call: Call, socket: _socket.socket) -> None:
        self.loop = agent.loop
        self.call = call
        self._socket = socket
        self._out: deque[memoryview] = deque()
        self._connected = False
        self._sent_all = False
        self._input_ends = False
        self._closed = False
        call.pump = self._watch
        call.on_data = self._on_data
        call.on_end = self._on_end
        call.on_cancel = self._on_cancel
        call.on_close = self._close
        self._watch()

    def _watch(self) -> None:
        if self._closed:
            return
        events = 0
        if not self._sent_all and self._connected and self.call.room() > 0:
            events |= READ
        if self._out or not self._connected:
            events |= WRITE
        if events:
            self.loop.watch(self._socket.fileno(), events, self._on_ready)
        else:  # a connection that was reset is always ready, whatever was asked for
            self.loop.forget(self._socket.fileno())

    def _on_ready(self, events: int) -> None:
        if not self._connected:
            error = self._socket.getsockopt(_socket.SOL_SOCKET, _socket.SO_ERROR)
            if error:
                self._close()
                self.call.fail(Failure("refused", f"nothing answers on that port in the box: {os.strerror(error)}"))
                return
            self._connected = True
        self._write()
        if events & ~WRITE and not self._closed:
            self._read()
        self._watch()

    def _read(self) -> None:
        room = self.call.room()
        if self._sent_all or room <= 0:
            return
        try:
            data = self._socket.recv(min(room, _CHUNK))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self.call.send(data)
            return
        self._sent_all = True
        self.call.send_end()
        self._finish_if_done()

    def _on_data(self, data: memoryview) -> None:
        self._out.append(memoryview(bytes(data)))
        if self._connected:
            self._write()
        self._watch()

    def _on_end(self) -> None:
        self._input_ends = True
        if self._connected:
            self._write()
            self._watch()

    def _write(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out[0])
                self.call.acknowledge(sent)
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._out.clear()
            self._input_ends = True
        if self._input_ends:
            try:
                self._socket.shutdown(_socket.SHUT_WR)
            except OSError:
                pass
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._sent_all and self._input_ends and not self._out and not self._closed:
            self._close()
            self.call.answer({})

    def _on_cancel(self) -> None:
        self._close()
        self.call.answer({})

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self.loop.forget(self._socket.fileno())
            self._socket.close()


def connect(agent: Agent, call: Call) -> None:
    port, host = call.params.get("port"), call.params.get("host", "127.0.0.1")
    if type(port) is not int or not 0 < port < 65536:
        raise Failure("invalid", "port is 1 to 65535")
    if host not in _LOOPBACK:
        raise Failure("denied", f"{host!r} is not a loopback address: a tunnel ends inside the box")
    socket = _socket.socket(_LOOPBACK[host], _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK)
    try:
        socket.connect(("127.0.0.1" if host == "localhost" else host, port))
    except BlockingIOError:
        pass
    except OSError as error:
        socket.close()
        raise Failure("refused", f"nothing answers on port {port} in the box: {error.strerror}") from None
    socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    Tunnel(agent, call, socket)
