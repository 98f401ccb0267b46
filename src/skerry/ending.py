"""The end of a sandbox, in two steps that anybody can go on with: decide it, then do it."""

from __future__ import annotations

from collections.abc import Callable

from skerry.errors import Conflict
from skerry.lifecycle import State
from skerry.providers.base import Provider
from skerry.records import Cause, Record
from skerry.store import Store

_TRIES = 20


async def doom(store: Store, record: Record, cause: Cause) -> Record:
    """Intent before effect: whoever dies from here on, the next reconcile goes on with it."""
    for _ in range(_TRIES):
        if record.doomed or not record.is_live:
            return record
        try:
            return await store.change(record, doomed=True, cause=cause, kind="doomed")
        except Conflict:
            record = await store.get(record.id)
    raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")


async def finish(store: Store, provider: Callable[[str], Provider], record: Record, *, volumes: bool = False) -> None:
    """Remove the box and say so. Another program may do the same: whoever is later finds it done."""
    await provider(record.spec.provider).destroy(record.id, volumes=volumes)
    for _ in range(_TRIES):
        if not record.is_live:
            return
        try:
            await store.change(record, to=State.DESTROYED)
            return
        except Conflict:
            record = await store.get(record.id)
    raise Conflict(f"sandbox {record.id} is changed all the time by others; try again")
