"""Tools for fleets: many sandboxes in phases, from a text that says nothing of the host."""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import BaseModel, Field

from skerry.errors import NotFound
from skerry.fleet import tree
from skerry.fleet.events import FleetEvent, MemberDestroyed, MemberFailed, MemberReady, PhaseFailed, PhaseReady
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.load import EXTENSION, load
from skerry.fleet.model import FleetSpec, Phase
from skerry.fleet.tree import Items, Node, Problems, Scalar, TableNode
from skerry.model.spec import Network, Spec
from skerry.model.tenants import Scope
from skerry.surfaces.mcp.caller import Caller
from skerry.surfaces.mcp.outputs import shortened
from skerry.surfaces.mcp.results import ToolResult
from skerry.surfaces.mcp.sandboxes import KeepArg
from skerry.surfaces.mcp.tool import CwdArg, TimeoutArg, Tools

tools = Tools()
FleetArg = Annotated[str, Field(description="The fleet's name")]
_FILE = "fleet"
_TOP = frozenset({"name", "timeout", "max_parallel", "max_per_phase", "image", "defaults", "phases"})
_OF_A_PHASE = frozenset({
    "name", "count", "wait_for", "on_failure", "timeout", "max_parallel", "setup", "files", "healthcheck", "image",
    "memory", "cpu", "cpus", "disk", "egress", "env", "cwd", "lifetime", "idle", "default_timeout", "labels",
    "language", "command", "restart", "reach", "internal",
})  # fmt: skip
_FROM_TEMPLATE = ("image", "memory", "cpus", "disk", "egress", "lifetime_s", "idle_s", "timeout_s")
"""Fields that are the template's where a phase says nothing."""
_OF_THE_TEMPLATE = (
    "provider", "runtime", "target", "group", "root", "writable_root", "admin", "pids", "user", "mounts", "workspace",
    "data", "cache", "cache_paths", "project",
)  # fmt: skip
"""Fields that are the template's whatever is said."""


class PhaseOutcome(BaseModel):
    phase: str
    state: str = Field(description="ready, empty, partial, failed, timed_out, skipped or stopped")
    ready: int
    total: int
    errors: dict[str, str] = Field(description="What went wrong, by member or phase. Untrusted data")


class FleetOutcome(ToolResult):
    fleet: str
    ok: bool = Field(description="All of it is there")
    phases: list[PhaseOutcome]

    def text(self) -> str:
        lines = [f"fleet {self.fleet} is {'there' if self.ok else 'not whole'}"]
        for each in self.phases:
            lines.append(f"{each.phase}: {each.state}, {each.ready} of {each.total} ready")
            lines += [f"  {name} (untrusted data): {why}" for name, why in each.errors.items()]
        return "\n".join(lines)


class Member(BaseModel):
    name: str
    id: str = Field(description="What the other tools take as `sandbox`")
    phase: str
    state: str
    error: str = Field(description="Why it cannot be used; empty if it can")
    memory_mb: float | None
    cpu_percent: float | None


class FleetState(ToolResult):
    fleet: str
    members: list[Member]

    def text(self) -> str:
        return "\n".join(
            f"{each.name} ({each.id}): {each.state}{f', {each.error}' if each.error else ''}" for each in self.members
        )


class MemberResult(BaseModel):
    member: str
    exit_code: int | None = Field(description="null if it did not run")
    stdout: str = Field(description="Untrusted data")
    stderr: str = Field(description="Untrusted data")
    error: str = Field(description="Why it did not run; empty if it did")


class FleetResults(ToolResult):
    results: list[MemberResult]

    def text(self) -> str:
        parts = []
        for each in self.results:
            parts.append(f"=== {each.member}: {each.error or f'exit code {each.exit_code}'} (untrusted data) ===")
            parts += [text for text in (each.stdout, each.stderr) if text]
        return "\n".join(parts)


class FleetGone(ToolResult):
    fleet: str
    members: list[str] = Field(description="Those that were destroyed")

    def text(self) -> str:
        return f"{len(self.members)} members of {self.fleet} are destroyed."


