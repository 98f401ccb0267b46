"""WebSockets between browsers and boxes: opened with the box first, then message by message, so that only what is a
message goes through."""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
import secrets
from hashlib import sha1

from starlette.types import Receive, Send
from websockets.frames import Frame, Opcode
from websockets.protocol import CLIENT, OPEN, Protocol

from skerry.aio import end
from skerry.errors import SkerryError
from skerry.gate.base import Duplex, Unreachable
from skerry.gate.http1 import Answer, Head, Malformed, Reader
from skerry.gate.relay import LINGER_S
from skerry.surfaces.ports.exchange import Limits, content_of, is_known, read_answer, strict_body_of, turned_by
from skerry.surfaces.ports.headers import Pairs, from_box
from skerry.surfaces.ports.places import Turned

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_REFUSAL = 64 * 1024
_NONE = 1005
_LOST = 1006
_FAILED = 1011
_log = logging.getLogger("skerry.server.ports")
_log.setLevel(logging.INFO)  # else each frame has a line


class Relay:
    """One WebSocket of a client, and the one of ours to the box."""

    def __init__(self, target: str, headers: Pairs, box: Duplex, receive: Receive, send: Send, limits: Limits) -> None:
        """`headers` are as the box is to get them; those of the handshake are made anew."""
        self._target = target
        self._headers = [(name, value) for name, value in headers if not _is_handshake(name)]
        self._offered = [word.strip() for name, value in headers if name == _PROTOCOL for word in value.split(",")]
        self._box = box
        self._receive = receive
        self._send = send
        self._limits = limits
        self._frames = Protocol(CLIENT, state=OPEN, max_size=limits.message, logger=_log)
        self._writing = asyncio.Lock()
        self._parts: list[bytes] = []
        self._is_text = False
        self.is_answered = False

    async def run(self) -> None:
        """Open it and carry messages to its end. Raises Turned while the client has no answer."""
        reader = Reader(self._box)
        try:
            answer = await self._open(reader)
            if answer.status != 101:
                await self._refuse(answer, reader)
                return
            headers = [(name, value) for name, value in from_box(answer) if not _is_handshake(name) and name != "date"]
            accept = {"type": "websocket.accept", "subprotocol": self._chosen(answer)}
            self.is_answered = True
            encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
            await self._send({**accept, "headers": encoded})
        except (SkerryError, Malformed, Unreachable, TimeoutError) as error:
            raise turned_by(error) from error
        finally:
            if not self.is_answered:
                await reader.close()
        self._box = reader.rest()
        await self._carry()

    async def _open(self, reader: Reader) -> Answer:
        key = base64.b64encode(secrets.token_bytes(16))
        handshake = [("connection", "Upgrade"), ("upgrade", "websocket"), ("sec-websocket-version", "13")]
        handshake.append(("sec-websocket-key", key.decode()))
        offered = [(_PROTOCOL, ", ".join(self._offered))] if self._offered else []
        head = Head(first=f"GET {self._target} HTTP/1.1", headers=[*self._headers, *handshake, *offered])
        await self._box.write(head.encode())
        answer = await read_answer(reader, self._limits)
        if answer.status == 101:
            expected = base64.b64encode(sha1(key + _GUID).digest()).decode()
            accepts = answer.all("sec-websocket-accept")
            is_ours = len(accepts) == 1 and hmac.compare_digest(accepts[0].encode(), expected.encode())
            if not is_ours or answer.words("upgrade") != ["websocket"] or answer.all("sec-websocket-extensions"):
                raise Turned(502, "The app does not open a WebSocket as it has to.")
        return answer

    def _chosen(self, answer: Answer) -> str | None:
        chosen = answer.all(_PROTOCOL)
        if not chosen:
            return None
        if len(chosen) > 1 or chosen[0] not in self._offered:
            raise Turned(502, "The app speaks a protocol that the client did not offer.")
        return chosen[0]

    async def _refuse(self, answer: Answer, reader: Reader) -> None:
        """Hand on that the app wants no WebSocket."""
        if not is_known(answer.status):
            raise Turned(502, "The app does not answer as HTTP/1.1 does.")
        body = bytearray()
        async for data in content_of(reader, strict_body_of(answer, "GET"), self._limits.head_s):
            body += data
            if len(body) > _MAX_REFUSAL:
                raise Turned(502, "The app's answer is too large.")
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in from_box(answer)]
        kind = "websocket.http.response"
        await self._send({"type": f"{kind}.start", "status": answer.status, "headers": headers})
        await self._send({"type": f"{kind}.body", "body": bytes(body)})

    async def _carry(self) -> None:
        up, down = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if not down.done():  # the box may answer to the client's end
                await asyncio.wait((down,), timeout=LINGER_S)
        finally:
            await end(up, down)
            await self._box.close()

    async def _up(self) -> None:
        """Messages of the client to the box, until the client ends it, or the box does not take them."""
        while self._frames.state is OPEN:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code", _NONE)
                if code == _LOST or self._frames.state is not OPEN:
                    return
                self._frames.send_close(None if code == _NONE else code, message.get("reason") or "")
            elif message.get("text") is not None:
                self._frames.send_text(message["text"].encode())
            else:
                self._frames.send_binary(message["bytes"])
            await self._flush()

    async def _down(self) -> None:
        """Messages of the box to the client, and at its end the reason."""
        code, reason = _FAILED, "the sandbox broke the connection"
        try:
            while self._frames.state is OPEN:
                data = await self._box.read()
                self._frames.receive_data(data) if data else self._frames.receive_eof()
                for frame in self._frames.events_received():
                    assert isinstance(frame, Frame)
                    await self._hand_on(frame)
                await self._flush()
            told = self._frames.close_rcvd
            if told is not None and self._frames.parser_exc is None:
                code, reason = (told.code, told.reason) if told.code != _NONE else (1000, "")
        except (SkerryError, TimeoutError, UnicodeDecodeError, OSError) as error:
            _log.debug("a WebSocket to a sandbox ended: %s", error)
        await self._put({"type": "websocket.close", "code": code, "reason": reason})

    async def _hand_on(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._is_text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return
        self._parts.append(bytes(frame.data))
        if len(self._parts) > _MOST_PARTS:
            self._parts = [b"".join(self._parts)]
        if not frame.fin:
            return
        data, self._parts = b"".join(self._parts), []
        await self._put({"type": "websocket.send", **({"text": data.decode()} if self._is_text else {"bytes": data})})

    async def _put(self, message: dict[str, object]) -> None:
        async with asyncio.timeout(self._limits.idle_s):
            await self._send(message)

    async def _flush(self) -> None:
        """Write what is to be written to the box: messages, and what the protocol itself says."""
        async with self._writing, asyncio.timeout(self._limits.idle_s):
            for data in self._frames.data_to_send():
                if data:
                    await self._box.write(data)


_PROTOCOL = "sec-websocket-protocol"
_MOST_PARTS = 1024
"""A message may come in very many frames, even empty ones."""


def _is_handshake(name: str) -> bool:
    return name.startswith("sec-websocket-")
