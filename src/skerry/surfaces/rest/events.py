"""What happened to sandboxes, and what happens, in one order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from skerry.model.spec import SandboxId
from skerry.model.tenants import Scope
from skerry.surfaces.rest.route import EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import closing, comment, frame, place_after, send_events

routes = Routes("events")

_MOST = 2**62
Place = Annotated[int, msgspec.Meta(ge=-1, le=_MOST)]


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which events, and from where on."""

    after: Place = 0
    """The `id` of the last one that is known; 0 is all that are kept, and -1 none of them but those that will come. The
    header `Last-Event-ID` counts before it."""
    sandbox: str | None = None
    follow: bool = False
    """Go on with what will happen; without it the answer ends with the last event."""


@routes.get("/events", Scope.READ, content_type=EVENTS, headers=("Last-Event-ID",))
async def follow(call: Call, query: EventsQuery) -> Streamed:
    """Events: `event` is the kind, `id` the place in the order of all of them, `data` the whole. A client that gives
    the last `id` it saw misses none, also after the server was gone."""
    after = place_after(call, query.after)
    sandbox = None if query.sandbox is None else (await call.manager.record(query.sandbox)).id
    if after < 0:
        after = await call.manager.store.last_event()

    return await send_events(call, _told(call, after, sandbox, follow=query.follow), lasting=query.follow)


async def _told(call: Call, after: int, sandbox: SandboxId | None, *, follow: bool) -> AsyncIterator[bytes]:
    """Events after a place. What others do to boxes by hand is among them, as the server writes it down anyway."""
    yield comment(f"after {after}")
    bell = call.server.bell
    while True:
        known = await bell.last() if follow else 0
        async with closing(call.manager.events(after=after, sandbox=sandbox)) as events:
            async for event in events:
                after = event.seq
                yield frame(event.kind, event, id=event.seq)
        if not follow:
            return
        await bell.after(known)
