"""Commands in many members of a fleet at once: to their ends, or as they speak, each line told by its member."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated

import msgspec

from skerry.aio import end
from skerry.errors import SkerryError
from skerry.fleet.broadcast import MemberOutcome, choose, refuse_unready
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import ALL
from skerry.model.records import Record
from skerry.model.tenants import Scope
from skerry.surfaces.rest.execution import ExecCommand, speaking
from skerry.surfaces.rest.fleets import ProjectQuery, project_of
from skerry.surfaces.rest.output import ExecView
from skerry.surfaces.rest.problems import Problem, make, problem_of
from skerry.surfaces.rest.route import EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import closing, comment, frame, send_events

routes = Routes("fleets")
_log = logging.getLogger("skerry.server")
_ALL_OUTPUT = 64 << 20
"""The most bytes of all outputs together that one answer has."""
_WAITING = 32
"""Pieces that wait for a client that reads slowly; the commands then wait too."""


class FleetCommand(ExecCommand, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command, and who is to run it."""

    target: str = ALL
    """`all`, a member, a phase, or a label `NAME=VALUE`."""
    at_once: Annotated[int, msgspec.Meta(ge=1, le=256)] = 128
    """How many run it at a time."""


class MemberExec(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the command in one member."""

    result: ExecView | None
    problem: Problem | None
    """Why it could not be run."""
    duration_s: float

    @classmethod
    def of(cls, outcome: MemberOutcome) -> MemberExec:
        return cls(
            result=None if outcome.result is None else ExecView.of(outcome.result),
            problem=None if outcome.error is None else problem_of(outcome.error),
            duration_s=outcome.duration_s,
        )


class FleetExec(msgspec.Struct, frozen=True, kw_only=True):
    ok: bool
    """It was run by all, and ended with 0."""
    members: dict[str, MemberExec]


@routes.post("/fleets/{name}/exec", Scope.EXEC)
async def run(call: Call, name: str, query: ProjectQuery, body: FleetCommand) -> FleetExec:
    """Run a command in many members, in parallel and as well as it goes; one outcome for each."""
    fleet, members = await _members(call, name, query, body.target)
    options = body.options()
    options["limit"] = min(options["limit"], _ALL_OUTPUT // (2 * max(1, len(members))))
    outcomes = await fleet.exec(body.target, body.command, at_once=body.at_once, **options)
    ok = all(outcome.ok for outcome in outcomes.values())
    return FleetExec(ok=ok, members={member: MemberExec.of(outcome) for member, outcome in outcomes.items()})


@routes.post("/fleets/{name}/exec/stream", Scope.EXEC, content_type=EVENTS)
async def stream(call: Call, name: str, query: ProjectQuery, body: FleetCommand) -> Streamed:
    """Run a command in many members, and tell what each says as it says it: events `stdout`, `stderr`, `exit` and
    `error`, each with its `member`, and last `end`. If the client goes away, all are killed."""
    _, members = await _members(call, name, query, body.target)
    return await send_events(call, _speaking(call, members, body), lasting=False)


async def _members(call: Call, name: str, query: ProjectQuery, target: str) -> tuple[AsyncFleet, Mapping[str, Record]]:
    """A fleet, and its members that are meant. Raises NotFound."""
    fleet = await call.server.fleets.find(call.manager, await project_of(call, name, query.project), name)
    phases = () if fleet.spec is None else [phase.name for phase in fleet.spec.phases]
    return fleet, choose(await fleet.records(), target, phases, name)


async def _speaking(call: Call, members: Mapping[str, Record], body: FleetCommand) -> AsyncGenerator[bytes, None]:
    pieces: asyncio.Queue[bytes | None] = asyncio.Queue(_WAITING)
    slots = asyncio.Semaphore(body.at_once)

    async def one(name: str, record: Record) -> None:
        async with slots:
            try:
                refuse_unready(record)
                sandbox = call.manager.handles.of(record)
                async with closing(speaking(call, sandbox, body, body.command, member=name)) as said:
                    async for piece in said:
                        await pieces.put(piece)
            except SkerryError as error:
                await pieces.put(_error(name, problem_of(error, call.id)))
            except Exception:  # the others go on
                _log.exception("request %s failed in %s", call.id, name)
                await pieces.put(_error(name, make(500, "internal", "the server failed; its log has more")))

    async def everyone() -> None:
        async with asyncio.TaskGroup() as group:
            for name, record in members.items():
                group.create_task(one(name, record))
        await pieces.put(None)

    running = asyncio.create_task(everyone())
    try:
        yield comment("begun")
        while (piece := await pieces.get()) is not None:
            yield piece
        yield frame("end", {"members": len(members)})
    finally:
        await end(running)


def _error(member: str, problem: Problem) -> bytes:
    return frame("error", {"member": member, **msgspec.to_builtins(problem)})
