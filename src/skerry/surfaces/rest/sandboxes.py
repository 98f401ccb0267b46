"""Sandboxes: made, shown, changed and ended."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from skerry.errors import CallTimeout, InvalidSpec, NotFound, SandboxGone
from skerry.manager.watch import Explanation
from skerry.model.records import Filter, Record
from skerry.model.results import Metrics, ServiceStatus
from skerry.model.states import State
from skerry.model.tenants import Scope
from skerry.surfaces.rest.output import Output
from skerry.surfaces.rest.problems import Refused
from skerry.surfaces.rest.route import BYTES, EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.specs import SpecBody
from skerry.surfaces.rest.streams import closing, comment, send_bytes, send_events
from skerry.surfaces.rest.views import Page, PageQuery, SandboxView

routes = Routes("sandboxes")


class CreateSandbox(SpecBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a sandbox is to be, in the words of `Spec.of`."""


class ListQuery(PageQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which sandboxes to list, and from where on."""

    state: tuple[State, ...] = ()
    provider: str | None = None
    project: str | None = None
    name: str | None = None
    label: tuple[str, ...] = ()
    """`NAME=VALUE`; all that are given must fit."""
    ended: bool = False
    """Those that have ended too."""


Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
"""How long a call may wait for something."""


class DestroyQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to end it."""

    volumes: bool = False
    """Remove its volumes too."""
    grace_s: Seconds | None = None
    """How long its processes have to end, after SIGTERM: 2 s if nothing is said."""


class ChangeSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to change of it; what is left out stays as it is."""

    lifetime: float | str | msgspec.UnsetType | None = msgspec.UNSET
    """Seconds from now, or as people write it: 2h; null is for ever."""
    idle: float | str | msgspec.UnsetType | None = msgspec.UNSET


class PauseSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    save: bool = False
    """Save its memory in files: nothing of it runs until it goes on, and it takes no memory."""


class StopSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    timeout_s: Seconds | None = None
    """How long its processes have to end, after SIGTERM: 5 s if nothing is said."""


class StartSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    env: dict[str, str] = {}
    """Its environment, which is kept nowhere: give it again, if it needs one."""


class WaitForSandbox(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    states: tuple[State, ...] = ()
    """Those to wait for; none is for its end."""
    timeout_s: Seconds = 60.0


class AddEnv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    env: dict[str, str]


class LogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    follow: bool = False
    tail: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    """Only so many of the last lines."""


class ServiceLogQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    follow: bool = False


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    service: ServiceStatus | None
    """State of its command; null if it has none, or has not begun it yet."""


@routes.post("/sandboxes", Scope.CREATE, status=201, headers=("Idempotency-Key",))
async def create(call: Call, body: CreateSandbox) -> SandboxView:
    """Make a sandbox, and answer when it can be used. The same call again with the same `Idempotency-Key` gives the
    same sandbox, also while it is being made."""
    spec = body.spec(call.manager, call.principal)
    sandbox = await call.manager.create(spec, key=call.header("idempotency-key"))
    return await show(call, sandbox.id)


@routes.get("/sandboxes", Scope.READ)
async def list(call: Call, query: ListQuery) -> Page[SandboxView]:
    """Sandboxes, the oldest first, a page at a time."""
    fits = Filter(
        states=frozenset(query.state),
        provider=query.provider,
        project=query.project,
        name=query.name,
        labels=_labels(query.label),
        include_ended=query.ended,
    )
    records = await call.manager.store.list(fits, after=query.after, limit=query.limit + 1)
    views = [SandboxView.of(record, call.principal) for record in records[: query.limit]]
    return Page(views, views[-1].id if len(records) > query.limit else None)


@routes.get("/sandboxes/{id}", Scope.READ)
async def show(call: Call, id: str) -> SandboxView:
    """All that is known of a sandbox, also when it has ended; by its id, the beginning of it, or its name."""
    return _shown(call, await call.manager.record(id))


@routes.delete("/sandboxes/{id}", Scope.DESTROY, headers=("If-Match",))
async def destroy(call: Call, id: str, query: DestroyQuery) -> None:
    """End a sandbox and remove all of it. One that has ended already is no error."""
    await _match(call, id)
    await call.manager.destroy(id, volumes=query.volumes, grace_s=query.grace_s)


@routes.patch("/sandboxes/{id}", Scope.CREATE, headers=("If-Match",))
async def change(call: Call, id: str, body: ChangeSandbox) -> SandboxView:
    """Change when a sandbox ends by itself. A lifetime that is given counts from now; one that is not stays as it
    is."""
    await _match(call, id)
    sandbox = await call.sandbox(id)
    record = await call.manager.record(sandbox.id)
    lifetime, idle = body.lifetime, body.idle
    if lifetime is msgspec.UNSET and idle is msgspec.UNSET:
        raise Refused(400, "give a lifetime, idle, or both", "invalid_request")
    if lifetime is msgspec.UNSET:
        left_s = record.left_s(call.manager.store.now())
        lifetime = left_s if left_s is None else max(left_s, 0.1)
    await sandbox.set_lifetime(lifetime, (record.spec.idle_s or None) if idle is msgspec.UNSET else idle)
    return await show(call, sandbox.id)


@routes.post("/sandboxes/{id}/pause", Scope.DESTROY, headers=("If-Match",))
async def pause(call: Call, id: str, body: PauseSandbox) -> SandboxView:
    """Freeze a sandbox, where the provider can; or save its memory in files and end its processes until it goes on."""
    sandbox = await _changing(call, id)
    await call.manager.pause(sandbox, save=body.save)
    return await show(call, sandbox)


@routes.post("/sandboxes/{id}/resume", Scope.DESTROY, headers=("If-Match",))
async def resume(call: Call, id: str) -> SandboxView:
    """Let a sandbox go on that is paused or asleep."""
    sandbox = await _changing(call, id)
    await call.manager.resume(sandbox)
    return await show(call, sandbox)


@routes.post("/sandboxes/{id}/stop", Scope.DESTROY, headers=("If-Match",))
async def stop(call: Call, id: str, body: StopSandbox) -> SandboxView:
    """End the processes of a sandbox and keep its files, where the provider can. Its lifetime goes on."""
    sandbox = await _changing(call, id)
    await call.manager.stop(sandbox, body.timeout_s)
    return await show(call, sandbox)


@routes.post("/sandboxes/{id}/start", Scope.DESTROY, headers=("If-Match",))
async def start(call: Call, id: str, body: StartSandbox) -> SandboxView:
    """Start a stopped sandbox again, for what is left of its lifetime."""
    sandbox = await _changing(call, id)
    await call.manager.start(sandbox, body.env)
    return await show(call, sandbox)


@routes.post("/sandboxes/{id}/wait", Scope.READ)
async def wait(call: Call, id: str, body: WaitForSandbox) -> SandboxView:
    """Answer when a sandbox is in one of the states, or has ended if none is given. If it never will be, or is not by
    then, that is an error."""
    sandbox = (await call.manager.record(id)).id
    try:
        record = await call.manager.wait(sandbox, set(body.states) or None, body.timeout_s)
    except TimeoutError:
        raise CallTimeout(f"it was in none of those states within {body.timeout_s:g} s") from None
    except NotFound as error:
        raise SandboxGone(error.message) from None
    return _shown(call, record)


@routes.get("/sandboxes/{id}/explain", Scope.READ)
async def explain(call: Call, id: str) -> Explanation:
    """Tell when a sandbox will end and why, or why it did."""
    return await call.manager.explain(id)


@routes.get("/sandboxes/{id}/metrics", Scope.READ)
async def metrics(call: Call, id: str) -> Metrics:
    """Memory, CPU, disk and processes of a sandbox now, as its agent measures them."""
    return await (await call.sandbox(id)).metrics()


@routes.post("/sandboxes/{id}/env", Scope.EXEC, status=204)
async def add_env(call: Call, id: str, body: AddEnv) -> None:
    """Add to the environment of all commands from now on. It is in no answer, and kept by its agent alone."""
    await (await call.sandbox(id)).set_env(body.env)


@routes.get("/sandboxes/{id}/logs", Scope.READ, content_type=BYTES)
async def logs(call: Call, id: str, query: LogQuery) -> Streamed:
    """The log of the box itself, such as its agent's last words, where the provider keeps it."""
    sandbox = (await call.manager.record(id)).id

    pieces = call.manager.logs(sandbox, follow=query.follow, tail=query.tail)
    return await send_bytes(call, pieces, lasting=query.follow)


@routes.get("/sandboxes/{id}/service", Scope.READ)
async def service(call: Call, id: str) -> ServiceView:
    """The state of the command that a sandbox was made with."""
    return ServiceView(service=await (await call.sandbox(id)).service.status())


@routes.get("/sandboxes/{id}/service/log", Scope.READ, content_type=EVENTS)
async def service_log(call: Call, id: str, query: ServiceLogQuery) -> Streamed:
    """The last 1 MiB that its command wrote, as events `stdout` and `stderr`; with `follow` also what it will write."""
    sandbox = await call.sandbox(id)

    async def pieces() -> AsyncIterator[bytes]:
        output = Output()
        if query.follow:
            yield comment("follows")
        async with closing(sandbox.service.logs(follow=query.follow)) as said:
            async for fd, data in said:
                for piece in output.add(fd, data):
                    yield piece
        for piece in output.end():
            yield piece

    return await send_events(call, pieces(), lasting=query.follow)


async def _changing(call: Call, reference: str) -> str:
    """The id of a sandbox whose state is to change. Raises NotFound, SandboxGone, and Refused if it is not as
    `If-Match` says."""
    record = await _match(call, reference)
    if not record.is_live:
        raise SandboxGone(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}")
    return record.id


async def _match(call: Call, reference: str) -> Record:
    """The record of a sandbox that is to change. Raises NotFound, and Refused if it is not as `If-Match` says."""
    record = await call.manager.record(reference)
    version = call.match()
    if version is not None and version != record.version:
        raise Refused(412, f"it has changed: its version is {record.version}", "precondition_failed")
    return record


def _shown(call: Call, record: Record) -> SandboxView:
    call.tag(record.version)
    return SandboxView.of(record, call.principal)


def _labels(texts: tuple[str, ...]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if any(not separator for _, separator, _ in pairs):
        raise InvalidSpec("label: write NAME=VALUE", field="label")
    return {name: value for name, _, value in pairs}
