"""Snapshots of sandboxes, and what is made of them: a sandbox as it was before, and copies of one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Unpack

import msgspec

from skerry import lifecycle
from skerry.core import ManagerCore
from skerry.errors import Conflict, InvalidSpec, NotFound, SkerryError, WrongState
from skerry.lifecycle import State
from skerry.providers.base import CanSnapshot, Capability, Provider, Snapshot
from skerry.records import TEMPORARY, Record, temporary_snapshot
from skerry.remaking import Remaker
from skerry.sandbox import AsyncSandbox
from skerry.spec import Spec, SpecOptions, new_id

_TAKEN_FROM = frozenset({State.READY, State.PAUSED, State.STOPPED})
_SAME_IN_A_FORK = frozenset({"provider", "image", "snapshot"})


class SnapshotMethods(ManagerCore):
    async def snapshot(self, reference: str, name: str) -> Snapshot:
        """Keep its files as they are now, under a name. Volumes and processes are no part of that."""
        if name.startswith(TEMPORARY):
            raise InvalidSpec(f"snapshot: names that begin with {TEMPORARY!r} are for forks", field="snapshot")
        Spec(snapshot=name)  # refuses what is no name
        record = await self._source(reference)
        return await _able(self.provider(record.spec.provider)).snapshot(record.id, name)

    async def snapshots(self, provider: str | None = None) -> list[Snapshot]:
        """All there are, the oldest first; those of one provider, or of all that have any."""
        found = [
            each
            for host in await self._able_providers(Capability.SNAPSHOT, provider)
            for each in await _able(host).snapshots()
            if not each.name.startswith(TEMPORARY)
        ]
        return sorted(found, key=lambda snapshot: snapshot.created_at)

    async def remove_snapshot(self, name: str, provider: str | None = None) -> None:
        """Remove a snapshot. Raises Conflict while a sandbox is made of it."""
        hosts = await self._able_providers(Capability.SNAPSHOT, provider)
        holders = [host for host in hosts if await _holds(host, name)]
        if len(holders) > 1:
            names = ", ".join(host.name for host in holders)
            raise Conflict(f"several providers have a snapshot {name!r} ({names}): say which one")
        for host in holders:
            return await _able(host).remove_snapshot(name)
        raise NotFound(f"no snapshot is called {name!r}")

    async def restore(self, reference: str, snapshot: str, env: Mapping[str, str] | None = None) -> AsyncSandbox:
        """Make its box anew from a snapshot, under the same id and with its volumes. What it was since is gone; its
        environment is kept nowhere: give it again, if it needs one. If that is cut short, it is lost until it is
        restored again."""
        record = await self.record(reference)
        provider = self.provider(record.spec.provider)
        if not await _holds(provider, snapshot):
            raise NotFound(f"no snapshot of {provider.name} is called {snapshot!r}")
        await self._handle(record).close()
        try:
            record = await Remaker(self.store, self._maker).remake(record, provider, snapshot=snapshot, env=env)
        finally:
            handle = self._handle(await self.store.get(record.id))
        handle.spec = record.spec
        return handle

    async def fork(self, reference: str, **options: Unpack[SpecOptions]) -> AsyncSandbox:
        """Another sandbox with the same files, and a data volume of its own; `options` change what it is. It has no
        name and no environment but those given."""
        changed = sorted(_SAME_IN_A_FORK & options.keys())
        if changed:
            raise InvalidSpec(f"{changed[0]}: a fork has that of its source", field=changed[0])
        record = await self._source(reference)
        provider = self.provider(record.spec.provider)
        snapshots, id = _able(provider), new_id()
        name = temporary_snapshot(id)
        source = msgspec.structs.replace(record.spec, name=None, env={}, snapshot=name)
        try:
            made, _ = await self._maker.make(
                id, source.but(**options), provider, take_files=lambda: snapshots.snapshot(record.id, name)
            )
        finally:
            await lifecycle.run_to_end(_remove_quietly(snapshots, name))
        return self._handle(made)

    async def _source(self, reference: str) -> Record:
        record = await self.record(reference)
        if record.state not in _TAKEN_FROM:
            why = lifecycle.unusable(record.state)
            raise WrongState(f"no snapshot can be taken of sandbox {record.id}: {why}")
        return record


def _able(provider: Provider) -> CanSnapshot:
    able: CanSnapshot = lifecycle.able(provider, Capability.SNAPSHOT)
    return able


async def _holds(provider: Provider, name: str) -> bool:
    return any(each.name == name for each in await _able(provider).snapshots())


async def _remove_quietly(snapshots: CanSnapshot, name: str) -> None:
    """A provider that holds it for as long as a box is made of it lets it go with the box; the end of the fork, or
    reconcile, tries again."""
    with suppress(SkerryError):
        await snapshots.remove_snapshot(name)
