"""Sandboxes by E2B's control plane: made, found, kept alive, paused and killed."""

from __future__ import annotations

import datetime
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

import msgspec
from starlette.responses import Response
from starlette.routing import BaseRoute

from skerry.aio import run_to_end
from skerry.errors import Conflict, FileError, InvalidSpec, NotFound, SkerryError, Unsupported
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.model.tenants import Scope
from skerry.sandbox.users import account
from skerry.surfaces.e2b import egress, headers, wire
from skerry.surfaces.e2b.answers import answer
from skerry.surfaces.e2b.box import E2bSandbox
from skerry.surfaces.e2b.kept import Kept, Network
from skerry.surfaces.e2b.pages import paged
from skerry.surfaces.e2b.route import Call, Surface, route
from skerry.surfaces.rest.specs import refuse_addresses

if TYPE_CHECKING:
    from skerry.model.spec import SpecOptions

_MOST_LISTED = 100
_HOME = "/home/user"
_PROFILE = 'if [ -d /.skerry/bin ]; then PATH="$PATH:/.skerry/bin"; fi\n'
"""What a login shell, which every command of the SDK is, needs to find `python` in a box that has this host's files."""
_SAMPLE_S = 5.0
"""What is measured now stands for so long before."""


def routes(surface: Surface) -> list[BaseRoute]:
    """Their calls, by today's paths and the older ones."""
    table = (
        ("POST", "", Scope.CREATE, create),
        ("GET", "", Scope.READ, list_all),
        ("GET", "/metrics", Scope.READ, all_metrics),
        ("GET", "/{id}", Scope.READ, show),
        ("DELETE", "/{id}", Scope.DESTROY, kill),
        ("POST", "/{id}/connect", Scope.CREATE, connect),
        ("POST", "/{id}/resume", Scope.CREATE, resume),
        ("POST", "/{id}/timeout", Scope.CREATE, set_timeout),
        ("POST", "/{id}/refreshes", Scope.CREATE, refresh),
        ("POST", "/{id}/pause", Scope.DESTROY, pause),
        ("GET", "/{id}/metrics", Scope.READ, metrics),
        ("PUT", "/{id}/network", Scope.NETWORK, set_network),
        ("POST", "/{id}/fork", Scope.CREATE, fork),
    )
    return [
        route(surface, method, f"{prefix}/sandboxes{path}", scope, handler)
        for prefix in ("", "/v2")
        for method, path, scope, handler in table
    ]


async def create(call: Call) -> Response:
    """Make a sandbox of a template or a snapshot."""
    asked = await call.body(wire.NewSandbox)
    if asked.iam:
        raise Unsupported("iam", "e2b", "there are no identity tokens here; secrets can be put into requests")
    template = await call.templates.find(asked.template_id, call)
    network = egress.read(asked.network)
    _refuse_addresses(call, network)
    rules = headers.read(asked.network)
    await headers.check(rules, call.secrets, call.project)
    hosts = headers.secrets_of(rules)
    way = egress.way_of(network, asked.allow_internet_access, template.allow, rules, rules)
    auto_pause = bool(asked.auto_pause)
    options: SpecOptions = {
        **template.options(),
        "lifetime": None if auto_pause else float(asked.timeout) + 30.0,
        "idle": None,
        "timeout": None,
    }
    env = {**options.get("env", {}), **(asked.env_vars or {})}
    options["env"] = env
    if options.get("network", "rules") == "rules":
        if way.allow or template.allow or rules or "network" in options:  # else there is nothing that it could reach
            options |= {"network": "rules", "allow": way.allow, "deny": way.deny, "secrets": hosts}
    elif asked.allow_internet_access is False or network.allow_out or network.deny_out or rules:
        raise InvalidSpec("network: this template's own network has no rules", field="network")
    if asked.volume_mounts:
        provider = call.manager.complete(None, options).provider
        options |= await call.volumes.mounted(asked.volume_mounts, provider, call)
    kept = Kept(
        template=template.id,
        alias=template.alias,
        metadata=asked.metadata or {},
        timeout_s=float(asked.timeout),
        auto_pause=auto_pause,
        pauses_memory=asked.auto_pause_memory is not False,
        auto_resume=asked.auto_resume is not None and asked.auto_resume.enabled,
        user=template.user,
        secure=asked.secure is not False,
        internet=asked.allow_internet_access,
        network=network,
    )
    box = await make(call, call.manager.complete(None, options), kept, call.request.headers.get("idempotency-key"))
    if rules:
        await _give_headers(call, box, rules)
    if template.template.admin:
        await _give_home(box)
    if not template.has_files:
        with suppress(FileError):  # there is no such home
            await box.sandbox.files.write(f"{_HOME}/.profile", _PROFILE)
    return answer(wire.created(box, call.domain), 201)


