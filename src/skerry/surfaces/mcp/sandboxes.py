"""Tools that make, list and end sandboxes, and keep their files as snapshots."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from skerry.errors import InvalidSpec
from skerry.manager.providers import has_data_of_name
from skerry.model.records import Record
from skerry.model.spec import SandboxId
from skerry.model.tenants import Scope
from skerry.pool.claim import key_of
from skerry.surfaces.mcp.caller import Caller
from skerry.surfaces.mcp.results import Destroyed, SandboxInfo, SandboxList, SnapshotInfo, SnapshotList
from skerry.surfaces.mcp.tool import EnvArg, SandboxArg, Tools

tools = Tools()
NameArg = Annotated[str | None, Field(description="A name to find it by: lower-case letters, digits, -")]
MemoryArg = Annotated[str | None, Field(description="E.g. 512M or 2G, for all processes together")]
CpusArg = Annotated[float | None, Field(description="E.g. 0.5 or 2")]
LifetimeArg = Annotated[str | None, Field(description="When it ends by itself, e.g. 30m or 2h")]
KeepArg = Annotated[bool, Field(description="Let it live on when this server ends")]
SnapshotArg = Annotated[str, Field(description="The name of a snapshot")]


@tools.add(Scope.CREATE, local=("keep",))
async def create_sandbox(
    caller: Caller,
    name: NameArg = None,
    image: Annotated[str | None, Field(description="The image, where the provider has images")] = None,
    snapshot: Annotated[str | None, Field(description="A snapshot whose files it begins with")] = None,
    memory: MemoryArg = None,
    cpus: CpusArg = None,
    disk: Annotated[str | None, Field(description="What it may write, e.g. 1G")] = None,
    egress: Annotated[str | None, Field(description="What it may send in a second, e.g. 10M")] = None,
    env: EnvArg = None,
    lifetime: LifetimeArg = None,
    keep: KeepArg = False,
) -> SandboxInfo:
    """Make a new sandbox: an isolated machine with its own files and processes. Destroy it when you are done."""
    limits = _given(memory=memory, cpus=cpus, disk=disk, egress=egress, lifetime=lifetime)
    given = limits | _given(name=name, image=image, snapshot=snapshot)
    if image is not None and image.startswith(("/", ".")):
        raise InvalidSpec("image: give the name of an image: files of the host are not for a model", field="image")
    if env:
        given["env"] = {**caller.template.env, **env}
    spec = caller.template.but(**given)
    ends_with_us = caller.is_local and not keep
    has_own_data = has_data_of_name(caller.manager.provider(spec.provider), spec)
    caller.progress.line("the sandbox is being made")
    if caller.pool is None or key_of(spec) != caller.pool.key or has_own_data:
        sandbox = await caller.manager.create(spec, ephemeral=ends_with_us)
    else:
        sandbox = await caller.pool.acquire(ephemeral=ends_with_us, **given)
    return await _shown(caller, sandbox.id, ends_with_us=ends_with_us)


@tools.add(Scope.READ, reads=True)
async def list_sandboxes(caller: Caller) -> SandboxList:
    """List the sandboxes that exist."""
    records, most = await caller.records(), caller.limits.items
    return SandboxList(sandboxes=[_info(caller, record) for record in records[:most]], more=len(records) > most)


@tools.add(Scope.DESTROY, destroys=True, idempotent=True)
async def destroy_sandbox(caller: Caller, sandbox: SandboxArg) -> Destroyed:
    """End a sandbox and remove all that is in it, for good."""
    record = await caller.record(sandbox)
    await caller.manager.destroy(record.id)
    caller.ended(record.id)
    return Destroyed(id=record.id)


@tools.add(Scope.CREATE)
async def snapshot_sandbox(
    caller: Caller,
    sandbox: SandboxArg,
    name: Annotated[str, Field(description="A new name for it: letters, digits, -")],
) -> SnapshotInfo:
    """Keep the files of a sandbox as they are now, under a name; its processes are no part of that. It stays when the
    sandbox ends, until a person removes it."""
    record = await caller.record(sandbox)
    return SnapshotInfo.of(await caller.manager.snapshot(record.id, name))


@tools.add(Scope.READ, reads=True)
async def list_snapshots(caller: Caller) -> SnapshotList:
    """List the snapshots that exist."""
    found = await caller.manager.snapshots()
    return SnapshotList(snapshots=[SnapshotInfo.of(each) for each in found[-caller.limits.items :]])


@tools.add(Scope.CREATE, destroys=True)
async def restore_sandbox(
    caller: Caller, sandbox: SandboxArg, snapshot: SnapshotArg, env: EnvArg = None
) -> SandboxInfo:
    """Make a sandbox again what a snapshot kept. All that it became since is lost, its processes too. Its environment
    is kept nowhere: give it again, if it needs one."""
    record = await caller.record(sandbox)
    caller.progress.line("the sandbox is being made anew")
    await caller.manager.restore(record.id, snapshot, env)
    return await _shown(caller, record.id)


@tools.add(Scope.CREATE, local=("keep",))
async def fork_sandbox(
    caller: Caller,
    sandbox: SandboxArg,
    name: NameArg = None,
    memory: MemoryArg = None,
    cpus: CpusArg = None,
    env: EnvArg = None,
    lifetime: LifetimeArg = None,
    keep: KeepArg = False,
) -> SandboxInfo:
    """Make another sandbox that begins with the files of one that exists, to try something without harm. It has no
    processes and no environment but what is given."""
    record = await caller.record(sandbox)
    given = _given(name=name, memory=memory, cpus=cpus, lifetime=lifetime, env=env)
    caller.progress.line("the sandbox is being forked")
    forked = await caller.manager.fork(record.id, **given)
    return await _shown(caller, forked.id, ends_with_us=caller.is_local and not keep)


def _given(**asked: Any) -> dict[str, Any]:
    return {field: value for field, value in asked.items() if value is not None}


def _info(caller: Caller, record: Record) -> SandboxInfo:
    info = SandboxInfo.of(record)
    info.kept = info.kept and not caller.ends(record.id)
    return info


async def _shown(caller: Caller, id: SandboxId, *, ends_with_us: bool = False) -> SandboxInfo:
    if ends_with_us:
        caller.made(id)
    return _info(caller, await caller.manager.record(id))
