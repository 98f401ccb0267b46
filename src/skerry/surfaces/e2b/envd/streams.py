"""Streams of messages to a client, which end with one that tells how they ended."""

from __future__ import annotations

import asyncio
import logging
import math
import struct
from collections.abc import AsyncIterator
from typing import Any, Self

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.aio import end, run_to_end
from skerry.errors import SkerryError
from skerry.surfaces.e2b.envd.codes import RpcError, is_gone, rpc_error
from skerry.surfaces.e2b.reset import reset
from skerry.surfaces.server.answers import until_gone

_log = logging.getLogger("skerry.server")
CONTENT_TYPE = "application/connect+json"
KEEP_ALIVE_S = 90.0
"""Seconds of silence after which a client that names no other number hears that the stream is there."""
_MOST_KEEP_ALIVE_S = 3600
_HEAD = struct.Struct(">BI")
_LAST = 2
_encode = msgspec.json.Encoder(enc_hook=str).encode


def envelope(message: Any, flags: int = 0) -> bytes:
    body = _encode(message)
    return _HEAD.pack(flags, len(body)) + body


class EventStream(Response):
    """An answer message by message. Its source is always ended: with the last of them, when it fails, and when the
    client goes away. A sandbox that is lost breaks the connection off, so that nothing looks like an end."""

    media_type = CONTENT_TYPE

    def __init__(
        self,
        request: Request,
        events: AsyncIterator[dict[str, Any]],
        keep_alive: dict[str, Any],
        timeout_s: float | None = None,
    ) -> None:
        """`keep_alive` is sent where the source tells nothing for long. With a `timeout_s` that is all the time that
        there is."""
        super().__init__()
        self._keep_alive = keep_alive
        self._ends_at = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        del self.headers["content-length"]
        self._request = request
        self._events = events
        self._next: asyncio.Future[dict[str, Any] | None] | None = None
        self._keep_alive_s = _interval(request)

    @staticmethod
    def last(error: RpcError | None = None) -> bytes:
        """The message that ends a stream."""
        return envelope({} if error is None else {"error": error.body}, _LAST)

    async def begin(self) -> Self:
        """Wait for the first event, or for as long as nothing has to be said. Raises what the source does first."""
        try:
            self._next = asyncio.ensure_future(self._take())
            gone = asyncio.ensure_future(until_gone(self._request.receive))
            try:
                wait = (self._next, gone)
                await asyncio.wait(wait, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not self._next.done():
                    raise ClientDisconnect
            finally:
                await end(gone)
            if self._next.done():
                self._next.result()
        except BaseException:
            await run_to_end(self._close())
            raise
        return self

    async def _take(self) -> dict[str, Any] | None:
        return await anext(self._events, None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait((sending, gone), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            await run_to_end(self._end(sending, gone))

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        await end(*tasks)
        await self._close()

    async def _close(self) -> None:
        if self._next is not None:
            await end(self._next)
        close = getattr(self._events, "aclose", None)
        if close is not None:
            await close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        error: RpcError | None = None
        try:
            while (event := await self._event()) is not None:
                await send({"type": "http.response.body", "body": envelope(event), "more_body": True})
        except (SkerryError, RpcError) as failure:
            if is_gone(failure):
                self._break_off(failure)
                return
            error = rpc_error(failure)
        await send({"type": "http.response.body", "body": self.last(error), "more_body": False})

    async def _event(self) -> dict[str, Any] | None:
        """The next event, or one that says only that the stream is there; None at its end."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._take())
        left = math.inf if self._ends_at is None else self._ends_at - asyncio.get_running_loop().time()
        done, _ = await asyncio.wait((self._next,), timeout=max(0.0, min(self._keep_alive_s, left)))
        if not done:
            if left <= self._keep_alive_s:
                raise RpcError("deadline_exceeded", "timeout")
            return self._keep_alive
        found, self._next = self._next, None
        return found.result()

    def _break_off(self, error: Exception) -> None:
        _log.info("request %s: its stream breaks off: %s", self._request.scope.get("skerry.request"), error)
        transport = self._request.scope.get("skerry.transport")
        if transport is not None:
            reset(transport)


def _interval(request: Request) -> float:
    text = request.headers.get("keepalive-ping-interval", "")
    if text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= _MOST_KEEP_ALIVE_S:
        return float(text)
    return KEEP_ALIVE_S
