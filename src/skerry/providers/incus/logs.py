"""What a box itself said: the console of its container, which is where PID 1, the agent, speaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

from skerry.errors import NotFound, SkerryError
from skerry.providers.incus import instances
from skerry.providers.incus.api import Api
from skerry.spec import SandboxId

_LOOK_S = 0.25
_TAIL = 4096
_LINES = 50


async def read(api: Api, id: SandboxId, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
    """All of it, or its last lines; followed, until the box ends. Incus tells it whole only, so it is asked again."""
    known = b""
    try:
        while True:
            is_over = not follow or not (await instances.inspect(api, id)).is_running
            said = await _said(api, id)
            fresh = said[len(known) :] if said.startswith(known) else said  # the oldest is forgotten some time
            known, tail, fresh = said, None, fresh if tail is None else _last_lines(fresh, tail)
            if fresh:
                yield fresh
            if is_over:
                return
            await asyncio.sleep(_LOOK_S)
    except NotFound:
        if not follow:
            raise


async def last_words(api: Api, id: SandboxId) -> str:
    """Why a box did not come up: what it said, and what Incus has to say of it."""
    words = b""
    with suppress(SkerryError):
        words = _last_lines(await _said(api, id), _LINES)
    if not words:
        with suppress(SkerryError):
            words = _last_lines(await api.raw(f"{instances.path(id)}/logs/lxc.log"), _LINES)
    return words.decode(errors="replace")[-_TAIL:]


async def _said(api: Api, id: SandboxId) -> bytes:
    return (await instances.said(api, id)).replace(b"\r\n", b"\n")


def _last_lines(text: bytes, count: int) -> bytes:
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else b""
