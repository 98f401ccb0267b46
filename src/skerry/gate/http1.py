"""HTTP/1 between a box and a server: requests in the one form that no two programs read differently, one after the
other, and their answers."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from skerry.aio import end
from skerry.gate.base import Duplex, Late, Refused, Unreachable
from skerry.gate.decide import host_of, shown
from skerry.gate.relay import LINGER_S, Ahead, carry, last_word

MAX_HEAD = 64 * 1024
MAX_HEADERS = 100
_MAX_LINE = 4096
_REQUEST_LINE = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([!-~]+) HTTP/1\.([01])")
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: .*)?")
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t -~\x80-\xff]*)")
_LENGTH = re.compile(r"[0-9]{1,18}")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t -~\x80-\xff]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,5})[ \t]{0,9}(?:;[\t -~\x80-\xff]{0,999})?\r\n")
_AUTHORITY = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9A-Za-z_.-]+))(?::([0-9]{1,5}))?")
_NO_BODY = (204, 304)
_MOST_INTERIM = 256
"""Answers of a server before the one that counts."""
_REASONS = {400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 502: "Bad Gateway", 504: "Gateway Timeout"}
_DROPPED = ("connection", "keep-alive", "proxy-connection", "proxy-authorization", "te", "upgrade")
"""Headers that are for the next program only; what `Connection` names is dropped too."""
_NEEDED = {"host", "content-length", "transfer-encoding"}

Change = Callable[[bytes], bytes]


class Malformed(Refused):
    """A request that could be read in more than one way, or in none."""


class Slow(Malformed):
    """A request that does not come to its end."""


class Body(msgspec.Struct, frozen=True):
    """How long a body is: so many bytes, in chunks that tell, or to the end of the connection."""

    length: int = 0
    is_chunked: bool = False
    is_open: bool = False


class Head(msgspec.Struct, kw_only=True):
    """First line and headers of a message, without the rest."""

    first: str
    headers: list[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        """The values of a header."""
        return [value for each, value in self.headers if each.lower() == name]

    def words(self, name: str) -> list[str]:
        """The values of a header that is a list, in lower case."""
        return [word.strip().lower() for value in self.all(name) for word in value.split(",") if word.strip()]

    def drop(self, *names: str) -> None:
        """Leave headers out."""
        self.headers = [(name, value) for name, value in self.headers if name.lower() not in names]

    def encode(self) -> bytes:
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class Request(Head, kw_only=True):
    method: str
    target: str
    is_last: bool
    """Whether nothing follows it on its connection."""
    body: Body = Body()
    is_answered: bool = False
    """Whether something of an answer was sent."""

    @property
    def is_upgrade(self) -> bool:
        """Whether it asks for a WebSocket."""
        return "upgrade" in self.words("connection") and self.words("upgrade") == ["websocket"]

    def stay(self) -> None:
        """Ask for no protocol but a WebSocket: in others a host may be meant that is not seen."""
        if self.all("upgrade") and not self.is_upgrade:
            self.drop("upgrade", "http2-settings", "connection")
            if self.is_last:
                self.headers.append(("Connection", "close"))

    def send_to(self, target: str) -> None:
        """Ask for another target."""
        self.target = target
        self.first = f"{self.method} {target} {self.first.rpartition(' ')[2]}"

    def forward_once(self, host: str) -> None:
        """Make it a request of ours: to that host, the only one on its connection, without what was meant for us."""
        self.drop("host", *_DROPPED, *self.words("connection"))
        self.headers = [("Host", host), *self.headers, ("Connection", "close")]
        self.is_last = True


class Answer(Head, kw_only=True):
    status: int
    is_last: bool


class Reader:
    """The messages of one side."""

    def __init__(self, source: Duplex, first: bytes = b"", ahead: asyncio.Task[bytes] | None = None) -> None:
        """`ahead` is a read that was begun."""
        self.source = source
        self._kept = bytearray(first)
        """Read and not used yet; of many short messages in it each is taken off its beginning, and nothing is moved."""
        self._ahead = ahead

    @property
    def is_ahead(self) -> bool:
        """Whether something of the next message was read already."""
        return bool(self._kept)

    def rest(self) -> Duplex:
        """The connection itself, with what was read ahead."""
        return Ahead(self.source, bytes(self._kept), self._ahead)

    def look_ahead(self) -> asyncio.Task[bytes]:
        """The next read, begun already; whoever reads next gets what it brings."""
        if self._ahead is None:
            self._ahead = asyncio.create_task(self.source.read())
        return self._ahead

    async def close(self) -> None:
        """Give up a read that was begun. The connection stays."""
        if self._ahead is not None:
            await end(self._ahead)

    async def _read(self) -> bytes:
        ahead, self._ahead = self._ahead, None
        return await (self.source.read() if ahead is None else ahead)

    async def head(self, timeout_s: float | None) -> bytes | None:
        """First line and headers; None at the end of the connection. Once begun they have to come in time, if there is
        one. Raises Malformed or Slow."""
        if not self._kept:
            self._kept += await self._read()
            if not self._kept:
                return None
        try:
            async with asyncio.timeout(timeout_s):
                return await self._until(b"\r\n\r\n", MAX_HEAD)
        except TimeoutError:
            raise Slow("the request did not come to its end in time") from None

    async def _until(self, mark: bytes, most: int) -> bytes:
        """All up to a mark, and that. Raises Malformed."""
        kept, at = self._kept, 0
        while (found := kept.find(mark, at)) < 0 and len(kept) < most:
            at = max(0, len(kept) - len(mark) + 1)
            piece = await self._read()
            if not piece:
                raise Malformed("it was cut short")
            kept += piece
        if not 0 <= found <= most:
            raise Malformed(f"a head of more than {most} bytes")
        return self._take(found + len(mark))

    def _take(self, count: int) -> bytes:
        taken = bytes(memoryview(self._kept)[:count])
        del self._kept[:count]
        return taken

    async def copy(self, body: Body, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Hand a body on, as it is on the wire. Raises Malformed."""
        async for piece in self.pieces(body):
            await write(piece)

    async def pieces(self, body: Body) -> AsyncIterator[bytes]:
        """A body as it is on the wire, piece by piece. Raises Malformed."""
        left, chunks = body.length, _Chunks()
        while body.is_open or (left if not body.is_chunked else not chunks.is_over):
            most = len(self._kept) if body.is_open or body.is_chunked else min(left, len(self._kept))
            piece = self._take(most) or await self._read()
            if not piece:
                if body.is_open:
                    return
                raise Malformed("it was cut short")
            count = len(piece)
            if body.is_chunked:
                count = chunks.take(piece)
            elif not body.is_open:
                count = min(left, count)
                left -= count
            if count < len(piece):
                self._kept += piece[count:]
                piece = piece[:count]
            yield piece


