"""Exchange of one request and its answer with a box, whose every byte may be meant to harm.

The request is written anew from its parsed parts, on a connection of its own. The answer is read strictly, and written
anew by the server: nothing of its framing goes through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from http import HTTPStatus

import msgspec
from starlette.types import Message, Receive, Scope, Send

from skerry.aio import end
from skerry.errors import CallTimeout, NotFound, SandboxGone, SkerryError, WrongState
from skerry.gate.base import Duplex, Unreachable
from skerry.gate.http1 import Answer, Body, Head, Malformed, Reader, Slow, body_of, parse_answer
from skerry.gate.relay import LINGER_S
from skerry.surfaces.ports.headers import Pairs, from_box
from skerry.surfaces.ports.places import Turned

_MOST_INTERIM = 16
_CUT_S = 10.0
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_PHRASES = {status.value for status in HTTPStatus}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one request may take of the server."""

    answer_s: float = 300.0
    """Until an answer begins, counted from the last bytes of the request."""
    head_s: float = 30.0
    """From the first byte of an answer's head to its last."""
    idle_s: float = 600.0
    """Without a byte of a body, either way."""
    message: int = 4 << 20
    """The most bytes of a WebSocket message from a box."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the box is to get it."""

    method: str
    target: str
    headers: Pairs
    body: Body

    def encode(self) -> bytes:
        headers = [*self.headers, ("connection", "close")]
        if self.body.is_chunked:
            headers.append(("transfer-encoding", "chunked"))
        elif self.body.length or self.method in _WITH_BODY:
            headers.append(("content-length", str(self.body.length)))
        return Head(first=f"{self.method} {self.target} HTTP/1.1", headers=headers).encode()


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """One request over a connection to the box."""

    def __init__(self, asked: Asked, box: Duplex, receive: Receive, send: Send, limits: Limits) -> None:
        self._asked = asked
        self._box = box
        self._reader = Reader(box)
        self._receive = receive
        self._send = send
        self._limits = limits
        self._waiting: asyncio.Timeout | None = None
        self._is_sent = False
        self.is_answered = False
        """Whether something of an answer was sent."""

    async def run(self) -> None:
        """Send the request on and its answer back. Raises Turned while nothing of an answer was sent, and ClientGone;
        what breaks later is a ConnectionError."""
        sending, answering = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        try:
            await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and isinstance(error := sending.exception(), ClientGone | Turned):
                raise error
            await answering  # a box may answer before it has all
            await self._finish(sending)
        except (SkerryError, Malformed, Unreachable, TimeoutError) as error:
            turned = turned_by(error)
            if self.is_answered:
                raise ConnectionAbortedError(turned.text) from error
            raise turned from error
        finally:
            await end(sending, answering)
            await self._reader.close()

    async def _up(self) -> None:
        """Send the request, then see whether the client goes. Raises ClientGone, and Turned for a body that is not as
        long as it says."""
        body = self._asked.body
        left = body.length
        await self._write(self._asked.encode())
        while True:
            async with asyncio.timeout(None if self._is_sent else self._limits.idle_s):
                message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            data: bytes = message.get("body", b"")
            is_last = not message.get("more_body", False)
            if self._is_sent:
                continue
            if not body.is_chunked:
                left -= len(data)
                if left < 0 or (is_last and left):
                    raise Turned(400, "The body is not as long as the request says.")
            await self._write(_framed(data, body, is_last=is_last))
            self._is_sent = is_last

    async def _write(self, data: bytes) -> None:
        if data:
            async with asyncio.timeout(self._limits.idle_s):
                await self._box.write(data)
        if self._waiting is not None and not self._waiting.expired():
            self._waiting.reschedule(asyncio.get_running_loop().time() + self._limits.answer_s)

    async def _down(self) -> None:
        answer = await read_answer(self._reader, self._limits, self._wait)
        if answer.status == 101:
            raise Turned(502, "The app changed the protocol, which nobody had asked for.")
        body = strict_body_of(answer, self._asked.method)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in from_box(answer)]
        lengths = answer.all("content-length")
        if lengths and answer.status not in (204, 304) and not body.is_chunked:
            headers.append((b"content-length", lengths[0].encode()))
        if not self._is_sent:  # what is left of the request is read by nobody
            headers.append((b"connection", b"close"))
        await self._put({"type": "http.response.start", "status": answer.status, "headers": headers})
        self.is_answered = True
        async for data in content_of(self._reader, body, self._limits.idle_s):
            await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def _finish(self, sending: asyncio.Task[None]) -> None:
        """End the answer. A client that still sends is heard for a moment: it would lose the answer if its connection
        were closed with bytes that nobody has read."""
        if not self._is_sent:
            await end(sending)
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    while (await self._receive()).get("more_body"):
                        pass
        await self._put({"type": "http.response.body", "body": b""})

    def _wait(self, deadline: asyncio.Timeout | None) -> None:
        self._waiting = deadline

    async def _put(self, message: Message) -> None:
        """Send to the client, who may read slowly, but not stop."""
        try:
            async with asyncio.timeout(self._limits.idle_s):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None


