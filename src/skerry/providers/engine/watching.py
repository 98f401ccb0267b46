"""What happens to boxes, told by the engine's own events, whoever made it happen."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from skerry.errors import InvalidSpec, ProviderUnavailable
from skerry.providers import layout
from skerry.providers.base import BoxChange
from skerry.providers.engine import states
from skerry.providers.engine.api import Engine
from skerry.spec import SandboxId, parse_id

_TELLING = ("start", "die", "oom", "pause", "unpause", "destroy", "remove", "rename")


async def watch(engine: Engine) -> AsyncIterator[BoxChange]:
    """All boxes first. Events are asked for from a moment before, so that nothing falls between the two."""
    since = int(time.time()) - 1
    for id, status in (await states.all_boxes(engine)).items():
        yield BoxChange(id=id, status=status)
    filters = {"type": ["container"], "label": [f"skerry={engine.provider}"]}
    async with engine.stream("GET", "/events", query={"since": str(since), "filters": filters}) as answer:
        async for line in answer.lines():
            changed = _id_of(line)
            if changed is not None:
                yield BoxChange(id=changed, status=await states.status_of(engine, changed))
    raise ProviderUnavailable(engine.provider, "its daemon ended the stream of events", fix="start the daemon again")


def _id_of(line: bytes) -> SandboxId | None:
    event = msgspec.json.decode(line, type=dict[str, Any])
    action = str(event.get("Action") or event.get("status") or "")
    if action not in _TELLING:
        return None
    name = str((event.get("Actor") or {}).get("Attributes", {}).get("name", ""))
    with suppress(InvalidSpec):
        return parse_id(name.removeprefix(layout.PREFIX))
    return None
