"""Bodies that come and go piece by piece: bytes and server-sent events out, uploads in. Nothing is read faster than the
other side takes it, and no more than one piece is kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from typing import Any, Self, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect

from skerry.aio import end, run_to_end
from skerry.errors import AccessDenied, SkerryError, StoreError
from skerry.surfaces.rest.problems import Refused, problem_of
from skerry.surfaces.rest.route import BYTES, EVENTS, GONE, Call, Streamed

T = TypeVar("T")

LOOK_S = 10.0
"""Seconds after which it is looked again whether the token of an answer that lasts is good."""
KEEP_ALIVE_S = 15.0
"""Seconds after which a silent stream of events says that it is there: proxies and clients give up what is silent."""
STALLED_S = 120.0
"""Seconds that a process in a box may take nothing of what is written to it."""
_ALIVE = b": \n\n"
_encode = msgspec.json.Encoder(enc_hook=str).encode


def closing(source: AsyncIterator[T]) -> aclosing[AsyncGenerator[T, None]]:
    """A generator that is ended with its `async with`, and not when somebody finds it."""
    return aclosing(cast("AsyncGenerator[T, None]", source))


def frame(event: str, data: Any, *, id: int | None = None) -> bytes:
    """One server-sent event. Its data is JSON on one line, so nothing in it can look like more of them."""
    number = b"" if id is None else b"id: %d\n" % id
    return b"%sevent: %s\ndata: %s\n\n" % (number, event.encode(), _encode(data))


def comment(text: str) -> bytes:
    """A line of a stream of events that means nothing to programs."""
    return b": %s\n\n" % text.encode()


def place_after(call: Call, given: T) -> int | T:
    """The event after which a stream goes on: that of the header `Last-Event-ID`, else what the query gives. Raises
    Refused."""
    text = call.header("last-event-id")
    if not text:
        return given
    if not text.isdecimal() or len(text) > 18:
        raise Refused(400, "Last-Event-ID: give the id of an event", "invalid_request")
    return int(text)


async def send_bytes(
    call: Call,
    source: AsyncIterator[bytes],
    *,
    lasting: bool = False,
    headers: dict[str, str] | None = None,
    status: int = 200,
    content_type: str = BYTES,
) -> Streamed:
    """An answer of bytes. What goes wrong before the first of them is raised here; later the connection breaks off, so
    that no part is taken for the whole. One that is `lasting` ends when the server is to go."""
    pieces = await Pieces(call, source, lasting=lasting).begin()
    return Streamed(chunks=pieces, headers=headers or {}, status=status, content_type=content_type)


async def send_events(call: Call, source: AsyncIterator[bytes], *, lasting: bool = True) -> Streamed:
    """An answer of server-sent events, which are `frame`s. What goes wrong before the first piece is raised here; later
    it is an event `error` with the problem. One that is `lasting` ends when the server is to go."""
    pieces = await Pieces(call, source, lasting=lasting, is_events=True).begin()
    return Streamed(chunks=pieces, content_type=EVENTS, headers={"x-accel-buffering": "no"})


class Pieces(AsyncIterator[bytes]):
    """Pieces of an answer. Their source runs in a task of its own, one piece ahead of whoever takes them."""

    def __init__(self, call: Call, source: AsyncIterator[bytes], *, lasting: bool, is_events: bool = False) -> None:
        self._call = call
        self._is_watched = lasting or is_events
        self._looked_at = time.monotonic()
        self._is_events = is_events
        self._piece: bytes | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._news = asyncio.Event()
        self._taken = asyncio.Event()
        self._tasks = [asyncio.create_task(self._run(source))]
        if self._is_watched:
            self._tasks.append(asyncio.create_task(self._watch(lasting=lasting)))

    async def _run(self, source: AsyncIterator[bytes]) -> None:
        try:
            async with closing(source) as pieces:
                async for piece in pieces:
                    self._piece = piece
                    self._taken.clear()
                    self._news.set()
                    await self._taken.wait()
        except Exception as error:  # told to whoever takes the pieces
            self._error = error
        finally:
            self._is_over = True
            self._news.set()

    async def _watch(self, *, lasting: bool) -> None:
        """End the source when the token of the call is no longer good and, if it lasts, when the server is to go."""
        is_draining = self._call.server.is_draining if lasting else asyncio.Event()
        try:
            while not is_draining.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await is_draining.wait()
                await self._look_again()
        except AccessDenied as error:
            self._error = error
        self._tasks[0].cancel()

    async def _look_again(self) -> None:
        """See whether the token of the call is still good. Raises AccessDenied."""
        self._looked_at = time.monotonic()
        with suppress(StoreError):  # what is not known now is looked at again
            await self._call.server.identify_again(self._call.connection)

    async def begin(self) -> Self:
        """Wait for the first piece. Raises what the source does until then."""
        try:
            await self._news.wait()
            if self._error is not None:
                raise self._error
        except BaseException:
            await run_to_end(self.aclose())
            raise
        return self

    async def __anext__(self) -> bytes:
        if not self._is_watched and time.monotonic() - self._looked_at >= LOOK_S:
            await self._look_again()
        try:
            async with asyncio.timeout(KEEP_ALIVE_S if self._is_events else None):
                await self._news.wait()
        except TimeoutError:
            return _ALIVE
        if self._piece is not None:
            piece, self._piece = self._piece, None
            if not self._is_over:
                self._news.clear()
            self._taken.set()
            return piece
        error, self._error = self._error, None
        if isinstance(error, SkerryError) and self._is_events:
            return frame("error", problem_of(error, self._call.id))
        raise StopAsyncIteration if error is None else error

    async def aclose(self) -> None:
        """End the source, and wait until it has ended."""
        await end(*self._tasks)


class Upload:
    """Body of a request, read as fast as it is used."""

    def __init__(self, call: Call) -> None:
        self._chunks = call.request.stream()

    async def read(self, size: int, /) -> bytes:
        """The next piece, of any size; empty at the end. Raises Refused if the client goes away, and as the guard does
        if it sends nothing for long: then what there was of it is not the whole."""
        try:
            async for chunk in self._chunks:
                if chunk:
                    return chunk
        except ClientDisconnect:
            raise Refused(GONE, "the client went away", "gone") from None
        return b""