async def _give_headers(call: Call, box: E2bSandbox, rules: headers.Rules) -> None:
    """Have the gate know the headers of a new sandbox, or end it."""
    call.boxes.headers[box.id] = rules
    try:
        await headers.provide(box, rules, call.secrets)
    except BaseException:
        await run_to_end(box.kill())
        raise


async def _give_home(box: E2bSandbox) -> None:
    """Give the folder where commands start to the sandbox's user: in a box that is root's it is root's."""
    user = (await account(box.sandbox, box.default_user)).user
    with suppress(FileError):
        await box.sandbox.files.chown(_HOME, user.uid, user.gid)


async def make(call: Call, spec: Spec, kept: Kept, key: str | None = None) -> E2bSandbox:
    """Make a sandbox, or with the same key find that which was made. What the host's owner wrote into a template is
    theirs to give, so the spec is not looked at as one that a tenant wrote."""
    sandbox = await call.manager.create(spec, key=key)
    kept = kept.begun()
    try:
        await take_in(call, sandbox.id, kept, dict(spec.env))
    except Conflict:
        if key is None:
            raise
    return await call.boxes.get(sandbox.id, call.principal)


async def take_in(call: Call, id: SandboxId, kept: Kept, env: dict[str, str]) -> None:
    """Have E2B's clients know a sandbox. Raises Conflict if they do."""
    call.boxes.envs[id] = env
    try:
        await call.boxes.add(id, kept, call.project)
    except Conflict:
        raise
    except BaseException:
        await call.manager.destroy(id, grace_s=0.0)
        raise


async def show(call: Call) -> dict[str, Any]:
    return wire.detailed(await call.box(), call.domain)


async def list_all(call: Call) -> Response:
    """Sandboxes, the newest first, a page at a time; the next one is named in a header."""
    query = call.request.query_params
    boxes = await call.boxes.all(call.principal)
    states = {state for text in query.getlist("state") for state in text.split(",") if state}
    wanted = dict(parse_qsl(query.get("metadata", ""), keep_blank_values=True))
    wanted = {unquote(name): unquote(value) for name, value in wanted.items()}
    found = [
        (box.kept.started_at, box.name, box)
        for box in boxes
        if (not states or ("paused" if box.is_paused else "running") in states)
        and all(box.kept.metadata.get(name) == value for name, value in wanted.items())
        and query.get("template", box.kept.template) in (box.kept.template, box.kept.alias)
        and box.kept.started_at >= _time_of(query.get("startedAfter"))
    ]
    page, headers = paged(found, query.get("limit"), query.get("nextToken"), is_ascending=query.get("order") == "asc")
    return answer([wire.listed(box) for box in page], 200, headers)


async def kill(call: Call) -> Response:
    await (await call.box()).kill()
    return answer(status=204)


async def connect(call: Call) -> Response:
    """Tell how to reach a sandbox, and have it live for so long from now at the least; resume one that is paused."""
    timeout = (await call.body(wire.Connect)).timeout
    box = await call.box()
    was_paused = await box.connect(None if timeout is None else float(timeout))
    if rules := call.boxes.headers.get(box.id):
        await headers.provide(box, rules, call.secrets)  # the gate may have been started anew meanwhile
    return answer(wire.created(box, call.domain), 201 if was_paused else 200)


async def resume(call: Call) -> Response:
    """Resume a paused sandbox, as SDKs of old ask for it. Raises Conflict if it runs."""
    timeout = (await call.body(wire.Connect)).timeout
    box = await call.box()
    if not await box.connect(None if timeout is None else float(timeout)):
        raise Conflict(f"sandbox {box.name} runs already")
    return answer(wire.created(box, call.domain), 201)


async def set_timeout(call: Call) -> Response:
    asked = await call.body(wire.SetTimeout)
    box = await call.box()
    if box.is_paused:
        raise NotFound(f"sandbox {box.name} was not found among those that run")
    await box.set_timeout(float(asked.timeout))
    return answer(status=204)


class _Refresh(msgspec.Struct, frozen=True):
    duration: wire.Timeout = 15


async def refresh(call: Call) -> Response:
    """Keep a sandbox alive for so long from now at the least, as SDKs of old ask for it."""
    asked = await call.body(_Refresh)
    await (await call.box()).set_timeout(float(asked.duration), longer=True)
    return answer(status=204)


