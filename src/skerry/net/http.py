"""HTTP/1.1 client for daemons on a unix socket, on a port or behind a process.

Each request has a connection of its own, and every wait a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode, urlsplit

import msgspec

from skerry.net.dial import ProcessSocket, connect_tcp, connect_unix
from skerry.net.stream import FdStream, Stream, TlsStream

_log = logging.getLogger("skerry.net")

T = TypeVar("T")
Body = bytes | AsyncIterator[bytes]

_MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024  # limit of an answer that is taken whole; longer ones are streamed
_CHUNK = 1 << 16


class HttpError(Exception):
    """No answer, or one that is not HTTP."""


class NoAnswer(HttpError):
    """Nothing listens there, or nothing came by the deadline. The effect of the request is then unknown."""


class Content(TypedDict, total=False):
    """Optional parts of a request, with `json` or `body`."""

    query: Mapping[str, Any] | None
    json: Any
    body: Body | None
    headers: Mapping[str, str] | None


class Answer(msgspec.Struct, frozen=True):
    """A status, headers in lower case, and a whole body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self, type: type[T]) -> T:
        try:
            return msgspec.json.decode(self.body or b"null", type=type, strict=False)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HttpError(f"an answer is not what was expected: {error}") from error


class UpgradeRefused(HttpError):
    """An upgrade was answered with something else."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"status {answer.status}")
        self.answer = answer


class _Connection:
    """Bytes out and in. Without TLS on the socket itself: what came before the other side closed is not lost."""

    def __init__(
        self,
        sock: socket.socket,
        tls: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None,
        process: ProcessSocket | None = None,
    ) -> None:
        self._sock = sock
        self._tls = tls
        self.process = process
        self._kept = b""
        self._at = 0
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        if self._tls is None:
            await self._loop.sock_sendall(self._sock, data)
        else:
            self._tls[1].write(data)
            await self._tls[1].drain()

    async def receive(self, most: int = _CHUNK) -> bytes:
        """Receive some bytes; none at the end."""
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
        """Receive all up to `end`, without it. Raises HttpError."""
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

    def as_stream(self) -> tuple[Stream, bytes]:
        """Give away the connection itself, with the bytes that were received and not used."""
        early = self._kept[self._at :]
        if self._tls is not None:
            tls, self._tls = self._tls, None
            return TlsStream(*tls), early
        process, self.process = self.process, None
        return _SocketStream(self._sock.detach(), process), early

    def close(self) -> None:
        if self._tls is not None:
            self._tls[1].transport.abort()
        self._sock.close()
        if self.process is not None:
            self.process.end()


class _SocketStream(FdStream):
    """Stream on a connection that was given away, and the process behind it, if there is one."""

    def __init__(self, fd: int, process: ProcessSocket | None) -> None:
        super().__init__(fd, fd)
        self._process = process

    def _release(self) -> None:
        super()._release()
        if self._process is not None:
            self._process.end()


class AnswerStream:
    """Answer whose body comes piece by piece."""

    def __init__(self, address: str, connection: _Connection, status: int, headers: dict[str, str]) -> None:
        self._address = address
        self.connection = connection
        self.status = status
        self.headers = headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Pieces as they come, to the end of the body."""
        with _translated(self._address):
            async for piece in self._pieces():
                yield piece

    async def _pieces(self) -> AsyncIterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _length(await self.connection.line(b"\n"), 16):
                async for piece in self._exactly(size):
                    yield piece
                await self.connection.line(b"\n")
        elif "content-length" in self.headers:
            async for piece in self._exactly(_length(self.headers["content-length"].encode(), 10)):
                yield piece
        elif self.status not in (101, 204, 304):
            while piece := await self.connection.receive():
                yield piece

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await self.connection.receive(min(size, _CHUNK))
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
            await asyncio.sleep(0)  # else a flood, which is always there to be received, would keep the loop
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
    """Requests to a daemon at `unix:///path` (a link only with `follow`), `http://host:port` or `https://host:port`, or
    by the stdio of a program, which `through` starts for each."""

    def __init__(
        self,
        address: str,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 30.0,
        follow: bool = True,
        through: Sequence[str] | None = None,
    ) -> None:
        parts = urlsplit(address)
        self.address = address
        self.timeout_s = timeout_s
        self._follow = follow
        self._unix_path = parts.path if parts.scheme == "unix" else None
        self._through = through
        self._host, self._port = parts.hostname or "localhost", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = tls if parts.scheme == "https" else None

    async def request(
        self, method: str, path: str, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> Answer:
        """Ask, and take the whole answer, within one deadline. Raises HttpError."""
        async with (
            _deadline(self.address, self.timeout_s if timeout_s is None else timeout_s),
            self.stream(method, path, timeout_s=timeout_s, **content) as answer,
        ):
            return Answer(answer.status, answer.headers, await answer.whole())

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, *, timeout_s: float | None = None, **content: Unpack[Content]
    ) -> AsyncIterator[AnswerStream]:
        """Ask, and take the body as it comes. The deadline is for the head of the answer; the rest is the caller's."""
        answer = await self._ask(method, path, timeout_s, content)
        try:
            yield answer
        finally:
            answer.connection.close()

    async def upgrade(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, json: Any = None
    ) -> tuple[Stream, bytes]:
        """Ask for the connection itself: the stream, and the bytes that came early. Raises UpgradeRefused."""
        headers = {"Connection": "Upgrade", "Upgrade": "tcp"}
        answer = await self._upgraded(method, path, {"query": query, "json": json, "headers": headers})
        return answer.connection.as_stream()

    async def switch(
        self, path: str, *, query: Mapping[str, Any] | None = None, headers: Mapping[str, str]
    ) -> tuple[Stream, bytes, dict[str, str]]:
        """Switch to another protocol: the stream, the bytes that came early, and the headers. Raises as `upgrade`."""
        answer = await self._upgraded("GET", path, {"query": query, "headers": {"Connection": "Upgrade", **headers}})
        return *answer.connection.as_stream(), answer.headers

    async def _upgraded(self, method: str, path: str, content: Content) -> AnswerStream:
        answer = await self._ask(method, path, None, content)
        if answer.status in (101, 200):
            return answer
        try:
            async with _deadline(self.address, self.timeout_s):
                raise UpgradeRefused(Answer(answer.status, answer.headers, await answer.whole()))
        finally:
            answer.connection.close()

    async def _ask(self, method: str, path: str, timeout_s: float | None, content: Content) -> AnswerStream:
        """Send a request on a connection of its own, and take the head of the answer."""
        head, body = self._encode(method, path, content)
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        connection = await self._connect(timeout_s)
        try:
            async with _deadline(self.address, timeout_s):
                await _send(connection, head, body)
                status, headers = _parse_head(await connection.line(b"\r\n\r\n"))
        except BaseException as error:
            words = connection.process.last_words() if connection.process is not None else ""
            connection.close()
            if words and isinstance(error, HttpError):
                raise NoAnswer(f"{self.address}: {words}") from error
            raise
        return AnswerStream(self.address, connection, status, headers)

    def _encode(self, method: str, path: str, content: Content) -> tuple[bytes, Body]:
        """The head of a request, and its body. Raises HttpError."""
        query, body, json = content.get("query") or {}, content.get("body"), content.get("json")
        wanted = {key: _query_value(value) for key, value in query.items() if value is not None}
        target = f"{path}?{urlencode(wanted)}" if wanted else path
        host = f"[{self._host}]" if ":" in self._host else self._host
        is_here = self._unix_path or self._through
        fields = {"Host": "localhost" if is_here else f"{host}:{self._port}", "Connection": "close"}
        if json is not None:
            body = msgspec.json.encode(json)
            fields["Content-Type"] = "application/json"
        if isinstance(body, bytes) or (body is None and method in ("POST", "PUT", "PATCH")):
            fields["Content-Length"] = str(len(body or b""))
        elif body is not None:
            fields["Transfer-Encoding"] = "chunked"
        fields |= content.get("headers") or {}
        if any(ord(each) < 32 or ord(each) > 126 for each in f"{method}{target}{''.join(fields.values())}"):
            raise HttpError("a request with characters that HTTP has no place for")
        lines = [f"{method} {target} HTTP/1.1", *(f"{key}: {value}" for key, value in fields.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n", b"" if body is None else body

    async def _connect(self, timeout_s: float) -> _Connection:
        async with _deadline(self.address, timeout_s):
            if self._through:
                process = ProcessSocket(self._through)
                return _Connection(process.sock, process=process)
            if self._unix_path is None:
                sock = await connect_tcp(self._host, self._port)
            else:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.setblocking(False)
            try:
                if self._unix_path is not None:
                    await connect_unix(sock, self._unix_path, follow=self._follow)
                if self._tls is None:
                    return _Connection(sock)
                tls = await asyncio.open_connection(sock=sock, ssl=self._tls, server_hostname=self._host)
                return _Connection(sock, tls)
            except BaseException:
                sock.close()
                raise


def _query_value(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


async def _send(connection: _Connection, head: bytes, body: Body) -> None:
    """Send a request. A daemon may refuse while we still send: then its answer counts."""
    try:
        await connection.send(head + body if isinstance(body, bytes) else head)
        if not isinstance(body, bytes):
            async for piece in body:
                if piece:
                    await connection.send(b"%x\r\n%b\r\n" % (len(piece), piece))
            await connection.send(b"0\r\n\r\n")
    except (BrokenPipeError, ConnectionResetError) as error:
        _log.debug("the other side closed before the whole request was sent: %s", error)


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


@contextmanager
def _translated(address: str) -> Iterator[None]:
    """Turn the errors of a connection into HttpError."""
    try:
        yield
    except ssl.SSLError as error:  # of which some are a ValueError too
        raise NoAnswer(f"{address}: {error.strerror or error}") from error
    except ValueError as error:
        raise HttpError(f"{address} does not answer as HTTP does: {error}") from error
    except TimeoutError:
        raise
    except OSError as error:
        _log.debug("%s: %s", address, error)
        raise NoAnswer(f"{address}: {error.strerror or error}") from error


@asynccontextmanager
async def _deadline(address: str, timeout_s: float) -> AsyncIterator[None]:
    with _translated(address):
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            if error.errno is not None:
                raise NoAnswer(f"{address}: {os.strerror(error.errno)}") from error
            raise NoAnswer(f"{address} did not answer in {timeout_s:g} s") from None
