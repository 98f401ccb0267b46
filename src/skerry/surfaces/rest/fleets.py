"""Fleets: many sandboxes in phases, started, seen, commanded and ended as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from skerry.errors import CreateFailed, InvalidSpec
from skerry.fleet import load
from skerry.fleet.events import FleetEvent, OnEvent, Report
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec
from skerry.fleet.plan import Plan, graph_lines
from skerry.fleet.status import MemberStatus, is_ready
from skerry.model.records import PHASE_LABEL
from skerry.model.tenants import Scope
from skerry.surfaces.rest.operations import OperationView, WaitQuery, begin
from skerry.surfaces.rest.route import Call, Routes
from skerry.surfaces.rest.specs import for_tenant, refuse_weaker
from skerry.surfaces.rest.views import Page, PageQuery, page_of
from skerry.surfaces.server.fleets import FleetShape, PhaseShape, by_fleet
from skerry.surfaces.server.operations import Tell, Unfinished

routes = Routes("fleets")
Grace = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class FleetBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fleet is to be: the text of its file, ours or docker-compose's, or a spec that was read already."""

    file: str | None = None
    spec: FleetSpec | None = None


class Scale(FleetBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many members phases are to have. After a restart of the server it needs the fleet's file as well."""

    counts: dict[str, int]


class StopBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    volumes: bool = False
    """Their volumes too."""
    grace_s: Grace | None = None


class ProjectQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose it is, where several projects have a fleet of that name; for a tenant always its own."""

    project: str | None = None


class ChangeQuery(WaitQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    project: str | None = None


class DownQuery(ChangeQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    volumes: bool = False
    """Their volumes too."""
    grace_s: Grace | None = None
    """Seconds that processes have to end after SIGTERM."""


class ShowQuery(ProjectQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_s: Annotated[float, msgspec.Meta(ge=0, le=60)] = 2.0
    """For agents to answer; one that does not is told as unreachable."""


class FleetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet in a list."""

    id: str
    """Project and name."""
    name: str
    project: str
    phases: int
    members: int
    ready: int
    created_at: float | None
    """When its first member was made; null if it has none."""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet, and how each member is."""

    id: str
    name: str
    project: str
    phases: tuple[PhaseShape, ...]
    """What waits for what, as far as that is known."""
    members: dict[str, MemberStatus]
    operation: str | None
    """The operation that changes it right now."""
    changeable: bool
    """This server has its file, so that it can be scaled without it."""


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """What starting a fleet would change."""

    fleet: str
    plan: Plan
    changed: bool
    graph: tuple[str, ...]
    """What waits for what, as a tree in text."""


# seeing


@routes.get("/fleets", Scope.READ)
async def list(call: Call, query: PageQuery) -> Page[FleetSummary]:
    """Fleets, by project and name."""
    members = by_fleet(await call.manager.list())
    shapes = {(each.project, each.name): each for each in await call.server.fleets.shapes(call.manager.store)}
    found = []
    for project, name in sorted({*members, *shapes}):
        records, shape = members.get((project, name), []), shapes.get((project, name))
        phases = {record.spec.labels.get(PHASE_LABEL) for record in records}
        found.append(
            FleetSummary(
                id=f"{project}/{name}",
                name=name,
                project=project,
                phases=len(phases) if shape is None else len(shape.phases),
                members=len(records) if shape is None else sum(phase.count for phase in shape.phases),
                ready=sum(map(is_ready, records)),
                created_at=min((record.created_at for record in records), default=None),
            )
        )
    return page_of(found, query)


@routes.get("/fleets/{name}", Scope.READ)
async def show(call: Call, name: str, query: ShowQuery) -> FleetView:
    """A fleet and how each member is; every agent is asked at once."""
    project = await project_of(call, name, query.project)
    fleet = await call.server.fleets.find(call.manager, project, name)
    members = await fleet.status(timeout_s=query.timeout_s)
    shape = await call.server.fleets.shape(call.manager.store, project, name) or _shape_of(project, name, members)
    running = call.server.operations.running(project, name, "fleet.")
    return FleetView(
        id=f"{project}/{name}",
        name=name,
        project=project,
        phases=shape.phases,
        members=members,
        operation=None if running is None else running.id,
        changeable=fleet.spec is not None,
    )


@routes.post("/fleets/{name}/plan", Scope.READ)
async def plan(call: Call, name: str, query: ProjectQuery, body: FleetBody) -> PlanView:
    """What starting a fleet would change, by what the registry knows now. Changes nothing."""
    spec = await _spec(call, name, query.project, body)
    if spec is None:
        fleet = await call.server.fleets.find(call.manager, await project_of(call, name, query.project), name)
    else:
        fleet = AsyncFleet(call.manager, spec)
    found = await fleet.plan()
    assert fleet.spec is not None
    graph = tuple(graph_lines(fleet.spec))
    return PlanView(fleet=name, plan=found, changed=not found.is_empty, graph=graph)


# changing


@routes.put("/fleets/{name}", Scope.CREATE, status=202, headers=("Idempotency-Key",))
async def up(call: Call, name: str, query: ChangeQuery, body: FleetBody) -> OperationView:
    """Make a fleet what its file says; the answer is the operation, whose result is a report of each phase. What is as
    it should be is not touched. Variables without a value and files of the host are for its owner alone."""
    spec = await _spec(call, name, query.project, body)
    if spec is None:
        raise InvalidSpec("file: give the text of its file, or a spec", field="file")
    await call.server.fleets.refuse_taken(call.manager, spec)

    async def work(fleet: AsyncFleet, on_event: OnEvent) -> Report:
        fleet.spec = spec  # not before it has begun: the operation may be refused
        await call.server.fleets.keep(call.manager.store, spec)
        return await fleet.up(on_event=on_event)

    fleet = await call.server.fleets.get(call.manager, spec.project, name)
    return await _start(call, "fleet.up", spec.project, fleet, work, query.wait_s)


@routes.post("/fleets/{name}/scale", Scope.CREATE, status=202, headers=("Idempotency-Key",))
async def scale(call: Call, name: str, query: ChangeQuery, body: Scale) -> OperationView:
    """Have so many members in these phases; the answer is the operation."""
    project, fleet = await _known(call, name, query.project, body)

    async def work(fleet: AsyncFleet, on_event: OnEvent) -> Report:
        report = await fleet.scale(body.counts, on_event=on_event)
        if fleet.spec is not None:
            await call.server.fleets.keep(call.manager.store, fleet.spec)
        return report

    return await _start(call, "fleet.scale", project, fleet, work, query.wait_s)


@routes.post("/fleets/{name}/phases/{phase}/start", Scope.CREATE, status=202)
async def start_phase(call: Call, name: str, phase: str, query: ChangeQuery, body: FleetBody) -> OperationView:
    """Start one phase; the answer is the operation. After a restart of the server it needs the fleet's file."""
    project, fleet = await _known(call, name, query.project, body)

    async def work(fleet: AsyncFleet, on_event: OnEvent) -> Report:
        return await fleet.start_phase(phase, on_event=on_event)

    return await _start(call, "fleet.start", project, fleet, work, query.wait_s)


@routes.post("/fleets/{name}/phases/{phase}/stop", Scope.DESTROY, status=202)
async def stop_phase(call: Call, name: str, phase: str, query: ChangeQuery, body: StopBody) -> OperationView:
    """End every member of a phase; the answer is the operation."""
    project = await project_of(call, name, query.project)
    fleet = await call.server.fleets.find(call.manager, project, name)

    async def work(tell: Tell) -> Any:
        told = _told(tell)
        gone = await fleet.stop_phase(phase, volumes=body.volumes, grace_s=body.grace_s, on_event=told)
        return {"destroyed": gone}

    return await begin(call, "fleet.stop", name, Scope.DESTROY, work, wait_s=query.wait_s, project=project)


@routes.delete("/fleets/{name}", Scope.DESTROY, status=202)
async def down(call: Call, name: str, query: DownQuery) -> OperationView:
    """End every member, the phases in the reverse order of their start; the answer is the operation. A start that runs
    is given up first."""
    project = await project_of(call, name, query.project)
    fleet = await call.server.fleets.find(call.manager, project, name)

    async def work(tell: Tell) -> Any:
        gone = await fleet.down(volumes=query.volumes, grace_s=query.grace_s, on_event=_told(tell))
        await call.server.fleets.forget(call.manager, project, name)
        return {"destroyed": gone}

    return await begin(call, "fleet.down", name, Scope.DESTROY, work, wait_s=query.wait_s, project=project)


async def project_of(call: Call, name: str, given: str | None) -> str:
    """The project of a fleet. Raises NotFound, and Conflict if several projects have one of that name."""
    return await call.server.fleets.project_of(call.manager, name, call.principal.tenant, given)


async def _spec(call: Call, name: str, given: str | None, body: FleetBody) -> FleetSpec | None:
    """The fleet that a body describes, as whoever calls may have it; None if it describes none. Raises InvalidSpec,
    InvalidFleet and NotPermitted."""
    tenant, spec = call.principal.tenant, body.spec
    if body.file is not None:
        if spec is not None:
            raise InvalidSpec("file: give the text of its file, or a spec, not both", field="file")
        config = call.manager.config
        spec = await asyncio.to_thread(
            load.load,
            Path("/", name, "fleet.yaml"),
            body.file,
            provider=config.provider,
            asks_providers=True,
            sets=config.network.sets,
            is_foreign=not call.principal.is_admin,
        )
    if spec is None:
        return None
    if spec.name != name:
        raise InvalidSpec(f"name: it is called {spec.name!r} there, and {name!r} here", field="name")
    wanted = tenant or given
    if wanted is not None and spec.project not in (wanted, spec.name):
        raise InvalidSpec(f"project: it can be {wanted!r} alone, not {spec.project!r}", field="project")
    phases = spec.phases
    if not call.principal.is_admin:
        phases = tuple(msgspec.structs.replace(each, spec=for_tenant(each.spec)) for each in phases)
        for each in phases:
            refuse_weaker(call.manager, each.spec)
    return msgspec.structs.replace(spec, project=wanted or spec.project, phases=phases)


async def _known(call: Call, name: str, given: str | None, body: FleetBody) -> tuple[str, AsyncFleet]:
    """A fleet that there is, with what a body says of it."""
    project = await project_of(call, name, given)
    spec = await _spec(call, name, given, body)
    await call.server.fleets.find(call.manager, project, name)
    return project, await call.server.fleets.get(call.manager, project, name, spec)


async def _start(
    call: Call,
    kind: str,
    project: str,
    fleet: AsyncFleet,
    work: Callable[[AsyncFleet, OnEvent], Awaitable[Report]],
    wait_s: float,
) -> OperationView:
    async def told(tell: Tell) -> Any:
        report = await work(fleet, _told(tell))
        result = {"ok": report.ok, **msgspec.to_builtins(report)}
        if not report.ok:
            raise Unfinished(CreateFailed(_why(report)), result)
        return result

    return await begin(call, kind, fleet.name, Scope.CREATE, told, wait_s=wait_s, project=project)


def _told(tell: Tell) -> OnEvent:
    def on_event(event: FleetEvent) -> None:
        tell(event.line, data=msgspec.to_builtins(event))

    return on_event


def _why(report: Report) -> str:
    """Why a fleet is not as it should be, in some lines."""
    failed = {name: phase for name, phase in report.phases.items() if not phase.ok}
    lines = [f"fleet {report.fleet!r}: {len(failed)} of {len(report.phases)} phases are not whole"]
    lines += [f"{name} is {phase.state}, {phase.ready}/{phase.total} ready" for name, phase in failed.items()]
    errors = [*report.errors.items(), *(each for phase in failed.values() for each in phase.errors.items())]
    lines += [f"{member}: {error}" for member, error in errors]
    return "\n".join(lines[:20])[:4000]


def _shape_of(project: str, name: str, members: dict[str, MemberStatus]) -> FleetShape:
    """As much of a fleet's shape as its members tell."""
    counts: dict[str, int] = {}
    for each in members.values():
        counts[each.phase] = counts.get(each.phase, 0) + 1
    phases: Sequence[PhaseShape] = [PhaseShape(name=phase, count=count) for phase, count in counts.items()]
    return FleetShape(name=name, project=project, phases=tuple(phases))