async def pause(call: Call) -> Response:
    asked = await call.body(wire.Pause)
    await (await call.box()).pause(memory=asked.memory is not False)
    return answer(status=204)


async def metrics(call: Call) -> list[dict[str, Any]]:
    """What a sandbox uses now, if that is asked for: nobody here keeps what it used before."""
    box, end = await call.box(), call.request.query_params.get("end", "")
    is_past = end.isascii() and end.isdecimal() and time.time() > int(end) + _SAMPLE_S
    return [] if is_past or not box.is_running else [await _measure(box)]


async def all_metrics(call: Call) -> dict[str, Any]:
    """What several sandboxes use now, by their ids."""
    asked = {name for text in call.request.query_params.getlist("sandbox_ids") for name in text.split(",")}
    boxes = [box for box in await call.boxes.all(call.principal) if box.name in asked and box.is_running]
    return {"sandboxes": {box.name: await _measure(box) for box in boxes[:_MOST_LISTED]}}


async def _measure(box: E2bSandbox) -> dict[str, Any]:
    found, now = await box.sandbox.metrics(), time.time()
    spec = box.record.spec
    return {
        "timestamp": wire.instant(now),
        "timestampUnix": int(now),
        "cpuCount": max(1, round(spec.cpus or 1)),
        "cpuUsedPct": found.cpu_percent,
        "memUsed": found.memory_bytes,
        "memTotal": spec.memory or (512 << 20),
        "memCache": 0,
        "diskUsed": found.disk.used,
        "diskTotal": found.disk.total,
    }


async def set_network(call: Call) -> Response:
    """Have these rules and no others, beside what the template allows."""
    given = await call.body(dict[str, Any])
    box = await call.box()
    internet = given.pop("allow_internet_access", None)
    network = egress.read(given)
    _refuse_addresses(call, network)
    kept = box.kept.network
    network = msgspec.structs.replace(
        network, allow_public_traffic=kept.allow_public_traffic, mask_request_host=kept.mask_request_host
    )
    rules, hosts = headers.read(given), headers.hosts_of(box.record.spec.secrets)
    if more := sorted(rules.keys() - hosts.keys()):
        reason = (
            f"headers are put into requests for hosts that were named when the sandbox was made, and {more[0]} was not"
        )
        raise Unsupported("network.rules", box.record.spec.provider, reason)
    await headers.check(rules, call.secrets, box.project)
    allowed = await call.templates.allowed(box.kept.template, call)
    way = egress.way_of(network, internet, allowed, rules, hosts)
    if hosts:
        call.boxes.headers[box.id] = rules
        await headers.provide(box, rules, call.secrets)
    if way.allow or box.record.spec.network != "none":  # which is nothing to reach already
        await box.sandbox.network.set(allow=way.allow, deny=way.deny)
    await box.change(network=network, internet=internet)
    return answer(status=204)


def _refuse_addresses(call: Call, network: Network) -> None:
    """Raise NotPermitted for a tenant that would open single addresses."""
    if not call.principal.is_admin:
        refuse_addresses(network.allow_out)


async def fork(call: Call) -> Response:
    """Make sandboxes with the files that one has now; each that cannot be made says why."""
    asked = await call.body(wire.Fork)
    box = await call.box()
    if box.record.state not in (State.READY, State.PAUSED, State.ASLEEP):
        raise NotFound(f"sandbox {box.name} was not found")
    return answer([await _fork(call, box, asked.timeout) for _ in range(asked.count)], 201)


async def _fork(call: Call, box: E2bSandbox, timeout_s: float) -> dict[str, Any]:
    env = call.boxes.envs.get(box.id, {})
    try:
        lifetime = None if box.kept.auto_pause else timeout_s + 30.0
        made = await box.manager.fork(box.id, lifetime=lifetime, env=env)
        kept = msgspec.structs.replace(box.kept, timeout_s=timeout_s, paused=False).begun()
        await take_in(call, made.id, kept, env)
        forked = await call.boxes.get(made.id, call.principal)
        if rules := call.boxes.headers.get(box.id):
            await _give_headers(call, forked, rules)
        return {"sandbox": wire.created(forked, call.domain)}
    except SkerryError as error:
        return {"error": {"code": 500, "message": error.message}}


def _time_of(text: str | None) -> float:
    """A time of RFC 3339, whose + may have become a blank on its way."""
    if text is None:
        return 0.0
    try:
        return msgspec.convert(text.replace(" ", "+"), datetime.datetime).timestamp()
    except msgspec.ValidationError:
        raise InvalidSpec("startedAfter: it is no time", field="startedAfter") from None