async def read_answer(
    reader: Reader, limits: Limits, on_wait: Callable[[asyncio.Timeout | None], None] = lambda _: None
) -> Answer:
    """The head of an answer, after those that only say that there will be one. Raises Turned, Unreachable, TimeoutError
    or what the connection breaks with."""
    for _ in range(_MOST_INTERIM):
        async with asyncio.timeout(limits.answer_s) as deadline:
            on_wait(deadline)
            await asyncio.shield(reader.look_ahead()) if not reader.is_ahead else None
        on_wait(None)
        head = await reader.head(limits.head_s)
        if head is None:
            raise Turned(502, "The app closed the connection without an answer.")
        answer = parse_answer(head)
        if answer.status >= 200 or answer.status == 101:
            if answer.status >= 600:
                raise Turned(502, "The app does not answer as HTTP/1.1 does.")
            return answer
    raise Turned(502, "The app says again and again that it will answer, and does not.")


def strict_body_of(answer: Answer, method: str) -> Body:
    """How long the body of an answer is. Raises Turned for one that could be read in more than one way."""
    lengths, codings = answer.all("content-length"), answer.all("transfer-encoding")
    is_old = answer.first.startswith("HTTP/1.0")
    if len(lengths) + len(codings) > 1 or (codings and (is_old or codings[0].lower() != "chunked")):
        raise Turned(502, "The app's answer has no clear length.")
    body_of(answer, "GET")  # a length that is none is refused also where there is no body
    return body_of(answer, method)


async def content_of(reader: Reader, body: Body, idle_s: float) -> AsyncIterator[bytes]:
    """A body without its framing, as it comes. Raises Malformed, TimeoutError or what the connection breaks with."""
    unframe = _Unframe()
    pieces = reader.pieces(body)
    while True:
        async with asyncio.timeout(idle_s):
            piece = await anext(pieces, None)
        if piece is None:
            return
        if data := unframe.take(piece) if body.is_chunked else piece:
            yield data


class _Unframe:
    """The content of a body in chunks, whose framing was found to be right."""

    def __init__(self) -> None:
        self._left = 0
        self._line = b""
        self._is_over = False

    def take(self, piece: bytes) -> bytes:
        found, at = [], 0
        while at < len(piece) and not self._is_over:
            if self._left > 2:  # two more are the end of its line
                step = min(self._left - 2, len(piece) - at)
                found.append(piece[at : at + step])
            elif self._left:
                step = min(self._left, len(piece) - at)
            else:
                step = self._take_line(piece, at)
                at += step
                continue
            self._left -= step
            at += step
        return b"".join(found)

    def _take_line(self, piece: bytes, at: int) -> int:
        stop = piece.find(b"\n", at) + 1 or len(piece)
        self._line += piece[at:stop]
        if self._line.endswith(b"\n"):
            size = int(self._line.partition(b";")[0], 16)
            self._line, self._left, self._is_over = b"", size + 2, not size
        return stop - at


def _framed(data: bytes, body: Body, *, is_last: bool) -> bytes:
    if not body.is_chunked:
        return data
    chunk = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
    return chunk + (b"0\r\n\r\n" if is_last else b"")


def turned_by(error: Exception) -> Turned:
    """What is told to people of an error; nothing of the host is in it."""
    known: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int, str], ...] = (
        (SandboxGone, 410, "This sandbox has ended."),
        (NotFound, 502, "Nothing answers on this port of the sandbox. Is the app running, and on 127.0.0.1?"),
        (WrongState, 502, "This sandbox is stopped or paused."),
        ((Slow, TimeoutError, CallTimeout), 504, "The app did not answer in time."),
        (Malformed, 502, "The app's answer is cut short, too large, or not HTTP/1.1."),
        (Unreachable, 502, "The app does not answer as HTTP/1.1 does."),
    )
    for kind, status, text in known:
        if isinstance(error, kind):
            return Turned(status, text)
    return Turned(502, "The sandbox cannot be reached.")


async def cut(scope: Scope, receive: Receive) -> None:
    """Close the client's connection in the middle of an answer, so that it is seen to be no whole one."""
    transport = scope.get("skerry.transport")
    if transport is None:
        return
    transport.close()

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    with suppress(TimeoutError):
        async with asyncio.timeout(_CUT_S):
            await gone()
            return
    transport.abort()
    await gone()


def is_known(status: int) -> bool:
    return status in _PHRASES
