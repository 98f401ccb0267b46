"""HTTP/1.1 as daemons on a unix socket or a port speak it: one connection a request, every wait with a deadline."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from skerry.agent.dial import connect_unix
from skerry.agent.stream import FdStream, Stream
from skerry.agent.tls import TlsStream

T = TypeVar("T")
Body = bytes | AsyncIterator[bytes]

_MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
"""What an answer that is taken whole may have; longer ones are streamed."""
_CHUNK = 1 << 16


class HttpError(Exception):
    """The other side does not answer, or not as HTTP."""


class NoAnswer(HttpError):
    """Nothing listens there, or nothing came by the deadline. What a request did is then unknown."""


class Answer(msgspec.Struct, frozen=True):
    """A status, headers in lower case, and a whole body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self, type: type[T]) -> T:
        try:
            return msgspec.json.decode(self.body or b"null", type=type, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise HttpError(f"an answer is not what was expected: {error}") from error


class _Connection:
    """Bytes out and in. Without TLS on the socket itself: what came before the other side closed is not lost."""

    def __init__(self, sock: socket.socket, tls: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None) -> None:
        self._sock = sock
        self._tls = tls
        self._kept = b""
        self._at = 0
        """How much of that was used."""
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        if self._tls is None:
            await self._loop.sock_sendall(self._sock, data)
        else:
            self._tls[1].write(data)
            await self._tls[1].drain()

    async def receive(self, most: int = _CHUNK) -> bytes:
        """Some bytes; none at the end."""
        if self._at >= len(self._kept):
            self._kept, self._at = await self._more(), 0
        data = self._kept[self._at : self._at + most]
        self._at += len(data)
        return data

    async def _more(self) -> bytes:
        if self._tls is None:
            return await self._loop.sock_recv(self._sock, _CHUNK)
        return await self._tls[0].read(_CHUNK)

    async def line(self, end: bytes) -> bytes:
        """All up to `end`, without it."""
        while (found := self._kept.find(end, self._at)) < 0:
            self._kept, self._at = self._kept[self._at :], 0
            if len(self._kept) > _MAX_HEAD:
                raise HttpError("a line is too long")
            piece = await self._more()
            if not piece:
                raise HttpError("it was cut short")
            self._kept += piece
        line, self._at = self._kept[self._at : found], found + len(end)
        return line

    def detach(self) -> tuple[int, bytes]:
        """The descriptor, which is then the caller's, and what was received and not used."""
        return self._sock.detach(), self._kept[self._at :]

    def as_stream(self) -> tuple[Stream, bytes]:
        """The connection itself, which is then the caller's, and what was received and not used."""
        if self._tls is None:
            fd, early = self.detach()
            return FdStream(fd, fd), early
        tls, self._tls = self._tls, None
        return TlsStream(*tls), self._kept[self._at :]

    def close(self) -> None:
        if self._tls is not None:
            self._tls[1].transport.abort()
        self._sock.close()


class AnswerStream:
    """An answer whose body comes piece by piece."""

    def __init__(self, address: str, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self._address = address
        self._connection = connection
        self.status = status
        self.headers = headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces as they come, to the end of the body."""
        with _told(self._address):
            async for piece in self._pieces():
                yield piece

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _length(await self._connection.line(b"\n"), 16):
                async for piece in self._exactly(size):
                    yield piece
                await self._connection.line(b"\n")
        elif "content-length" in self.headers:
            async for piece in self._exactly(_length(self.headers["content-length"].encode(), 10)):
                yield piece
        elif self.status not in (101, 204, 304):
            while piece := await self._connection.receive():
                yield piece

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await self._connection.receive(min(size, _CHUNK))
            if not piece:
                raise HttpError("the answer was cut short")
            size -= len(piece)
            yield piece

    async def lines(self) -> AsyncIterator[bytes]:
        """One JSON text after the other, as engines tell of progress and events."""
        kept = b""
        async for piece in self:
            *whole, kept = (kept + piece).split(b"\n")
            if len(kept) > MAX_BODY:
                raise HttpError("a line of the answer is too long")
            for line in whole:
                if line.strip():
                    yield line
        if kept.strip():
            yield kept

    async def whole(self) -> bytes:
        found = bytearray()
        async for piece in self:
            found += piece
            if len(found) > MAX_BODY:
                raise HttpError("the answer is too long")
        return bytes(found)


class HttpClient:
    """Requests to one daemon, at `unix:///path`, `http://host:port` or `https://host:port`. Without `follow` no link
    may stand for its socket."""

    def __init__(
        self, address: str, *, tls: ssl.SSLContext | None = None, timeout_s: float = 30.0, follow: bool = True
    ) -> None:
        parts = urlsplit(address)
        self.address = address
        self.timeout_s = timeout_s
        self._follow = follow
        self._unix_path = parts.path if parts.scheme == "unix" else None
        self._host, self._port = parts.hostname or "localhost", parts.port or 80
        self._tls = tls if parts.scheme == "https" else None

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Ask, and take the whole answer, within one deadline."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        async with (
            _deadline(self.address, timeout_s),
            self.stream(
                method, path, query=query, json=json, body=body, headers=headers, timeout_s=timeout_s
            ) as answer,
        ):
            return Answer(answer.status, answer.headers, await answer.whole())

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        json: Any = None,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[AnswerStream]:
        """Ask, and take the body as it comes. The deadline is for the head of the answer; the rest is the caller's."""
        head = self._head(method, path, query, json, body, headers or {})
        connection = await self._connect(timeout_s)
        try:
            async with _deadline(self.address, self.timeout_s if timeout_s is None else timeout_s):
                await _send(connection, head, json, body)
                status, answered = _parse_head(await connection.line(b"\r\n\r\n"))
            yield AnswerStream(self.address, connection, status, answered)
        finally:
            connection.close()

    async def upgrade(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, json: Any = None
    ) -> tuple[int, bytes]:
        """Ask for the connection itself: its descriptor, which is then the caller's, and what came early."""
        if self._tls is not None:
            raise HttpError("a connection with TLS cannot be handed over")
        wanted = {"Connection": "Upgrade", "Upgrade": "tcp"}
        connection, _ = await self._upgraded(self._head(method, path, query, json, None, wanted), json)
        return connection.detach()

    async def switch(
        self, path: str, *, query: Mapping[str, Any] | None = None, headers: Mapping[str, str]
    ) -> tuple[Stream, bytes, dict[str, str]]:
        """Go over to another protocol: the stream, what came early, and the headers of the answer."""
        head = self._head("GET", path, query, None, None, {"Connection": "Upgrade", **headers})
        connection, answered = await self._upgraded(head, None)
        return *connection.as_stream(), answered

    async def _upgraded(self, head: bytes, json: Any) -> tuple[_Connection, dict[str, str]]:
        connection = await self._connect(None)
        try:
            async with _deadline(self.address, self.timeout_s):
                await _send(connection, head, json, None)
                status, headers = _parse_head(await connection.line(b"\r\n\r\n"))
                if status not in (101, 200):
                    body = await AnswerStream(self.address, connection, status, headers).whole()
                    raise Refused(Answer(status, headers, body))
        except BaseException:
            connection.close()
            raise
        return connection, headers

    def _head(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        json: Any,
        body: Body | None,
        headers: Mapping[str, str],
    ) -> bytes:
        wanted = {key: _query_value(value) for key, value in (query or {}).items() if value is not None}
        target = f"{path}?{urlencode(wanted)}" if wanted else path
        fields = {"Host": "localhost" if self._unix_path else f"{self._host}:{self._port}", "Connection": "close"}
        if json is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(_json_body(json)))}
        elif isinstance(body, bytes):
            fields["Content-Length"] = str(len(body))
        elif body is not None:
            fields["Transfer-Encoding"] = "chunked"
        elif method in ("POST", "PUT", "PATCH"):
            fields["Content-Length"] = "0"
        fields |= headers
        if any(ord(each) < 32 or ord(each) > 126 for each in f"{method}{target}{''.join(fields.values())}"):
            raise HttpError("a request with characters that HTTP has no place for")
        lines = [f"{method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n"

    async def _connect(self, timeout_s: float | None) -> _Connection:
        async with _deadline(self.address, self.timeout_s if timeout_s is None else timeout_s):
            sock = socket.socket(socket.AF_UNIX if self._unix_path else socket.AF_INET, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                if self._unix_path:
                    await connect_unix(sock, self._unix_path, follow=self._follow)
                else:
                    await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
                tls = None
                if self._tls is not None:
                    tls = await asyncio.open_connection(sock=sock, ssl=self._tls, server_hostname=self._host)
                return _Connection(sock, tls)
            except BaseException:
                sock.close()
                raise


class Refused(HttpError):
    """An upgrade was answered with something else."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


def _query_value(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _json_body(json: Any) -> bytes:
    return b"" if json is None else msgspec.json.encode(json)


async def _send(connection: _Connection, head: bytes, json: Any, body: Body | None) -> None:
    """An engine may refuse while we still send: its answer is then what counts."""
    with suppress(BrokenPipeError, ConnectionResetError):
        await connection.send(head + (body if isinstance(body, bytes) else _json_body(json)))
        if body is not None and not isinstance(body, bytes):
            async for piece in body:
                if piece:
                    await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.send(b"0\r\n\r\n")


def _length(text: bytes, base: int) -> int:
    number = int(text.partition(b";")[0], base)
    if number < 0:
        raise HttpError("a length below zero")
    return number


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *rest = head.decode("latin-1").strip().split("\r\n")
    try:
        return int(first.split(" ", 2)[1]), {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)
        }
    except (IndexError, ValueError):
        raise HttpError(f"not an answer: {first[:100]!r}") from None


class _told:
    """Turns what breaks a connection into HttpError."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ValueError):
            raise HttpError(f"{self._address} does not answer as HTTP does: {error}") from error
        if isinstance(error, OSError) and not isinstance(error, TimeoutError):
            raise NoAnswer(f"{self._address}: {error.strerror or error}") from error


@asynccontextmanager
async def _deadline(address: str, timeout_s: float) -> AsyncIterator[None]:
    with _told(address):
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            if error.errno is not None:
                raise NoAnswer(f"{address}: {os.strerror(error.errno)}") from error
            raise NoAnswer(f"{address} did not answer in {timeout_s:g} s") from None
