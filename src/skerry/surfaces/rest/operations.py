"""Operations: long work that a call began, seen, followed and cancelled."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec

from skerry.errors import InvalidSpec, NotPermitted
from skerry.model.tenants import Scope
from skerry.surfaces.rest.problems import Problem
from skerry.surfaces.rest.route import EVENTS, PREFIX, Call, Routes, Streamed
from skerry.surfaces.rest.streams import closing, comment, frame, place_after, send_events
from skerry.surfaces.rest.views import Page, PageQuery, page_of
from skerry.surfaces.server.operations import Operation, OperationState, Step, Work

routes = Routes("operations")
_LONGEST_WAIT_S = 300.0


class OperationView(msgspec.Struct, frozen=True, kw_only=True):
    """Long work, and how it goes or ended."""

    id: str
    kind: str
    """Noun and verb, such as `image.build`."""
    target: str
    """Name of what it is about."""
    project: str
    actor: str
    state: OperationState
    created_at: float
    ended_at: float | None
    progress: Step | None
    """The last that it told."""
    result: Any
    """What came of it; null until it is done."""
    problem: Problem | None
    """Why it is not done, when it has ended."""

    @classmethod
    def of(cls, found: Operation) -> OperationView:
        return cls(
            id=found.id,
            kind=found.kind,
            target=found.target,
            project=found.project,
            actor=found.actor,
            state=found.state,
            created_at=found.created_at,
            ended_at=found.ended_at,
            progress=found.steps[-1] if found.steps else None,
            result=found.result,
            problem=found.problem,
        )


class WaitQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long the answer may wait for the end of what was begun."""

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=_LONGEST_WAIT_S)] = 0.0


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which operations to list, and from where on."""

    state: tuple[OperationState, ...] = ()
    kind: str | None = None
    """The kind, or its noun."""
    target: str | None = None


class EventsQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    after: int = 0
    """The `id` of the last event that is known; `Last-Event-ID` says the same."""


async def begin(
    call: Call,
    kind: str,
    target: str,
    scope: Scope,
    work: Work,
    *,
    wait_s: float = 0.0,
    project: str = "",
    keyed: bool = True,
) -> OperationView:
    """Begin some work for a call, whose answer is the operation and tells where it is; a call that is `keyed` may have
    an idempotency key. Raises InvalidSpec for one that is none, LimitReached, and Conflict for one that was used."""
    operations, key = call.server.operations, call.header("idempotency-key") if keyed else None
    if key is not None and not (0 < len(key) <= 256 and key.isprintable()):
        raise InvalidSpec("Idempotency-Key: 1 to 256 printable characters", field="Idempotency-Key")
    found = await operations.begin(kind, target, work, principal=call.principal, scope=scope, project=project, key=key)
    call.headers["location"] = f"{PREFIX}/operations/{found.id}"
    return OperationView.of(found) if not wait_s else await show(call, found.id, WaitQuery(wait_s=wait_s))


@routes.get("/operations", Scope.READ)
async def list(call: Call, query: ListQuery) -> Page[OperationView]:
    """Operations that run, and those that ended within a day, the oldest first."""
    fits = [
        each
        for each in await call.server.operations.list(call.manager.store)
        if (not query.state or each.state in query.state)
        and (query.kind is None or query.kind in (each.kind, each.kind.partition(".")[0]))
        and query.target in (None, each.target)
    ]
    return page_of([OperationView.of(each) for each in fits], query)


@routes.get("/operations/{id}", Scope.READ)
async def show(call: Call, id: str, query: WaitQuery) -> OperationView:
    """An operation; with `wait_s` when it has ended, or that time is over."""
    operations, store = call.server.operations, call.manager.store
    if query.wait_s:
        return OperationView.of(await operations.wait(store, id, query.wait_s))
    return OperationView.of(await operations.get(store, id))


@routes.get("/operations/{id}/events", Scope.READ, content_type=EVENTS, headers=("Last-Event-ID",))
async def events(call: Call, id: str, query: EventsQuery) -> Streamed:
    """What an operation tells, as server-sent events: `progress` for each step, with its place as the id, and last
    `end` with the operation. Of very many steps the oldest are not told again."""
    after = place_after(call, query.after)
    await call.server.operations.get(call.manager.store, id)
    return await send_events(call, _told(call, id, after))


async def _told(call: Call, id: str, after: int) -> AsyncGenerator[bytes, None]:
    yield comment("begun")
    async with closing(call.server.operations.follow(call.manager.store, id, after)) as told:
        async for each in told:
            if isinstance(each, Step):
                yield frame("progress", each, id=each.seq)
            else:
                yield frame("end", OperationView.of(each))


@routes.post("/operations/{id}/cancel", Scope.READ)
async def cancel(call: Call, id: str) -> OperationView:
    """Have an operation ended, and what it has half done taken back. It needs the scope of the call that began it."""
    operations, store = call.server.operations, call.manager.store
    found = await operations.get(store, id)
    if not call.principal.may(found.scope):
        raise NotPermitted(f"this operation needs the scope {found.scope}, which the token does not have")
    return OperationView.of(await operations.cancel(store, id))
