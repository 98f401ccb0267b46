"""The stream of an agent over a WebSocket: a client elsewhere speaks its protocol, and the server stands between.

Binary frames are the bytes of `agent/PROTOCOL.md`, cut anywhere. Each call is looked at: it needs its scope, it is told
in the ledger as if it were made here, and it goes to the agent as a call of the server's own. So the client has neither
the agent's token nor any method that is the manager's, and what the box says was checked before it is passed on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.agent.call import WINDOW
from skerry.agent.client import MAX_ATTACHMENT, MAX_LINE, NO_METHOD, PROTOCOL
from skerry.aio import end, run_to_end
from skerry.errors import AgentError, AgentProtocolError, InvalidSpec, LimitReached, NotPermitted, SkerryError
from skerry.ledger.facts import Command
from skerry.ledger.ledger import Ledger
from skerry.model.records import Cause
from skerry.model.tenants import Principal, Scope
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.rest.agent_calls import KINDS
from skerry.surfaces.rest.relayed_call import RelayedCall
from skerry.surfaces.rest.route import Call, Routes, accept
from skerry.version import __version__

routes = Routes("agent")
_log = logging.getLogger("skerry.server")
_MAX_CALLS = 256
"""The most calls of a stream that are open at once."""
_MAX_WAITING = 64 << 20
"""Bytes of a stream that wait for their processes; with more than that on their way, the client is not read."""
_MAX_STARTED = 1024
_BROKEN = 4400
"""Code of a stream that ends because the client broke the protocol."""
_encode = msgspec.json.Encoder().encode


class AgentQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose agent it is."""

    user: str | None = None
    """User of the box whose commands these are, where a call names none."""
    leash: bool = False
    """End the sandbox when this stream ends, however that comes; it lives on if the server ends first."""


class _Frame(msgspec.Struct):
    """Line of a client."""

    method: str
    id: int | None = None
    params: dict[str, Any] = {}
    bytes: int = 0


_decode = msgspec.json.Decoder(_Frame).decode


@routes.websocket("/sandboxes/{id}/agent", Scope.READ)
async def agent(call: Call, socket: WebSocket, id: str, query: AgentQuery) -> None:
    """Speak the agent's protocol: binary frames are its bytes, cut anywhere. Each method needs the scope that a call of
    the API needs which does the same; those that are the server's own are refused."""
    handles = call.manager.handles
    sandbox = AsyncSandbox.of_record(await handles.live_record(id), handles)
    if query.leash and not call.principal.may(Scope.DESTROY):
        raise NotPermitted(f"a leash needs the scope {Scope.DESTROY}, which the token does not have")
    try:
        await sandbox.connection.connect()
        await accept(socket)
        relay = Relay(sandbox, handles.ledger, call.principal, socket.send_bytes, user=query.user)
        try:
            await relay.serve(socket.receive)
        except AgentProtocolError as error:
            _log.info("request %s: a client broke the agent's protocol: %s", call.id, error)
            await socket.close(_BROKEN, f"{error.code}: {error}"[:120])
        finally:
            await run_to_end(relay.aclose())
            if query.leash and not call.server.is_draining.is_set():
                await run_to_end(handles.destroy(sandbox.id, cause=Cause.OWNER_DIED))
    finally:
        await sandbox.close()


