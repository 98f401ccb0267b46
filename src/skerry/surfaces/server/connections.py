"""Connections of a server: HTTP and WebSocket by uvicorn's protocols, with bounds on what a client may send and on how
long it may take, and with the uid of whoever is at the other end of the unix socket."""

from __future__ import annotations

import asyncio
import resource
import socket
import struct
import sys
from collections import OrderedDict
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from skerry.surfaces.server.strict import StrictProtocol

HEAD_S = 10.0
"""Seconds for the head of a request, from its first byte; for the first one, from the connection on."""
IDLE_S = 60
"""Seconds that a connection is kept between two requests."""
STALLED_S = 120.0
"""Seconds after which a client that takes nothing of what is sent to it is cut off."""
MAX_HEAD = 32 << 10
"""The most bytes of the head of a request."""
_ENDS_S = 2.0
"""Seconds for a client to take the last bytes of a connection that is closed."""
_TRIED = 16
"""Connections that are looked at for one that may give way."""


class Connections:
    """All connections of a server, over its listeners."""

    def __init__(self, most: int) -> None:
        self.most = most
        """The most at a time on the network; those on the unix socket are not counted, so that admins always get in."""
        self._counted: list[ServerState] = []
        self._all: list[ServerState] = []
        self._idle: OrderedDict[HttpConnection | SocketConnection, None] = OrderedDict()
        """Those on the network without a call under way, the longest idle first."""

    def add(self, state: ServerState, *, counted: bool) -> None:
        """Take the connections of a listener in."""
        self._all.append(state)
        if counted:
            self._counted.append(state)

    @property
    def count(self) -> int:
        return sum(len(state.connections) for state in self._all)

    @property
    def is_full(self) -> bool:
        return sum(len(state.connections) for state in self._counted) > min(self.most, _room())

    def note(self, connection: HttpConnection | SocketConnection, *, idle: bool) -> None:
        """Hear whether a connection has a call under way."""
        self._idle.pop(connection, None)
        if idle and not _is_local(connection):
            self._idle[connection] = None

    def make_room(self) -> bool:
        """Close the connection that has been without a call for longest, so that who holds connections and asks nothing
        keeps nobody out; False if each has a call, or an answer that its client has not taken."""
        for _ in range(min(_TRIED, len(self._idle))):
            connection, _ = self._idle.popitem(last=False)
            if not connection.transport.get_write_buffer_size():
                connection.transport.abort()
                return True
            self._idle[connection] = None
        return False

    def tell_date(self, date: bytes) -> None:
        """Give every answer from now on this date."""
        for state in self._all:
            state.default_headers = [(b"date", date)]

    async def drain(self, seconds: float) -> None:
        """Have connections without a call closed, wait so long until all others have come to their end, and then cancel
        what still goes on."""
        for each in self._connections():
            each.shutdown()
        await self._until_over(seconds)
        for task in self._tasks():
            task.cancel()
        await self._until_over(_ENDS_S)
        for each in self._connections():
            each.transport.abort()

    async def _until_over(self, seconds: float) -> None:
        if tasks := self._tasks():
            await asyncio.wait(tasks, timeout=seconds)

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [task for state in self._all for task in state.tasks]

    def _connections(self) -> list[Any]:
        return [each for state in self._all for each in state.connections]


class _Bounded(asyncio.Protocol):
    """A connection that breaks off when its client takes nothing of what is sent to it for long."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    _stalled: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self.go_on()
        super().connection_lost(exc)

    def go_on(self) -> None:
        """Wait no longer for the client to read."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None


class HttpConnection(_Bounded, StrictProtocol):
    """An HTTP connection. A head that is too long or too slow ends it."""

    def __init__(self, config: uvicorn.Config, state: ServerState, connections: Connections) -> None:
        super().__init__(config, state, {})
        self._all = connections
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = True
        self._begins_here = False
        """Whether the head began in the bytes that are just read."""
        self.ws_protocol_class = partial(SocketConnection, connections=connections)  # type: ignore[assignment]

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.client = peer_of(transport) or self.client
        if not _is_local(self) and self._all.is_full and not self._all.make_room():
            self.refuse(503, "too_many_calls", "the server has no room for more connections", "retry-after: 1")
            return
        self._all.note(self, idle=True)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._begins_here = False
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        end = data.rfind(b"\r\n\r\n") if self._begins_here else -1  # of the head before, if it came with this one
        self._head_bytes += len(data) - (end + 4 if end >= 0 else 0)
        if self._head_bytes > MAX_HEAD:
            self.refuse(431, "too_large", "the head of the request is too long")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._begins_here, self._head_bytes = True, True, 0
        self._await_head()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._cancel_timer()
        self._all.note(self, idle=False)
        if _size_of(self.headers) + len(self.url) <= MAX_HEAD:
            super().on_headers_complete()
        else:
            self.refuse(431, "too_large", "the head of the request is too long")

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._all.note(self, idle=not self.transport.is_closing())

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._all.note(self, idle=False)
        super().connection_lost(exc)

    def handle_websocket_upgrade(self) -> None:
        self._cancel_timer()
        self.go_on()
        if not self.transport.is_closing():  # it was not refused
            super().handle_websocket_upgrade()

    def _await_head(self) -> None:
        self._cancel_timer()
        late = 408, "too_slow", "the head of the request took too long"
        self._timer = self.loop.call_later(HEAD_S, self.refuse, *late)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def refuse(self, status: int, code: str, detail: str, *headers: str) -> None:
        self._cancel_timer()
        super().refuse(status, code, detail, *headers)


class SocketConnection(_Bounded, WebSocketsSansIOProtocol):
    """A WebSocket connection, whose peer on the unix socket is known too. One that is closed gives way to others, also
    if its client never says that it knows."""

    def __init__(self, *arguments: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.close_timeout = _ENDS_S
        self._all = connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.client = peer_of(transport) or self.client

    async def send(self, message: Any) -> None:
        await super().send(message)
        if self.close_sent and not self.transport.is_closing():
            self._all.note(self, idle=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.note(self, idle=False)
        super().connection_lost(exc)

    def keepalive_timeout(self) -> None:
        if not self.read_paused and self.writable.is_set():
            super().keepalive_timeout()
            return
        # the ping waits to be sent, or its answer lies behind what whoever is slow here has not read: no sign of death
        self.pong_timer = self.pending_ping_payload = None
        self.schedule_ping()


def peer_of(transport: Any) -> tuple[str, int] | None:
    """Whoever is at the other end of a unix socket, as `uid:NUMBER`; None on any other."""
    peer = transport.get_extra_info("socket")
    if peer is None or peer.family != socket.AF_UNIX:
        return None
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"uid:{uid}", 0


def _is_local(connection: HttpConnection | SocketConnection) -> bool:
    """Whether it came by the unix socket."""
    return connection.client is not None and connection.client[0].startswith("uid:")


def _room() -> int:
    """How many connections there may be at the most, so that half of the files that may be open are for boxes."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if files == resource.RLIM_INFINITY else files // 2


def _size_of(headers: list[tuple[bytes, bytes]] | None) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers or ())
