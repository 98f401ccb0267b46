"""Warm sandboxes in the registry: made before they were asked for, and whoever claims one first has it.

A warm sandbox is an ephemeral one of the program whose pool it is in, with the label `skerry.pool`. What it is bound
to when it is handed out (name, env, labels, project, language, lifetime, idle) is no part of the key by which it is
found, since none of that is part of the box: the agent is told of it at hand-out.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from contextlib import suppress
from enum import StrEnum
from typing import TypedDict

import msgspec

from skerry import ending, lifecycle, owners
from skerry.errors import Conflict, NotFound, SkerryError
from skerry.lifecycle import State
from skerry.manager import AsyncSandboxManager
from skerry.records import Cause, Filter, Record
from skerry.sandbox import AsyncSandbox
from skerry.spec import SandboxId, Spec

LABEL = "skerry.pool"
HEALTH_S = 2.0
"""How long the agent of a warm sandbox may take to answer before it counts as broken."""
_GRACE_S = 600.0
"""How much longer than its pool would keep it a warm box lives if that pool's program is gone for good."""


class Binding(TypedDict, total=False):
    """What a sandbox from a pool is given when it is handed out."""

    name: str
    env: Mapping[str, str]
    labels: Mapping[str, str]
    project: str
    language: str
    lifetime: float | str | None
    idle: float | str | None


class Gone(StrEnum):
    """Why a warm sandbox was not to be had."""

    TAKEN = "taken"
    UNHEALTHY = "unhealthy"


def key_of(spec: Spec) -> str:
    """Two specs have the same key if a box of the one can become a sandbox of the other. Projects share no box: its
    caches and its user may be the project's."""
    box = msgspec.structs.replace(
        spec, name=None, env={}, labels={}, language=None, lifetime_s=None, idle_s=None, data=spec.data or None
    )
    return hashlib.sha256(msgspec.json.encode(box, order="deterministic")).hexdigest()[:16]


def warm_spec(spec: Spec, max_age_s: float) -> Spec:
    """What is booted ahead for a spec: the same box, not yet anybody's."""
    return msgspec.structs.replace(
        spec,
        name=None,
        env={},
        labels={LABEL: key_of(spec)},
        language=None,
        lifetime_s=max_age_s + _GRACE_S,
        idle_s=0.0,
    )


def warm_filter(key: str) -> Filter:
    return Filter(labels={LABEL: key}, states=frozenset({State.READY}))


def is_warm(record: Record) -> bool:
    return record.state is State.READY and not record.doomed and LABEL in record.spec.labels


async def claim(manager: AsyncSandboxManager, spec: Spec, *, ephemeral: bool = False) -> AsyncSandbox | None:
    """A warm sandbox for this spec from any program's pool, the oldest first; None if there is none, or if its data is
    to be found by its name: what was made without one has other data, or none."""
    spec = manager.config.complete(spec)
    if spec.name is not None and spec.data is not False and "data" in manager.provider(spec.provider).honours:
        return None
    for record in await manager.list(warm_filter(key_of(spec))):
        if not is_warm(record) or owners.is_alive(record.owner) is False:
            continue
        taken = await take(manager, record, spec, ephemeral=ephemeral)
        if isinstance(taken, AsyncSandbox):
            return taken
        if taken is Gone.UNHEALTHY:
            await discard(manager, record, Cause.AGENT_LOST)
    return None


async def claim_or_create(manager: AsyncSandboxManager, spec: Spec, *, ephemeral: bool = False) -> AsyncSandbox:
    """A warm sandbox if there is one, else a new one."""
    return await claim(manager, spec, ephemeral=ephemeral) or await manager.create(spec, ephemeral=ephemeral)


async def take(manager: AsyncSandboxManager, record: Record, spec: Spec, *, ephemeral: bool) -> AsyncSandbox | Gone:
    """Make a warm sandbox the caller's and what `spec` says. Raises Conflict if the name is taken: it stays warm then.

    A caller that is cancelled meanwhile gets nothing, and what it would have got is destroyed.
    """
    if not await _answers(manager._handle(record)):
        return Gone.UNHEALTHY
    binding = asyncio.ensure_future(_bind(manager, record, spec, ephemeral))
    try:
        return await asyncio.shield(binding)
    except asyncio.CancelledError:
        await lifecycle.run_to_end(_unbind(manager, binding))
        raise


async def discard(manager: AsyncSandboxManager, record: Record, cause: Cause = Cause.USER) -> None:
    """End a warm sandbox, unless somebody has just claimed it."""
    try:
        volumes = ending.takes_volumes(record, cause) or None
        record = await manager.store.change(record, doomed=True, volumes=volumes, cause=cause, kind="doomed")
    except (Conflict, NotFound):
        return
    await release(manager, record.id)
    await ending.finish(manager.store, manager.provider, record)


async def release(manager: AsyncSandboxManager, id: SandboxId) -> None:
    """Let go of the stream to a sandbox that is no longer warm, unless it is this program's own now."""
    with suppress(SkerryError):
        record = await manager.store.get(id)
        if record.owner == owners.this_process() and not record.doomed and record.is_live:
            return
    handle = manager._handles.pop(id, None)
    if handle is not None:
        await handle.close()


async def _answers(sandbox: AsyncSandbox) -> bool:
    """Whether it is worth binding. With an open stream nothing is asked: binding ends with a call that tells."""
    if sandbox._client is not None and sandbox._client.is_open:
        return True
    try:
        async with asyncio.timeout(HEALTH_S):
            await sandbox.ping()
    except (SkerryError, TimeoutError):
        return False
    return True


async def _bind(manager: AsyncSandboxManager, record: Record, spec: Spec, ephemeral: bool) -> AsyncSandbox | Gone:
    """Of all who want it the registry lets one have it; only that one then speaks to its agent."""
    lifetime_s = time.time() - record.created_at + spec.lifetime_s if spec.lifetime_s else 0.0
    kept = msgspec.structs.replace(spec, lifetime_s=lifetime_s, workspace=record.spec.workspace)
    while True:
        try:
            record = await manager.store.change(
                record, kind="acquired", spec=kept, owner=owners.this_process(), ephemeral=ephemeral
            )
            break
        except NotFound:
            return Gone.TAKEN
        except Conflict:
            current = await manager.store.get(record.id)
            if current.version == record.version:
                raise  # the name is taken
            if not is_warm(current):
                return Gone.TAKEN
            record = current
    sandbox = manager._handle(record)
    sandbox.spec = record.spec
    try:
        async with asyncio.timeout(HEALTH_S):
            await AsyncSandbox.set_lifetime(sandbox, spec.lifetime_s or None, spec.idle_s or None)
            if spec.env:
                await sandbox.set_env(spec.env)
    except (SkerryError, TimeoutError):
        await manager.destroy(record.id, cause=Cause.AGENT_LOST)
        return Gone.UNHEALTHY
    return sandbox


async def _unbind(manager: AsyncSandboxManager, binding: asyncio.Future[AsyncSandbox | Gone]) -> None:
    await asyncio.wait([binding])
    if binding.exception() is None and isinstance(sandbox := binding.result(), AsyncSandbox):
        await manager.destroy(sandbox.id)
