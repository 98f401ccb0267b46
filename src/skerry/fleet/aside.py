"""Predecessors: a member that is to be replaced stays, under another name, until its successor is there.

It runs on meanwhile. One that has the data of its name is stopped, as two would write to it. If the successor fails, or
its phase does, the predecessor gets its name back; if this program dies, the next start of the phase sees to that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from skerry.errors import SkerryError
from skerry.fleet.model import ASIDE, ASIDE_LABEL, FLEET_LABEL
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.manager.providers import has_data_of_name
from skerry.model.records import Filter, Record
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import Capability
from skerry.store import Changes

_WHOLE = frozenset({State.READY, State.PAUSED, State.ASLEEP, State.STOPPED})
_log = logging.getLogger("skerry.fleet")

held: set[SandboxId] = set()
"""Predecessors whose successors this process makes, whichever of its fleets does."""


class Predecessor(msgspec.Struct, frozen=True):
    record: Record
    """As it was before."""
    is_stopped: bool
    """We stopped it."""


def can_be_kept(manager: AsyncSandboxManager, record: Record) -> bool:
    """Whether it is whole, and can give its name and its data free."""
    provider = manager.provider(record.spec.provider)
    gives_data_free = Capability.STOP in provider.capabilities or not has_data_of_name(provider, record.spec)
    return record.state in _WHOLE and not (record.doomed or record.ephemeral) and gives_data_free


async def put_aside(manager: AsyncSandboxManager, record: Record) -> Predecessor | None:
    """Give its name free; None if another program has done something with it meanwhile."""
    has_data = has_data_of_name(manager.provider(record.spec.provider), record.spec)
    if is_stopped := has_data and record.state is not State.STOPPED:
        await manager.stop(record.id)
    is_ours = False

    async def rename(current: Record) -> Changes | None:
        nonlocal is_ours
        is_ours = current.name == record.name and current.is_live and not current.doomed
        labels = {**current.spec.labels, ASIDE_LABEL: "1"}
        spec = msgspec.structs.replace(current.spec, name=f"{record.name}{ASIDE}", labels=labels)
        return {"spec": spec, "owner": identity.this_process(), "kind": "renamed"} if is_ours else None

    held.add(record.id)
    try:
        await manager.store.update(await manager.store.get(record.id), rename)
    except BaseException:
        is_ours = False
        raise
    finally:
        if not is_ours:
            held.discard(record.id)
    return Predecessor(record, is_stopped) if is_ours else None


async def restore(manager: AsyncSandboxManager, id: SandboxId, env: Mapping[str, str] | None) -> None:
    """Give it its name back, and with `env` start it again. Whatever fails, the next start of its phase retries."""

    async def rename(current: Record) -> Changes | None:
        if ASIDE_LABEL not in current.spec.labels or current.doomed or not current.is_live:
            return None
        labels = {key: value for key, value in current.spec.labels.items() if key != ASIDE_LABEL}
        name = (current.name or "").removesuffix(ASIDE)
        return {"spec": msgspec.structs.replace(current.spec, name=name, labels=labels), "kind": "renamed"}

    try:
        record = await manager.store.update(await manager.store.get(id), rename)
        if env is not None and record.state is State.STOPPED and not record.doomed:
            await manager.start(id, env)
    except SkerryError as error:
        _log.warning("sandbox %s was to be replaced, and is not as it was before: %s", id, error)
    finally:
        held.discard(id)


async def give_up(manager: AsyncSandboxManager, id: SandboxId) -> None:
    """Destroy it: its successor is there, or there is no room for both."""
    try:
        await manager.destroy(id)
    finally:
        held.discard(id)


async def recover(manager: AsyncSandboxManager, record: Record) -> None:
    """Go on with one whose replacement was cut short: it goes if its successor is there, else it has its name again."""
    is_held = record.id in held if record.owner == identity.this_process() else identity.is_alive(record.owner)
    if is_held is not False:
        return
    name = (record.name or "").removesuffix(ASIDE)
    for other in await manager.list(Filter(project=record.spec.project, name=name)):
        if other.spec.labels.get(FLEET_LABEL) == record.spec.labels.get(FLEET_LABEL) and other.state in _WHOLE:
            if not (other.ephemeral or other.doomed):
                await give_up(manager, record.id)
            return
    await restore(manager, record.id, None)
