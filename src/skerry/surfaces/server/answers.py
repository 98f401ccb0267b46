"""Answers whose bodies are made while they are sent, and what becomes of them when the client goes away."""

from __future__ import annotations

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from skerry.aio import end, run_to_end
from skerry.errors import SkerryError
from skerry.surfaces.rest.route import Streamed

_log = logging.getLogger("skerry.server")


class StreamedAnswer(Response):
    """An answer piece by piece. Its source is always ended: when all is sent, when it fails, and when the client goes
    away or is cut off as it reads nothing. If it fails, the connection breaks off before the end of the body."""

    def __init__(self, streamed: Streamed, headers: dict[str, str]) -> None:
        self.status_code = streamed.status
        self.media_type = streamed.content_type
        self.background = None
        self._chunks = streamed.chunks
        self.init_headers({**headers, **streamed.headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(scope, send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except SkerryError as error:
            _log.info("request %s: its answer breaks off: %s", scope.get("skerry.request"), error)
        finally:
            await run_to_end(self._end(sending, gone))

    async def _end(self, *tasks: asyncio.Task[None]) -> None:
        await end(*tasks)
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] != "HEAD":
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Wait until the client of a request has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass
