"""Tunnels: bytes to and from a port in the box, and listeners for connections from it."""

from __future__ import annotations

import _socket
import posix
import sys
from _collections import deque

from .channel import Call, Failure
from .loop import READ, WRITE, Loop, ignore_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent

_CHUNK = 1 << 18
_STREAM = _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC | _socket.SOCK_NONBLOCK
_BACKLOG = 128
_REOPEN_S = 0.05
_LINGER_S = 10
_NO_LINGER = (1).to_bytes(4, sys.byteorder) + bytes(4)
_BROKEN = Failure("cancelled", "the program in the box has broken the connection off")
_LOOPBACK = {"127.0.0.1": _socket.AF_INET, "localhost": _socket.AF_INET, "::1": _socket.AF_INET6}


class Listener:
    """Socket that takes TCP connections to an address of the box, and gives each to `on_connection`."""

    def __init__(self, loop: Loop, address: tuple[str, int], on_connection: Callable[[_socket.socket], None]) -> None:
        """Raises OSError if the address cannot be had."""
        self._loop = loop
        self._on_connection = on_connection
        self._socket = _socket.socket(_socket.AF_INET, _STREAM)
        try:
            self._socket.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(_BACKLOG)
            self._watch()
        except OSError:
            self._socket.close()
            raise

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())
            self._socket.close()

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch(self._socket.fileno(), READ, self._on_ready)

    def _on_ready(self, _events: int) -> None:
        try:
            fd, _ = self._socket._accept()  # type: ignore[attr-defined]
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptor left: the listener would be ready for ever, so look again later
            self._loop.forget(self._socket.fileno())
            self._loop.later(_REOPEN_S, self._watch)
            return
        connection = _socket.socket(fileno=fd)
        connection.setblocking(False)
        self._on_connection(connection)


def reset(connection: _socket.socket) -> None:
    """Close a connection so that the other side sees it broken, not ended."""
    ignore_errors(connection.setsockopt, _socket.SOL_SOCKET, _socket.SO_LINGER, _NO_LINGER)
    connection.close()


class PortTunnel:
    """Connection in the box, joined to a call's two byte streams."""

    def __init__(
        self, agent: Agent, call: Call, socket: _socket.socket, on_closed: Callable[[PortTunnel], None] | None = None
    ) -> None:
        """With `on_closed` it is one that came from the box and is open already: its program sees it reset, if it is
        cancelled before all that the host had to say has been said."""
        self.loop = agent.loop
        self.call = call
        self._socket = socket
        self._on_closed = on_closed
        self._out: deque[memoryview] = deque()
        self._connected = on_closed is not None
        self._sent_all = False
        self._input_ends = False
        self._lingers = False  # the host wants no more of it, and its last bytes are on their way
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
        if not self._sent_all and self._connected and (self._lingers or self.call.room() > 0):
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
                self.call.fail(Failure("refused", f"nothing answers on that port in the box: {posix.strerror(error)}"))
                return
            self._connected = True
        self._write()
        if events & ~WRITE and not self._closed:
            self._read()
        self._watch()

    def _read(self) -> None:
        room = _CHUNK if self._lingers else self.call.room()
        if self._sent_all or room <= 0:
            return
        try:
            data = self._socket.recv(min(room, _CHUNK))
        except BlockingIOError:
            return
        except OSError:
            if self._on_closed is not None:
                self.break_off(_BROKEN)
                return
            data = b""
        if not data:
            self._sent_all = True
            self.call.send_end()
            self._finish_if_done()
        elif not self._lingers:
            self.call.send(data)

    def _on_data(self, data: memoryview) -> None:
        sent = 0
        if self._connected and not self._out:  # what goes out at once need not be kept
            try:
                sent = self._socket.send(data)
                self.call.acknowledge(sent)
            except OSError:
                pass  # it is full, or broken: then the next write tells
        if sent < len(data):
            self._out.append(memoryview(bytes(data[sent:])))
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
            if self._on_closed is not None:
                self.break_off(_BROKEN)
                return
            self._out.clear()
            self._input_ends = True
        if self._input_ends:
            ignore_errors(self._socket.shutdown, _socket.SHUT_WR)
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._sent_all and self._input_ends and not self._out and not self._closed:
            self._close(whole=True)
            self.call.answer({})

    def _on_cancel(self) -> None:
        if self._on_closed is not None and self._input_ends:
            self._lingers = True
            self.loop.later(_LINGER_S, self._end)
            self._watch()
        else:
            self._end()

    def _end(self) -> None:
        self._close(whole=self._lingers and not self._out)
        self.call.answer({})

    def break_off(self, why: Failure) -> None:
        """End it before its time."""
        self._close()
        self.call.fail(why)

    def _close(self, whole: bool = False) -> None:
        if self._closed:
            return
        self._closed = True
        self.loop.forget(self._socket.fileno())
        if self._on_closed is None or whole:
            self._socket.close()
        else:
            reset(self._socket)
        if self._on_closed is not None:
            self._on_closed(self)


def connect(agent: Agent, call: Call) -> None:
    port, host = call.params.get("port"), call.params.get("host", "127.0.0.1")
    if type(port) is not int or not 0 < port < 65536:
        raise Failure("invalid", "port is 1 to 65535")
    if host not in _LOOPBACK:
        raise Failure("denied", f"{host!r} is not a loopback address: a tunnel ends inside the box")
    socket = _socket.socket(_LOOPBACK[host], _STREAM)
    try:
        socket.connect(("127.0.0.1" if host == "localhost" else host, port))
    except BlockingIOError:
        pass
    except OSError as error:
        socket.close()
        raise Failure("refused", f"nothing answers on port {port} in the box: {error.strerror}") from None
    socket.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
    PortTunnel(agent, call, socket)
