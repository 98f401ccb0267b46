"""Calls to a server: what was asked as HTTP, answers as our types, and its errors as ours."""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from skerry import errors
from skerry.aio import backoff
from skerry.errors import ConfigError, SkerryError, StoreUnavailable
from skerry.net import websocket
from skerry.net.http import Answer, AnswerStream, Body, HttpClient, HttpError, NoAnswer, UpgradeRefused
from skerry.net.websocket import WebSocket

T = TypeVar("T")
PREFIX = "/v1"
_log = logging.getLogger("skerry.remote")
TIMEOUT_S = 60.0
"""Time of a call that does nothing long."""
LONG_S = 900.0
"""Time of one that makes boxes, of which pulling an image is a part."""
_SILENT_S = 60.0
"""How long a stream of events may say nothing: a server that lives says so more often."""
_AGAIN_S = (0.1, 1.0, 4.0)
"""First and longest wait before a question is asked again, and for how long that is done."""
_FOLLOW_S = (0.2, 5.0, 60.0)
"""The same for a stream of events that broke."""
_MAX_MESSAGE = 1 << 19
_BY_STATUS: Mapping[int, type[SkerryError]] = {
    400: errors.InvalidSpec, 401: errors.AccessDenied, 403: errors.NotPermitted, 404: errors.NotFound,
    409: errors.Conflict, 412: errors.Conflict, 413: errors.TooLarge, 422: errors.Unsupported,
    429: errors.LimitReached, 503: errors.StoreUnavailable, 504: errors.CallTimeout,
}  # fmt: skip
_KNOWN = frozenset(each.code for each in errors.all_errors())


class Problem(msgspec.Struct):
    """What is wrong, as a server tells it."""

    status: int = 500
    code: str = ""
    detail: str = ""
    infrastructure: bool = False
    field: str | None = None


class ServerEvent(NamedTuple):
    """An event that a server sent."""

    name: str
    id: str
    data: bytes

    def read(self, type: type[T]) -> T:
        return decoded(self.data, type)


