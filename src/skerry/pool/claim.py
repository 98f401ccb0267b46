"""Claims of warm sandboxes across programs, by the registry: the first to claim one has it.

A warm sandbox is an ephemeral one of its pool's program, with the label `skerry.pool` and a key of all that is part of
the box. Name, env, labels, language, lifetime, idle and timeout are not: the agent is told of them at hand-out. Rules
of its network are not either: the gate is told of them then, and before nothing gets out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TypedDict

import msgspec

from skerry import aio
from skerry.errors import Conflict, NotFound, SkerryError
from skerry.manager import destroy, identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.manager.providers import has_data_of_name
from skerry.model.records import Cause, Filter, Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Changes

LABEL = "skerry.pool"
HEALTH_S = 2.0  # how long the agent of a warm sandbox may take to answer before it counts as broken
_GRACE_S = 600.0  # how much longer than its pool would keep it a warm box lives if that pool's program is gone for good
_log = logging.getLogger("skerry.pool")


class Binding(TypedDict, total=False):
    """Fields of a spec that a warm sandbox gets when it is handed out."""

    name: str
    env: Mapping[str, str]
    labels: Mapping[str, str]
    project: str
    language: str
    lifetime: float | str | None
    idle: float | str | None
    timeout: float | str | None
    allow: Sequence[str]
    deny: Sequence[str]


class Miss(StrEnum):
    """Reason why a warm sandbox could not be claimed."""

    TAKEN = "taken"
    UNHEALTHY = "unhealthy"


def key_of(spec: Spec) -> str:
    """Key that two specs share if a box of the one can become a sandbox of the other. Projects share no box: its caches
    and its user may be the project's."""
    box = msgspec.structs.replace(
        spec, name=None, env={}, labels={}, language=None, lifetime_s=None, idle_s=None, timeout_s=None,
        data=spec.data or None, allow=(), deny=(), reach=(),
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(box, order="deterministic")).hexdigest()[:16]


def warm_spec(spec: Spec, max_age_s: float) -> Spec:
    """Spec of the box that is booted ahead, not yet anybody's."""
    labels, lifetime_s = {LABEL: key_of(spec)}, max_age_s + _GRACE_S
    return msgspec.structs.replace(
        spec, name=None, env={}, labels=labels, language=None, lifetime_s=lifetime_s, idle_s=0.0,
        allow=(), deny=(), reach=(),
    )  # fmt: skip


def warm_filter(key: str) -> Filter:
    return Filter(labels={LABEL: key}, states=frozenset({State.READY}))


def is_warm(record: Record) -> bool:
    return record.state is State.READY and not record.doomed and LABEL in record.spec.labels


async def claim(manager: AsyncSandboxManager, spec: Spec, *, ephemeral: bool = False) -> AsyncSandbox | None:
    """Claim the oldest warm sandbox for this spec from any program's pool. None if there is none, or if it is to have
    the data of its name: a box that was made without one has other data."""
    spec = manager.config.complete(spec)
    if has_data_of_name(manager.provider(spec.provider), spec):
        return None
    for record in await manager.list(warm_filter(key_of(spec))):
        if not is_warm(record) or identity.is_alive(record.owner) is False:
            continue
        taken = await take(manager, record, spec, ephemeral=ephemeral)
        if isinstance(taken, AsyncSandbox):
            return taken
        if taken is Miss.UNHEALTHY:
            await discard(manager, record, Cause.AGENT_LOST)
    return None


async def claim_or_create(manager: AsyncSandboxManager, spec: Spec, *, ephemeral: bool = False) -> AsyncSandbox:
    """Claim a warm sandbox if there is one, else create one."""
    return await claim(manager, spec, ephemeral=ephemeral) or await manager.create(spec, ephemeral=ephemeral)


