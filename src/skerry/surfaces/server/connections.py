"""Connections of a server: HTTP and WebSocket by uvicorn's protocols, with bounds on what a client may send and on how
long it may take, and with the uid of whoever is at the other end of the unix socket."""

from __future__ import annotations

import asyncio
import socket
import struct
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


class Connections:
    """All connections of a server, over its listeners."""

    def __init__(self, most: int) -> None:
        self.most = most
        """The most at a time on the network; those on the unix socket are not counted, so that admins always get in."""
        self._counted: list[ServerState] = []
        self._all: list[ServerState] = []

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
        return sum(len(state.connections) for state in self._counted) > self.most

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

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.client = peer_of(transport) or self.client
        if self._all.is_full and self.client is not None and not self.client[0].startswith("uid:"):
            self.refuse(503, "too_many_calls", "the server has no room for more connections", "retry-after: 1")
            return
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
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
    """A WebSocket connection, whose peer on the unix socket is known too."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.client = peer_of(transport) or self.client

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


def _size_of(headers: list[tuple[bytes, bytes]] | None) -> int:
    return sum(len(name) + len(value) + 4 for name, value in headers or ())