class _Chunks:
    """Where a body in chunks ends."""

    def __init__(self) -> None:
        self.is_over = False
        self._left = 0
        self._line = b""
        self._take_line = self._take_size
        self._trailers = 0

    def take(self, data: bytes) -> int:
        """Take bytes, and tell how many of them are of the body. Raises Malformed."""
        at = 0
        while at < len(data) and not self.is_over:
            if not self._line and self._take_line == self._take_size:
                at = _skip_chunks(data, at)
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            end_of_line = data.find(b"\n", at, at + _MAX_LINE) + 1
            self._line += data[at : end_of_line or at + _MAX_LINE]
            at = end_of_line or min(at + _MAX_LINE, len(data))
            if len(self._line) > _MAX_LINE or (end_of_line and not self._line.endswith(b"\r\n")):
                raise Malformed("a line in the body that is too long, or does not end as lines do")
            if end_of_line:
                line, self._line = self._line[:-2], b""
                self._take_line(line)
        return at

    def _take_size(self, line: bytes) -> None:
        size = _CHUNK_LINE.fullmatch(line)
        if size is None:
            raise Malformed("a chunk without a length")
        self._left = int(size[1], 16)
        self._take_line = self._take_end if self._left else self._take_trailer

    def _take_end(self, line: bytes) -> None:
        if line:
            raise Malformed("a chunk that is longer than it says")
        self._take_line = self._take_size

    def _take_trailer(self, line: bytes) -> None:
        self.is_over = not line
        self._trailers += 1
        if self._trailers > MAX_HEADERS or (line and not _HEADER.fullmatch(line.decode("latin-1"))):
            raise Malformed("a trailer that is no header, or too many")