class Relay:
    """One stream: the frames of a client, and its open calls."""

    def __init__(
        self,
        sandbox: AsyncSandbox,
        ledger: Ledger,
        principal: Principal,
        send: Callable[[bytes], Awaitable[None]],
        *,
        user: str | None = None,
    ) -> None:
        """`sandbox` is a handle of the relay's own, with a stream of its own."""
        self.sandbox = sandbox
        self.ledger = ledger
        self.user = user
        self.started: dict[int, Command] = {}
        """What the ledger has of background processes, by their numbers, until their ends are known."""
        self.ports: set[int] = set()
        """Ports that were told in the ledger."""
        self._principal = principal
        self._socket_send = send
        self._calls: dict[int, RelayedCall] = {}
        self._waiting = 0
        self._taken = asyncio.Event()

    async def serve(self, receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Until the client goes. Raises AgentProtocolError for what is no frame of the protocol."""
        frames = Frames()
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                return
            data = message.get("bytes")
            if data is None:
                raise AgentProtocolError("a text frame, where only bytes go")
            for frame, attachment in frames.feed(data):
                await self._take(frame, attachment)
            while self._waiting > _MAX_WAITING:
                self._taken.clear()
                await self._taken.wait()

    async def aclose(self) -> None:
        """End all that is open, as the loss of a stream does."""
        await end(*(each.task for each in self._calls.values()))

    async def _take(self, frame: _Frame, attachment: bytes) -> None:
        if frame.id is None:
            self._notice(frame.method, frame.params, attachment)
            return
        if frame.id in self._calls:
            raise AgentProtocolError("the id of a request is that of another")
        if frame.method == "hello":
            await self.answer(frame.id, {"protocol": PROTOCOL, "agent": __version__, "pid": 1, "started": time.time()})
            return
        try:
            self._calls[frame.id] = self._open(frame.id, frame.method, frame.params, attachment)
        except SkerryError as error:
            await self.refuse(frame.id, error)

    def _open(self, id: int, method: str, params: dict[str, Any], attachment: bytes) -> RelayedCall:
        """Begin a call. Raises NotPermitted, AgentError for a method that is not for clients, LimitReached, and
        InvalidSpec."""
        kind = KINDS.get(method)
        if kind is None:
            unknown = AgentError(f"{method[:64]!r} is no method for clients of a server")
            unknown.rpc_code = NO_METHOD
            raise unknown
        if not self._principal.may(kind.scope):
            raise NotPermitted(f"{method} needs the scope {kind.scope}, which the token does not have")
        if len(self._calls) >= _MAX_CALLS:
            raise LimitReached(f"{_MAX_CALLS} calls of this stream are open: end some")
        window = params.pop("window", WINDOW)
        if not isinstance(window, int) or not 0 < window <= WINDOW:
            raise InvalidSpec(f"window: it must be 1 to {WINDOW}", field="window")
        return kind(self, id, method, params, attachment, window)

    def _notice(self, method: str, params: dict[str, Any], attachment: bytes) -> None:
        """Pass on what a client says of a call; quiet if that has ended meanwhile, as the client may not know yet."""
        id, count = params.get("id"), params.get("bytes", 0)
        call = self._calls.get(id) if isinstance(id, int) else None
        if method not in ("data", "end", "credit", "cancel"):
            return
        if attachment and method != "data":
            raise AgentProtocolError(f"{method} with an attachment")
        if call is None:
            return
        if method == "data":
            call.feed(attachment)
        elif method == "end":
            call.feed(None)
        elif method == "cancel":
            call.cancel()
        elif not isinstance(count, int) or not call.credit(count):
            raise AgentProtocolError("credit for bytes that were never sent")

    # for calls

    def find(self, id: object) -> RelayedCall | None:
        """An open call by the id that the client gave it."""
        return self._calls.get(id) if isinstance(id, int) else None

    def has_started(self, process: int, told: Command) -> None:
        """Keep what the ledger has of a background process, until its end is known or there are too many."""
        self.started[process] = told
        if len(self.started) > _MAX_STARTED:
            del self.started[next(iter(self.started))]

    def ended(self, id: int) -> None:
        self._calls.pop(id, None)

    def waits(self, count: int) -> None:
        """Count bytes that came for a process, or below zero those that went to it."""
        self._waiting += count
        if count < 0:
            self._taken.set()

    async def notify(self, method: str, params: dict[str, Any], attachment: bytes | memoryview = b"") -> None:
        message: dict[str, Any] = {"method": method, "params": params}
        if attachment:
            message["bytes"] = len(attachment)
        await self._send(b"".join((_encode(message), b"\n", attachment)))

    async def _send(self, data: bytes) -> None:
        """Send to the client; quiet if it has gone, which `serve` hears too."""
        with suppress(WebSocketDisconnect, RuntimeError):
            await self._socket_send(data)

    async def answer(self, id: int, result: Any) -> None:
        await self._send(_encode({"jsonrpc": "2.0", "id": id, "result": result}) + b"\n")

    async def refuse(self, id: int, error: SkerryError) -> None:
        """Answer with an error, which the client knows by its code."""
        data = {"code": error.code, "field": getattr(error, "field", None)}
        told = {"code": error.rpc_code or -32000, "message": error.message[:4096], "data": data}
        await self._send(_encode({"jsonrpc": "2.0", "id": id, "error": told}) + b"\n")


class Frames:
    """Bytes of a client, cut into lines with their attachments, in bounded memory."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._searched = 0
        self._frame: _Frame | None = None

    def feed(self, data: bytes) -> Iterator[tuple[_Frame, bytes]]:
        """The frames that are whole now. Raises AgentProtocolError."""
        self._kept += data
        while True:
            if self._frame is None and not self._read_line():
                return
            frame = self._frame
            assert frame is not None
            if len(self._kept) < frame.bytes:
                return
            attachment = bytes(self._kept[: frame.bytes])
            del self._kept[: frame.bytes]
            self._frame = None
            yield frame, attachment

    def _read_line(self) -> bool:
        end = self._kept.find(b"\n", self._searched)
        if (len(self._kept) if end < 0 else end) > MAX_LINE:
            raise AgentProtocolError("a line is too long")
        if end < 0:
            self._searched = len(self._kept)
            return False
        try:
            frame = _decode(self._kept[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise AgentProtocolError(f"a line is not a frame: {error}") from None
        if not 0 <= frame.bytes <= MAX_ATTACHMENT:
            raise AgentProtocolError("an attachment is too long")
        del self._kept[: end + 1]
        self._searched = 0
        self._frame = frame
        return True
