"""The end of a sandbox, in two steps that anybody can go on with: decide it, then do it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from skerry.errors import Conflict, NotFound
from skerry.lifecycle import State, able
from skerry.providers.base import CanSnapshot, Capability, HasVolumes, Provider
from skerry.records import Cause, Record, temporary_snapshot
from skerry.store import Store

_TRIES = 20


async def doom(store: Store, record: Record, cause: Cause, *, volumes: bool = False) -> Record:
    """Intent before effect: whoever dies from here on, the next reconcile goes on with it."""
    volumes = volumes or takes_volumes(record, cause)
    for _ in range(_TRIES):
        if not record.is_live or (record.doomed and (record.volumes or not volumes)):
            return record
        try:
            kept = record.cause if record.doomed else cause
            return await store.change(record, doomed=True, volumes=volumes or None, cause=kept, kind="doomed")
        except Conflict:
            record = await store.get(record.id)
    raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")


def takes_volumes(record: Record, cause: Cause | None) -> bool:
    """Whether nobody could find its volumes again: it has no name, and nobody was given it, or only for a while."""
    return record.name is None and (record.ephemeral or cause is Cause.CREATION_FAILED)


async def finish(store: Store, provider: Callable[[str], Provider], record: Record) -> None:
    """Remove the box, and its volumes if that was decided, and say so. Another program may do the same: whoever is
    later finds it done."""
    host = provider(record.spec.provider)
    removed: bool | None = None
    for _ in range(_TRIES):
        if removed is None or (record.volumes and not removed):
            removed = record.volumes
            await host.destroy(record.id, volumes=removed)
            if removed and record.is_live:
                await _remove_data(host, record, store.instance)
            await _remove_temporary(host, record)
        if not record.is_live:
            return
        try:
            await store.change(record, to=State.DESTROYED)
            return
        except Conflict:
            record = await store.get(record.id)
    raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")


async def _remove_data(host: Provider, record: Record, instance: str) -> None:
    """The data of a name, also where an earlier sandbox had it first and the box is gone that had it last."""
    if record.name is None or Capability.VOLUMES not in host.capabilities:
        return
    volumes: HasVolumes = able(host, Capability.VOLUMES)
    whose = ("data", instance, record.spec.project, record.name)
    for each in await volumes.volumes():
        if (each.kind, each.instance, each.project, each.label) == whose:
            with suppress(NotFound, Conflict):
                await volumes.remove_volume(each.name)


async def _remove_temporary(host: Provider, record: Record) -> None:
    """What a fork was made from can be in use for as long as the fork is there."""
    if record.spec.snapshot == temporary_snapshot(record.id):
        snapshots: CanSnapshot = able(host, Capability.SNAPSHOT)
        with suppress(NotFound, Conflict):
            await snapshots.remove_snapshot(record.spec.snapshot)