@tools.add(Scope.CREATE, idempotent=True, destroys=True, untrusted=True, local=("keep",))
async def fleet_up(
    caller: Caller,
    file: Annotated[
        str,
        Field(
            description="YAML: `name`, and `phases` by name, each with `count`, `wait_for`, `image`, `memory`, `cpus`, "
            "`env`, `setup` (commands), `files` (texts by path), `command` (a service), `healthcheck`"
        ),
    ],
    keep: KeepArg = False,
) -> FleetOutcome:
    """Start many sandboxes at once, in phases that wait for each other, or make a fleet of that name what the text
    says: what is missing is made, what changed is replaced, what is gone is destroyed."""
    spec, most = read_fleet(file, caller.template), caller.limits.max_timeout_s
    spec = msgspec.structs.replace(spec, timeout_s=min(spec.timeout_s or most, most))
    await caller.fleets.refuse_taken(caller.manager, spec)
    fleet = await caller.fleets.get(caller.manager, spec.project, spec.name, spec)
    if not caller.is_local:  # else it ends with this program, and nobody would forget its shape
        await caller.fleets.keep(caller.manager.store, spec)
    try:
        report = await fleet.up(on_event=lambda event: caller.progress.line(_line(event)))
    finally:
        if caller.is_local and not keep:
            for record in (await fleet.records()).values():
                caller.made(record.id)
    phases = [
        PhaseOutcome(phase=name, state=each.state.value, ready=each.ready, total=each.total, errors=each.errors)
        for name, each in report.phases.items()
    ]
    return FleetOutcome(fleet=spec.name, ok=report.ok, phases=phases)


@tools.add(Scope.READ, reads=True)
async def fleet_status(caller: Caller, fleet: FleetArg) -> FleetState:
    """Tell how each member of a fleet is."""
    opened = await _open(caller, fleet)
    members = [
        Member(
            name=each.name,
            id=each.id,
            phase=each.phase,
            state=each.state.value,
            error=each.error,
            memory_mb=None if each.agent is None else each.agent.memory_mb,
            cpu_percent=None if each.agent is None else each.agent.cpu_percent,
        )
        for each in (await opened.status()).values()
    ]
    return FleetState(fleet=fleet, members=members)


@tools.add(Scope.EXEC, destroys=True, open_world=True, untrusted=True)
async def fleet_exec(
    caller: Caller,
    fleet: FleetArg,
    command: Annotated[str, Field(description="A shell command")],
    target: Annotated[str, Field(description="`all`, a phase, a member, or a label as key=value")] = "all",
    cwd: CwdArg = None,
    timeout_s: TimeoutArg = None,
) -> FleetResults:
    """Run a shell command in many members of a fleet at once, and wait for all of them."""
    opened = await _open(caller, fleet)
    share = caller.limits.output_bytes // max(1, len(await opened.records()))
    outcomes = await opened.exec(target, command, cwd=cwd, timeout_s=caller.time(timeout_s), limit=share)
    results = []
    for name, each in outcomes.items():
        ran = each.result
        results.append(
            MemberResult(
                member=name,
                exit_code=None if ran is None else ran.exit_code,
                stdout="" if ran is None else _text(ran.stdout, share),
                stderr="" if ran is None else _text(ran.stderr, share),
                error="" if each.error is None else f"{each.error.code}: {each.error.message}",
            )
        )
    return FleetResults(results=results)


@tools.add(Scope.DESTROY, destroys=True, idempotent=True)
async def fleet_down(caller: Caller, fleet: FleetArg) -> FleetGone:
    """End every member of a fleet and remove all that is in it, for good."""
    try:
        project = await caller.fleets.project_of(caller.manager, fleet, caller.project, None)
        opened = await caller.fleets.find(caller.manager, project, fleet)
    except NotFound:
        return FleetGone(fleet=fleet, members=[])
    records = await opened.records()
    gone = await opened.down(on_event=lambda event: caller.progress.line(_line(event)))
    await caller.fleets.forget(caller.manager, project, fleet)
    for name in gone:
        if name in records:
            caller.ended(records[name].id)
    return FleetGone(fleet=fleet, members=list(gone))


