"""Watch of boxes on a host that sends no events: look, compare, and look again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from skerry.model.spec import SandboxId
from skerry.providers.base import BoxChange, BoxStatus

_LOOK_S = 0.5
_PAUSES = 20
"""Pause between two looks, in lengths of a look: however many boxes there are, a watch takes no more than its share."""


async def watch(discover: Callable[[], Awaitable[Mapping[SandboxId, BoxStatus]]]) -> AsyncIterator[BoxChange]:
    """Yield all boxes, then those that are not as the last look found them. Ends with what `discover` raises."""
    loop = asyncio.get_running_loop()
    known: Mapping[SandboxId, BoxStatus] = {}
    while True:
        began = loop.time()
        found = await discover()
        pause_s = max(_LOOK_S, _PAUSES * (loop.time() - began))
        for id, status in found.items():
            if known.get(id) != status:
                yield BoxChange(id=id, status=status)
        for id in known.keys() - found.keys():
            yield BoxChange(id=id, status=None)
        known = found
        await asyncio.sleep(pause_s)