def _skip_chunks(data: bytes, at: int) -> int:
    """Where the chunks end that are whole, but for the last: of very small ones there may be very many."""
    while (found := _CHUNK.match(data, at)) and (size := int(found[1], 16)):
        end_of_data = found.end() + size
        if data[end_of_data : end_of_data + 2] != b"\r\n":
            break
        at = end_of_data + 2
    return at


def parse_request(data: bytes) -> Request:
    """A request from its first line and headers, all of them. Raises Malformed for all that is not in the one form."""
    first, headers = _lines(data)
    line = _REQUEST_LINE.fullmatch(first)
    if line is None:
        raise Malformed(f"{shown(first)!r} is no first line of a request")
    request = Request(first=first, headers=headers, method=line[1], target=line[2], is_last=line[3] == "0")
    if "close" in request.words("connection"):
        request.is_last = True
    lengths, codings = request.all("content-length"), request.all("transfer-encoding")
    if len(request.all("host")) > 1 or len(lengths) > 1 or len(codings) > 1 or (lengths and codings):
        raise Malformed("a request has one host and one length")
    if _NEEDED.intersection(request.words("connection")):
        raise Malformed("a request's host and length are for every program on its way")
    if lengths:
        if not _LENGTH.fullmatch(lengths[0]):
            raise Malformed(f"{shown(lengths[0])!r} is no length")
        request.body = Body(length=int(lengths[0]))
    elif codings:
        if codings[0].lower() != "chunked" or line[3] == "0":
            raise Malformed(f"the transfer coding {shown(codings[0])!r}")
        request.body = Body(is_chunked=True)
    return request


def parse_answer(data: bytes) -> Answer:
    """An answer from its first line and headers. Raises Unreachable."""
    try:
        first, headers = _lines(data)
    except Malformed as error:
        raise Unreachable(f"the server does not answer as HTTP/1.1 does: {error}") from None
    line = _STATUS_LINE.fullmatch(first)
    if line is None:
        raise Unreachable("the server does not answer as HTTP/1.1 does")
    answer = Answer(first=first, headers=headers, status=int(line[2]), is_last=line[1] == "0")
    if "close" in answer.words("connection"):
        answer.is_last = True
    return answer


def body_of(answer: Answer, method: str) -> Body:
    """How long the body of an answer is. Raises Unreachable where that cannot be told."""
    if method == "HEAD" or answer.status in _NO_BODY or answer.status < 200:
        return Body()
    codings, lengths = answer.words("transfer-encoding"), set(answer.all("content-length"))
    if codings:
        return Body(is_chunked=True) if codings[-1] == "chunked" and not lengths else Body(is_open=True)
    if not lengths:
        return Body(is_open=True)
    length = lengths.pop()
    if lengths or not _LENGTH.fullmatch(length):
        raise Unreachable("the server's answer has no clear length")
    return Body(length=int(length))


