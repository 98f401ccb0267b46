"""The ledger: all that was done, by page or as it happens. A tenant sees what is its project's, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated

import msgspec

from skerry.errors import NotFound
from skerry.ledger.line import Line
from skerry.ledger.reading import LineFilter
from skerry.ledger.verify import Verified
from skerry.model.records import Filter
from skerry.model.tenants import Scope
from skerry.surfaces.rest.route import EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import closing, comment, frame, place_after, send_events
from skerry.surfaces.rest.views import MAX_PAGE, Page

routes = Routes("ledger")
_EVERYTHING = Filter(include_ended=True)


class LedgerQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which lines; every field that is given must fit."""

    sandbox: str | None = None
    """By its id, the beginning of it, or a name that it had."""
    kind: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None
    """Both in seconds since 1970."""
    tool: str | None = None
    """cli, server, mcp, gate, forwarder or api."""
    name: str | None = None
    """Host that was asked for; `*` stands for anything."""
    actor: str | None = None
    """Whoever asked the server for it, as `token:ID`."""
    newest: bool = False
    """The newest line first."""
    after: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None
    """The number of a line: those after it, in the order that was asked for. The `next` of the page before."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


class FollowQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which lines to follow, and after which; without one, from now on."""

    sandbox: str | None = None
    kind: tuple[str, ...] = ()
    tool: str | None = None
    name: str | None = None
    actor: str | None = None
    after: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] | None = None


class VerifyQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ledger is held against."""

    head: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """A hash that was its head once, and was kept elsewhere."""


class VerifiedView(msgspec.Struct, frozen=True, kw_only=True):
    """Whether the ledger is whole."""

    whole: bool
    found: Verified


@routes.get("/ledger", Scope.READ)
async def show(call: Call, query: LedgerQuery) -> Page[Line]:
    """Lines, the oldest first, a page at a time. `next` is the number of the last line of the page."""
    async with call.server.reading:
        wanted = msgspec.structs.replace(await _filter(call, query), since=query.since, until=query.until)
        lines = await call.server.manager.ledger.page(
            wanted, after=query.after, limit=query.limit + 1, newest=query.newest
        )
    page = lines[: query.limit]
    return Page(page, str(page[-1].seq) if len(lines) > len(page) else None)


@routes.get("/ledger/follow", Scope.READ, content_type=EVENTS, headers=("Last-Event-ID",))
async def follow(call: Call, query: FollowQuery) -> Streamed:
    """Lines as they are written, as server-sent events whose id is the number of the line."""
    after = place_after(call, query.after)
    wanted = await _filter(call, query)

    async def events() -> AsyncGenerator[bytes, None]:
        yield comment("following")
        async with closing(call.server.manager.ledger.follow(wanted, after=after)) as lines:
            async for line in lines:
                yield frame(line.kind, line, id=line.seq)

    return await send_events(call, events())


@routes.get("/ledger/verify", Scope.ADMIN)
async def verify(call: Call, query: VerifyQuery) -> VerifiedView:
    """Check every line of every file, which may take a while."""
    async with call.server.reading:
        found = await call.server.manager.ledger.verify(query.head)
    return VerifiedView(whole=found.is_whole, found=found)


async def _filter(call: Call, query: LedgerQuery | FollowQuery) -> LineFilter:
    """The lines that were asked for, of those that the caller may see."""
    project = call.principal.tenant
    mine: frozenset[str] = frozenset()
    if project is not None:
        mine = frozenset(record.id for record in await call.manager.list(_EVERYTHING))
    sandbox = query.sandbox
    if sandbox is not None:
        try:
            sandbox = (await call.manager.record(sandbox)).id
        except NotFound:
            sandbox = query.sandbox  # one that was forgotten, of which there are lines yet
    return LineFilter(
        sandbox=sandbox,
        kinds=frozenset(query.kind),
        tool=query.tool,
        name=query.name,
        actor=query.actor,
        project=project,
        sandboxes=mine,
    )
