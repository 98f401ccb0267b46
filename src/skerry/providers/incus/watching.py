"""What happens to boxes, told by Incus's own events, whoever made it happen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from skerry.errors import ProviderUnavailable
from skerry.providers.base import BoxChange
from skerry.providers.incus import instances
from skerry.providers.incus.api import FIX, PROVIDER, Api
from skerry.spec import SandboxId

_MAX_EVENT = 1 << 20
_TELLING = ("created", "deleted", "paused", "renamed", "restarted", "resumed", "shutdown", "started", "stopped")


class _Event(msgspec.Struct):
    type: str = ""
    metadata: dict[str, Any] = {}


async def watch(api: Api) -> AsyncIterator[BoxChange]:
    """All boxes first. Events are listened to from before, so that nothing falls between the two."""
    events = _Events()
    socket = await api.websocket("/1.0/events", query={"type": "lifecycle"})
    try:
        socket.on_message_end = events.message_ended
        socket.start(events)
        for id, status in (await instances.all_boxes(api)).items():
            yield BoxChange(id=id, status=status)
        while (changed := await events.next()) is not None:
            yield BoxChange(id=changed, status=await instances.status_of(api, changed))
    finally:
        socket.close()
    raise ProviderUnavailable(PROVIDER, "its daemon ended the stream of events", fix=FIX)


class _Events:
    """Takes messages apart for the boxes that they speak of."""

    def __init__(self) -> None:
        self._text = bytearray()
        self._changed: asyncio.Queue[SandboxId | None] = asyncio.Queue()

    async def next(self) -> SandboxId | None:
        """The next box that something happened to, or None at the end."""
        return await self._changed.get()

    def received(self, data: memoryview) -> None:
        if len(self._text) + data.nbytes <= _MAX_EVENT:
            self._text += data

    def message_ended(self) -> None:
        text, self._text = bytes(self._text), bytearray()
        try:
            event = msgspec.json.decode(text, type=_Event)
        except msgspec.DecodeError:
            return  # cut short, as too long to be one of ours
        if str(event.metadata.get("action", "")).removeprefix("instance-") in _TELLING:
            source = str(event.metadata.get("source", "")).partition("?")[0]
            parts = source.split("/")
            id = instances.id_of(parts[3]) if len(parts) > 3 else None
            if id is not None:
                self._changed.put_nowait(id)

    def closed(self, error: Exception | None) -> None:
        self._changed.put_nowait(None)
