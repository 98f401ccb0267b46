"""Destroy a sandbox, in two steps that anybody can go on with: decide it, then do it."""

from __future__ import annotations

import logging

from skerry import trace
from skerry.errors import Conflict, InvalidSpec, NotFound, SkerryError
from skerry.manager.providers import require_capability
from skerry.model.records import Cause, Record, temporary_snapshot
from skerry.model.states import State
from skerry.providers.base import CanSnapshot, Capability, HasVolumes, Provider
from skerry.store import Changes, Store

GRACE_S = 2.0
"""Seconds that processes have to end after SIGTERM when a sandbox is destroyed and nothing else is said."""
MAX_GRACE_S = 3600.0
_log = logging.getLogger("skerry.manager")


def grace_of(record: Record, cause: Cause, grace_s: float | None) -> float:
    """Seconds that the processes of a sandbox have to end by themselves. Raises InvalidSpec. None is for one that does
    not run, whose end is decided already, or that nobody wants to end well."""
    if grace_s is not None and not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidSpec(f"grace: {grace_s:g} s is out of range; 0 to {MAX_GRACE_S:g} s", field="grace_s")
    if record.state is not State.READY or record.doomed:
        return 0.0
    return (GRACE_S if cause is Cause.USER else 0.0) if grace_s is None else grace_s


async def mark_for_destroy(store: Store, record: Record, cause: Cause, *, volumes: bool = False) -> Record:
    """Note that it is to be destroyed, for reconcile if we die. Raises Conflict if others keep changing it."""
    volumes = volumes or takes_volumes(record, cause)

    async def mark(record: Record) -> Changes | None:
        if not record.is_live or (record.doomed and (record.volumes or not volumes)):
            return None
        kept = record.cause if record.doomed else cause
        return {"doomed": True, "volumes": volumes or None, "cause": kept, "kind": "doomed"}

    return await store.update(record, mark)


def takes_volumes(record: Record, cause: Cause | None) -> bool:
    """Whether nobody could find its volumes again: it has no name, and nobody was given it, or only for a while."""
    return record.name is None and (record.ephemeral or cause is Cause.CREATION_FAILED)


async def finish(store: Store, provider: Provider, record: Record) -> None:
    """Remove the box, and its volumes if that was decided, and say so. Another program may do the same meanwhile."""
    removed: bool | None = None

    async def remove(record: Record) -> Changes | None:
        nonlocal removed
        if removed is None or (record.volumes and not removed):
            removed = record.volumes
            with trace.span("skerry.provider.destroy", provider=provider.name, sandbox=record.id):
                await provider.destroy(record.id, volumes=removed)
            if removed and record.is_live:
                await _remove_data(provider, record, store.instance)
            if record.spec.snapshot == temporary_snapshot(record.id):
                await remove_temporary(require_capability(provider, Capability.SNAPSHOT), record.spec.snapshot)
        return {"to": State.DESTROYED} if record.is_live else None

    await store.update(record, remove)
    _log.debug("sandbox %s is destroyed: %s", record.id, record.cause)


async def _remove_data(provider: Provider, record: Record, instance: str) -> None:
    """Remove the data of a name, also where an earlier sandbox had it first and the box is gone that had it last."""
    if record.name is None or Capability.VOLUMES not in provider.capabilities:
        return
    volumes: HasVolumes = require_capability(provider, Capability.VOLUMES)
    whose = ("data", instance, record.spec.project, record.name)
    for each in await volumes.volumes():
        if (each.kind, each.instance, each.project, each.label) == whose:
            try:
                await volumes.remove_volume(each.name)
            except (NotFound, Conflict) as error:
                _log.debug("volume %s of sandbox %s is not removed: %s", each.name, record.id, error)


async def remove_temporary(
    snapshots: CanSnapshot, name: str, ignored: tuple[type[SkerryError], ...] = (NotFound, Conflict)
) -> bool:
    """Remove the snapshot that a fork was made from; False if it is gone, or in use: the end of the fork retries."""
    try:
        await snapshots.remove_snapshot(name)
    except ignored as error:
        _log.debug("the snapshot %s of a fork is not removed: %s", name, error)
        return False
    return True