async def take(manager: AsyncSandboxManager, record: Record, spec: Spec, *, ephemeral: bool) -> AsyncSandbox | Miss:
    """Make a warm sandbox the caller's, as `spec` says. Raises Conflict if the name is taken, and InvalidSpec for rules
    that cannot be: it stays warm then. It is destroyed if the caller is cancelled meanwhile, or there is no gate."""
    manager.handles.networks.check(spec)
    if not await _answers(manager.handles.of(record)):
        return Miss.UNHEALTHY
    binding = asyncio.ensure_future(_bind(manager, record, spec, ephemeral))
    try:
        await asyncio.wait([binding])
        return binding.result()
    except asyncio.CancelledError:
        await aio.run_to_end(_unbind(manager, binding))
        raise


async def discard(manager: AsyncSandboxManager, record: Record, cause: Cause = Cause.USER) -> None:
    """End a warm sandbox, unless somebody has just claimed it."""

    async def doom(current: Record) -> Changes | None:
        """Whatever became of its box meanwhile."""
        if LABEL not in current.spec.labels or current.doomed or not current.is_live:
            return None
        volumes = destroy.takes_volumes(current, cause) or None
        return {"doomed": True, "volumes": volumes, "cause": cause, "kind": "doomed"}

    try:
        record = await manager.store.update(record, doom)
    except (Conflict, NotFound) as error:
        _log.debug("sandbox %s is not discarded: %s", record.id, error)
        return
    if not record.doomed:
        _log.debug("sandbox %s is not discarded: somebody has it, or ended it", record.id)
        return
    _log.info("sandbox %s is discarded: %s", record.id, cause)
    await manager.destroy(record.id, cause=cause)


async def release(manager: AsyncSandboxManager, id: SandboxId) -> None:
    """Close the stream to a sandbox that is no longer warm, unless it is this program's own now."""
    with suppress(SkerryError):
        record = await manager.store.get(id)
        if record.owner == identity.this_process() and not record.doomed and record.is_live:
            return
    await manager.handles.release(id)


async def _answers(sandbox: AsyncSandbox) -> bool:
    """Whether it is worth binding. An open stream is enough: binding ends with a call that tells."""
    if sandbox.connection.client is not None:
        return True
    try:
        async with asyncio.timeout(HEALTH_S):
            await sandbox.ping()
    except (SkerryError, TimeoutError) as error:
        _log.info("warm sandbox %s does not answer: %s", sandbox.id, error)
        return False
    return True


async def _bind(manager: AsyncSandboxManager, record: Record, spec: Spec, ephemeral: bool) -> AsyncSandbox | Miss:
    """Acquire it in the registry, which lets one program have it; then tell its agent."""
    of_box = {"workspace": record.spec.workspace, "ports": record.spec.ports, "snapshot": record.spec.snapshot}
    kept = msgspec.structs.replace(spec, lifetime_s=spec.lifetime_s or 0.0, **of_box)

    async def acquire(record: Record) -> Changes:
        if not is_warm(record):
            raise NotFound(f"sandbox {record.id} is not warm any more")
        me = identity.this_process()
        return {"kind": "acquired", "spec": kept, "owner": me, "ephemeral": ephemeral, "restart_lifetime": True}

    try:
        record = await manager.store.update(record, acquire)
    except NotFound:
        return Miss.TAKEN
    sandbox = manager.handles.of(record)
    try:
        async with asyncio.timeout(HEALTH_S):
            seconds = {"lifetime_s": spec.lifetime_s or None, "idle_s": spec.idle_s or None}
            await sandbox.call("set_lifetime", seconds)
            if spec.env:
                await sandbox.set_env(spec.env)
    except (SkerryError, TimeoutError) as error:
        _log.info("sandbox %s is destroyed: it could not be told of its owner: %s", record.id, error)
        await manager.destroy(record.id, cause=Cause.AGENT_LOST)
        return Miss.UNHEALTHY
    try:
        await manager.handles.networks.claim(record)
    except SkerryError:  # the next one would fare no better
        await manager.destroy(record.id, cause=Cause.CREATION_FAILED)
        raise
    return sandbox


async def _unbind(manager: AsyncSandboxManager, binding: asyncio.Future[AsyncSandbox | Miss]) -> None:
    await asyncio.wait([binding])
    if binding.exception() is None and isinstance(sandbox := binding.result(), AsyncSandbox):
        await manager.destroy(sandbox.id)