class Api:
    """A server, reached by its URL: `https://host[:port]`, `http://host[:port]`, or `unix:///path`."""

    def __init__(self, url: str, token: str | None = None, *, ca: str | None = None) -> None:
        """`ca` is a file of certificates that are trusted beside those of the system. Raises ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix") or not (parts.netloc or parts.scheme == "unix"):
            raise ConfigError(f"url: {url!r} is not https://HOST, http://HOST or unix:///PATH")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise ConfigError("url: it holds more than a scheme, a host, a port and a path; the token is a setting")
        tls = None
        if parts.scheme == "https":
            tls = ssl.create_default_context()
            try:
                if ca:
                    tls.load_verify_locations(ca)
            except OSError as error:
                raise ConfigError(f"ca: {ca}: {error.strerror or error}") from None
        self.url = url
        self._base = "" if parts.scheme == "unix" else parts.path.rstrip("/")
        self._http = HttpClient(url, tls=tls, timeout_s=TIMEOUT_S)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def get(self, path: str, type: type[T], query: Mapping[str, Any] | None = None, **more: Any) -> T:
        """Ask for something, again if nobody answered: that changes nothing. Raises SkerryError."""
        waits = backoff(*_AGAIN_S)
        while True:
            try:
                return decoded(await self._request("GET", path, query, **more), type)
            except StoreUnavailable as error:
                delay_s = next(waits, None)
                if delay_s is None:
                    raise
                _log.debug("ask again: %s", error)
                await asyncio.sleep(delay_s)

    async def send(
        self,
        method: str,
        path: str,
        type: type[T],
        body: Any = None,
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        content: Body | None = None,
    ) -> T:
        """Have something done, once. `content` is sent as it is, in the place of JSON. Raises SkerryError."""
        raw = await self._request(
            method, path, query, body=body, headers=headers, timeout_s=timeout_s, content=content
        )  # fmt: skip
        return decoded(raw, type)

    async def order(self, method: str, path: str, body: Any = None, **more: Any) -> None:
        """Have something done whose answer tells nothing more. Raises SkerryError."""
        await self.send(method, path, object, body, **more)

    async def pages(self, path: str, type: type[T], query: Mapping[str, Any] | None = None) -> list[T]:
        """All items of a list, page by page."""
        found: list[T] = []
        after: str | None = None
        while True:
            asked = {**(query or {}), "limit": 1000, "after": after}
            page = await self.get(path, _Page, asked)
            found += [decoded(item, type) for item in page.items]
            after = page.next
            if after is None:
                return found

    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        content: Body | None = None,
    ) -> bytes:
        sent = {**self._headers, **(headers or {})}
        with _translated(self.url):
            answer = await self._http.request(
                method, self._target(path, query), json=body, body=content, headers=sent, timeout_s=timeout_s
            )
        if not 200 <= answer.status < 300:
            raise problem(answer)
        return answer.body

    @asynccontextmanager
    async def stream(self, path: str, query: Mapping[str, Any] | None = None) -> AsyncIterator[AnswerStream]:
        """An answer whose bytes are taken as they come. Raises SkerryError."""
        with _translated(self.url):
            async with self._http.stream("GET", self._target(path, query), headers=self._headers) as answer:
                if not 200 <= answer.status < 300:
                    raise problem(Answer(answer.status, answer.headers, await answer.whole()))
                yield answer

    async def follow(self, path: str, query: Mapping[str, Any]) -> AsyncGenerator[ServerEvent, None]:
        """Events for as long as somebody wants them. A stream that ends or breaks is opened again after the last one
        that came. Raises StoreUnavailable once that has failed for a minute, and what else the server tells."""
        after, waits = query.get("after"), backoff(*_FOLLOW_S)
        while True:
            opened_at = math.inf
            try:
                async with self.stream(path, {**query, "after": after}) as answer:
                    opened_at = time.monotonic()
                    async with aclosing(self._events_of(answer)) as events:
                        async for event in events:
                            after, waits = event.id or after, backoff(*_FOLLOW_S)
                            yield event
            except StoreUnavailable as error:
                _log.debug("%s is followed again: %s", path, error)
            if time.monotonic() - opened_at > _FOLLOW_S[1]:  # it was there, and had nothing to tell
                waits = backoff(*_FOLLOW_S)
            delay_s = next(waits, None)
            if delay_s is None:
                raise StoreUnavailable(f"the server at {self.url} has gone away")
            await asyncio.sleep(delay_s)

    async def events(self, path: str, query: Mapping[str, Any] | None = None) -> AsyncGenerator[ServerEvent, None]:
        """Events as the server sends them, to their end. Raises StoreUnavailable if it falls silent, and what else it
        tells."""
        async with self.stream(path, query) as answer, aclosing(self._events_of(answer)) as events:
            async for event in events:
                yield event

    async def _events_of(self, answer: AnswerStream) -> AsyncGenerator[ServerEvent, None]:
        """The events of an answer. Raises the error that one of them tells."""
        lines = answer.lines()
        name = id = ""
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    line = await anext(lines, None)
            except TimeoutError:
                raise StoreUnavailable(f"{self.url} has said nothing for {_SILENT_S:g} s") from None
            if line is None:
                return
            field, _, value = line.rstrip(b"\r").partition(b": ")
            if field == b"event":
                name = value.decode(errors="replace")
            elif field == b"id":
                id = value.decode(errors="replace")
            elif field == b"data" and name == "error":
                raise error_of(decoded(value, Problem))
            elif field == b"data":
                yield ServerEvent(name, id, value)
                name = ""

    async def websocket(self, path: str, query: Mapping[str, Any] | None = None) -> WebSocket:
        """Open a WebSocket. Raises SkerryError; why a server refuses one, its close frame tells."""
        with _translated(self.url):
            socket = await websocket.connect(self._http, self._target(path, query), {}, self._headers)
        socket.max_message = _MAX_MESSAGE
        return socket

    def _target(self, path: str, query: Mapping[str, Any] | None) -> str:
        pairs: list[tuple[str, str]] = []
        for name, value in (query or {}).items():
            each = value if isinstance(value, list | tuple | set | frozenset) else [value]
            pairs += [(name, _text(one)) for one in each if one is not None]
        return f"{self._base}{PREFIX}{path}" + (f"?{urlencode(pairs)}" if pairs else "")


class _Page(msgspec.Struct):
    items: list[msgspec.Raw]
    next: str | None = None


def segment(text: str) -> str:
    """A text as a part of a path; one that would be none, or another, is an id that nothing has."""
    return quote(text, safe="") if text.strip(".") else "-"


def problem(answer: Answer) -> SkerryError:
    """The error that an answer tells."""
    try:
        told = msgspec.json.decode(answer.body, type=Problem)
    except (msgspec.DecodeError, UnicodeDecodeError):
        told = Problem()
    told.status = answer.status
    return error_of(told)


def error_of(told: Problem) -> SkerryError:
    """The error that a problem tells."""
    detail = told.detail or f"the server answered with status {told.status}"
    code = told.code if told.code in _KNOWN else _BY_STATUS.get(told.status, SkerryError).code
    return errors.of_code(code, detail, field=told.field, infrastructure=told.infrastructure)


def closing_error(ended_by: tuple[int, str] | None) -> SkerryError | None:
    """The error that a close frame tells, in the form `code: words`."""
    code, _, words = (ended_by[1] if ended_by else "").partition(": ")
    return errors.of_code(code, words) if code in _KNOWN else None


def decoded(raw: bytes | msgspec.Raw, type: type[T]) -> T:
    """What a server has sent, as one of our types. Raises SkerryError."""
    try:
        return msgspec.json.decode(raw or b"null", type=type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SkerryError(
            f"the server's answer is not what was expected, it may be of another version: {error}"
        ) from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


class _translated:
    """Turns errors of HTTP into ours."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, UpgradeRefused):
            raise problem(error.answer) from None
        if isinstance(error, NoAnswer):
            raise StoreUnavailable(f"the server does not answer: {error}") from error
        if isinstance(error, HttpError):
            raise StoreUnavailable(f"the server at {self._url} does not speak as one of ours: {error}") from error