def authority_of(text: str) -> tuple[str, int | None]:
    """Host, in its one spelling, and port of `HOST`, `HOST:PORT` or `[IPV6]:PORT`. Raises Malformed or Refused."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        raise Malformed(f"{shown(text)!r} is no host")
    port = None if found[3] is None else int(found[3])
    if port is not None and not 0 < port < 65536:
        raise Malformed(f"{port} is no port")
    if found[1] is not None and ":" not in found[1]:
        raise Malformed(f"{shown(text)!r} is no host")
    return host_of(found[1] or found[2]), port


async def exchange(request: Request, client: Reader, server: Reader, change: Change = bytes) -> bool:
    """Send one request on and its answer back, its head as `change` makes it; False if nothing can follow. Raises
    Refused while nothing of an answer was sent; what breaks later is an OSError."""
    try:
        await server.source.write(request.encode())
    except OSError as error:
        raise Unreachable("the server closed the connection without an answer") from error
    try:
        if request.body == Body():
            return await _answer(request, client, server, change)
        return await _answer_meanwhile(request, client, server, change)
    except Refused as error:
        if request.is_answered:
            raise ConnectionAbortedError(errno.ECONNABORTED, str(error)) from error
        raise


async def _answer_meanwhile(request: Request, client: Reader, server: Reader, change: Change) -> bool:
    """Send the answer to a request back while its body is sent on."""
    sending = asyncio.create_task(client.copy(request.body, server.source.write))
    answering = asyncio.create_task(_answer(request, client, server, change))
    try:
        await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
        if sending.done() and not isinstance(sending.exception(), OSError):  # a server may answer before it has all
            sending.result()
        can_follow = await answering
        if not sending.done():  # the client may learn of its answer before the connection ends
            await asyncio.wait((sending,), timeout=LINGER_S)
        return can_follow and sending.done() and sending.exception() is None
    finally:
        await end(sending, answering)


async def _answer(request: Request, client: Reader, server: Reader, change: Change) -> bool:
    interim = 0
    while True:
        try:
            head = await server.head(None)
        except Malformed as error:
            raise Unreachable(f"the server does not answer as HTTP/1.1 does: {error}") from error
        if head is None:
            raise Unreachable("the server closed the connection without an answer")
        answer = parse_answer(head)
        body = body_of(answer, request.method)
        if answer.status == 101 and not request.is_upgrade:
            raise Unreachable("the server changed the protocol, which nobody had asked for")
        request.is_answered = True
        head = change(head)
        if answer.status >= 200:
            break
        interim += 1
        if interim > _MOST_INTERIM:
            raise Unreachable("the server says again and again that it will answer, and does not")
        await client.source.write(head)
        if answer.status == 101:
            await carry(client.rest(), server.rest())
            return False
    if server.is_ahead and body != Body():  # both in one piece, as they came
        async for piece in server.pieces(body):
            await client.source.write(head + piece)
            head = b""
    else:
        await client.source.write(head)
        await server.copy(body, client.source.write)
    return not (request.is_last or answer.is_last or body.is_open)


_STATUSES = ((Slow, 408), (Malformed, 400), (Late, 504), (Unreachable, 502), (Refused, 403))


async def answer_error(client: Duplex, error: Refused) -> None:
    """Tell a client why its request was not sent on, and that nothing follows."""
    status = next(status for kind, status in _STATUSES if isinstance(error, kind))
    text = f"{error}\n".encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    await last_word(client, f"{head}Content-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode() + text)


def _lines(data: bytes) -> tuple[str, list[tuple[str, str]]]:
    """First line and headers. Raises Malformed."""
    first, *lines = data.removesuffix(b"\r\n\r\n").decode("latin-1").split("\r\n")
    if len(lines) > MAX_HEADERS:
        raise Malformed(f"more than {MAX_HEADERS} headers")
    found = [_HEADER.fullmatch(line) for line in lines]
    headers = [(header[1], header[2].strip(" \t")) for header in found if header is not None]
    if len(headers) < len(lines):
        raise Malformed("a header that is none: a name, a colon, and a value on one line")
    return first, headers