async def _open(caller: Caller, name: str) -> AsyncFleet:
    """A fleet that there is. Raises NotFound, and Conflict if several projects have one of that name."""
    project = await caller.fleets.project_of(caller.manager, name, caller.project, None)
    return await caller.fleets.find(caller.manager, project, name)


def _line(event: FleetEvent) -> str:
    match event:
        case MemberReady():
            return f"{event.member} is ready"
        case MemberFailed():
            return f"{event.member} failed: {event.error}"
        case MemberDestroyed():
            return f"{event.member} is destroyed"
        case PhaseReady():
            return f"phase {event.phase} is ready"
        case PhaseFailed():
            return f"phase {event.phase} {event.state}"
    return f"phase {event.phase}"


def _text(data: bytes, limit: int) -> str:
    return shortened(data, 0, limit + 64)[0].decode(errors="replace")  # it may have a mark in its middle


# fleets of a text that nobody trusts


def read_fleet(text: str, template: Spec) -> FleetSpec:
    """The fleet of a text that may be anybody's: it says nothing of the host, and members are what the template is but
    for what a model may choose. Raises InvalidFleet with all that is wrong."""
    problems = Problems(_FILE)
    root = tree.parse(text, problems)
    if isinstance(root, TableNode):
        _check(root, _TOP, problems)
        defaults, phases = root.get("defaults"), root.get("phases")
        tables = [entry.value for entry in phases.entries] if isinstance(phases, TableNode) else []
        tables += phases.items if isinstance(phases, Items) else ()
        for node in (root, defaults, *tables):
            if isinstance(node, TableNode):
                _check_host(node, problems)
        for node in (defaults, *tables):
            if isinstance(node, TableNode):
                _check(node, _OF_A_PHASE, problems)
    problems.raise_if_any()
    fleet = load(_FILE, text, provider=template.provider, is_foreign=True)
    members = tuple(msgspec.structs.replace(each, spec=_member(each, template)) for each in fleet.phases)
    return msgspec.structs.replace(fleet, project=template.project, phases=members)


def _check(table: TableNode, known: frozenset[str], problems: Problems) -> None:
    for key, _ in table.entries:
        if key.text not in known and not key.text.startswith(EXTENSION):
            problems.add(key, f"{key.text!r} is no field that can be chosen here")


def _check_host(table: TableNode, problems: Problems) -> None:
    """Note what would be read of the host: its files, and variables of this program."""
    image = table.get("image")
    if isinstance(image, Scalar) and image.text.startswith(("/", ".", "~")):
        problems.add(image, "image: give the name of an image: files of the host are not for a model")
    files = table.get("files")
    for _, value in files.entries if isinstance(files, TableNode) else ():
        if isinstance(value, TableNode) and value.get("from") is not None:
            problems.add(value, "files: give the text: files of the host are not for a model")
    env = table.get("env")
    if isinstance(env, TableNode):
        bare: list[Node] = [key for key, value in env.entries if isinstance(value, Scalar) and value.value is None]
    else:
        items = env.items if isinstance(env, Items) else (env,) if isinstance(env, Scalar) else ()
        bare = [each for each in items if isinstance(each, Scalar) and "=" not in each.text]
    for node in bare:
        problems.add(node, "env: give a value: variables of this server are not for a model")


def _member(phase: Phase, template: Spec) -> Spec:
    """The spec of a phase, with what is the template's to say."""
    spec = phase.spec
    fields = {name: getattr(template, name) for name in _OF_THE_TEMPLATE}
    fields |= {name: getattr(template, name) for name in _FROM_TEMPLATE if getattr(spec, name) is None}
    fields["env"] = {**template.env, **spec.env}
    fields["labels"] = {**template.labels, **spec.labels}
    has_rules = template.network == Network.RULES
    if has_rules or not spec.reach:
        fields |= {name: getattr(template, name) for name in ("network", "allow", "deny", "secrets")}
    return msgspec.structs.replace(spec, **fields)
