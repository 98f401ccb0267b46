"""Verbs that only some providers have: pause and stop, snapshots and what is made of them, volumes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, Unpack

import msgspec

from skerry import aio, trace
from skerry.errors import Conflict, InvalidSpec, NotFound, SkerryError, WrongState
from skerry.manager import destroy, identity
from skerry.manager.create import Creator
from skerry.manager.handles import Handles
from skerry.manager.providers import Providers, require_capability
from skerry.manager.rebuild import Rebuilder
from skerry.model import states
from skerry.model.records import (
    TEMPORARY,
    Cause,
    Record,
    kept_snapshot,
    shown_snapshot,
    temporary_snapshot,
)
from skerry.model.spec import Port, Spec, SpecOptions, new_id
from skerry.model.states import State
from skerry.providers.base import CanSnapshot, CanStop, Capability, HasVolumes, Provider, Snapshot, Volume
from skerry.sandbox import service
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Changes, Store

_TAKEN_FROM = frozenset({State.READY, State.PAUSED, State.STOPPED})
_SAME_IN_A_FORK = frozenset({"provider", "image", "snapshot"})
_STOP_S = 5.0
"""Seconds that processes have to end after SIGTERM when a sandbox is stopped and nothing else is said."""
_log = logging.getLogger("skerry.manager")

Kept = TypeVar("Kept", Snapshot, Volume)


class Power:
    """Paused, stopped, and back."""

    def __init__(self, store: Store, handles: Handles, creator: Creator) -> None:
        self._store = store
        self._handles = handles
        self._creator = creator

    async def pause(self, reference: str) -> None:
        await self._switch("pause", reference, State.PAUSED, Capability.PAUSE, lambda box, record: box.pause(record.id))

    async def resume(self, reference: str) -> None:
        await self._switch(
            "resume", reference, State.READY, Capability.PAUSE, lambda box, record: box.resume(record.id)
        )
        await self._handles.networks.look(await self._store.find(reference))

    async def stop(self, reference: str, timeout_s: float | None) -> None:
        grace_s = _STOP_S if timeout_s is None else timeout_s
        await self._switch(
            "stop", reference, State.STOPPED, Capability.STOP, lambda box, record: box.stop(record.id), grace_s=grace_s
        )

    async def start(self, reference: str, env: Mapping[str, str] | None) -> None:
        """Start a stopped one for what is left of its lifetime. Raises WrongState if that is over."""

        async def start(box: CanStop, record: Record) -> None:
            spec = self._handles.networks.with_env(record.spec_from(self._store.now(), env))
            await self._store.note_env(record.id, spec.env)
            try:
                await box.start(record.id, spec)
                handle = self._handles.of(msgspec.structs.replace(record, state=State.READY))
                spec = record.spec_from(self._store.now(), env)
                seconds = {"lifetime_s": spec.lifetime_s or None, "idle_s": spec.idle_s or None}
                await handle.call("set_lifetime", seconds)
                await self._handles.networks.bring_up(record.id, spec)
                if not record.is_being_set_up:
                    await service.begin(await handle.connection.connect(), record.spec)
            except BaseException:
                self._handles.of(record)  # it is as it was
                await aio.run_to_end(_stop_again(box, record))
                raise

        record = await self._store.find(reference)
        if record.is_live and record.is_over(self._store.now()):
            await self._handles.destroy(record.id, cause=Cause.LIFETIME)
            raise WrongState(f"sandbox {record.id} cannot be started: its lifetime is over, and it was destroyed")
        async with self._creator.room_to_start(record, self._handles.provider(record.spec.provider)):
            await self._switch("start", record.id, State.READY, Capability.STOP, start)
        await self._handles.addresses.ensure([record])

    async def _switch(
        self,
        verb: str,
        reference: str,
        to: State,
        needed: Capability,
        act: Callable[[Any, Record], Awaitable[None]],
        *,
        grace_s: float = 0.0,
    ) -> None:
        """Do it, then write it down; if we die in between, the next look at the host finds it done. With `grace_s` its
        processes are asked to end before."""
        record = await self._store.find(reference)
        if record.doomed:
            raise WrongState(f"sandbox {record.id} is being destroyed")
        if identity.is_rebuilt(record):
            raise WrongState(f"sandbox {record.id} is being made anew: wait until it is ready")
        states.move(record.state, to)
        box = require_capability(self._handles.provider(record.spec.provider), needed)
        handle = self._handles.of(record)
        await handle.connection.terminate(destroy.grace_of(record, Cause.USER, grace_s))
        await handle.close()
        with trace.span(f"skerry.provider.{verb}", provider=record.spec.provider, sandbox=record.id):
            await act(box, record)
        self._handles.of(await self._write_down(record, to))

    async def _write_down(self, record: Record, to: State) -> Record:
        """Note the state, unless others who watch the host have done so. Raises Conflict if it never stands still."""
        boot_id = self._store.now().boot if to is State.READY else record.boot_id

        async def switch(current: Record) -> Changes | None:
            is_done = current.state is to or current.doomed or not current.is_live
            return None if current is not record and is_done else {"to": to, "boot_id": boot_id}

        return await self._store.update(record, switch)


class Storage:
    """Snapshots, which keep a sandbox's files, the sandboxes that are made of them, and volumes: they outlive boxes."""

    def __init__(
        self, store: Store, providers: Providers, handles: Handles, creator: Creator, rebuilder: Rebuilder
    ) -> None:
        self._store = store
        self._providers = providers
        self._handles = handles
        self._creator = creator
        self._rebuilder = rebuilder

    async def snapshot(self, reference: str, name: str) -> Snapshot:
        if name.startswith(TEMPORARY):
            raise InvalidSpec(f"snapshot: names that begin with {TEMPORARY!r} are for forks", field="snapshot")
        Spec(snapshot=name)  # refuses what is no name
        kept = kept_snapshot(self._store.project, name)
        record = await self._source(reference)
        span = trace.span("skerry.provider.snapshot", provider=record.spec.provider, sandbox=record.id)
        with _named(kept, name), span:
            taken = await _with_snapshots(self._handles.provider(record.spec.provider)).snapshot(record.id, kept)
        self._store.ledger.note("snapshot", record.id, name=name)
        return msgspec.structs.replace(taken, name=name)

    async def snapshots(self, provider: str | None) -> list[Snapshot]:
        found = [
            each
            for host in await self._providers.having(Capability.SNAPSHOT, self._store, provider)
            for each in await self._snapshots_of(host)
            if not each.name.startswith(TEMPORARY)
        ]
        return sorted(found, key=lambda snapshot: snapshot.created_at)

    async def _snapshots_of(self, provider: Provider) -> list[Snapshot]:
        """Those of a provider, by the names that our project has for them; another project's are not there."""
        names = [
            (each, shown_snapshot(self._store.project, each.name))
            for each in await _with_snapshots(provider).snapshots()
        ]
        return [msgspec.structs.replace(each, name=name) for each, name in names if name is not None]

    async def remove_snapshot(self, name: str, provider: str | None) -> None:
        hosts = await self._providers.having(Capability.SNAPSHOT, self._store, provider)
        holder = _only_holder("snapshot", name, [(host, await self._snapshots_of(host)) for host in hosts])
        if holder is None:
            raise NotFound(f"no snapshot is called {name!r}")
        kept = kept_snapshot(self._store.project, name)
        with _named(kept, name):
            await _with_snapshots(holder).remove_snapshot(kept)
        self._store.ledger.note("remove", snapshot=name, provider=holder.name)

    async def restore(self, reference: str, snapshot: str, env: Mapping[str, str] | None) -> AsyncSandbox:
        record = await self._store.find(reference)
        provider = self._handles.provider(record.spec.provider)
        if not any(each.name == snapshot for each in await self._snapshots_of(provider)):
            raise NotFound(f"no snapshot of {provider.name} is called {snapshot!r}")
        await self._handles.of(record).close()
        try:
            kept = kept_snapshot(self._store.project, snapshot)
            await self._rebuilder.rebuild(record, provider, snapshot=kept, env=env)
        finally:
            handle = self._handles.of(await self._store.get(record.id))
        return handle

    async def fork(self, reference: str, **options: Unpack[SpecOptions]) -> AsyncSandbox:
        changed = sorted(_SAME_IN_A_FORK & options.keys())
        if changed:
            raise InvalidSpec(f"{changed[0]}: a fork has that of its source", field=changed[0])
        record = await self._source(reference)
        provider = self._handles.provider(record.spec.provider)
        snapshots, id = _with_snapshots(provider), new_id()
        name = temporary_snapshot(id)
        ports = tuple(Port(port=each.port) for each in record.spec.ports)  # those of this host are its source's
        source = msgspec.structs.replace(record.spec, name=None, env={}, snapshot=name, ports=ports)
        try:
            made, _ = await self._creator.create(
                id, source.but(**options), provider, take_files=lambda: snapshots.snapshot(record.id, name)
            )
        finally:
            await aio.run_to_end(destroy.remove_temporary(snapshots, name, (SkerryError,)))
        return self._handles.of(made)

    async def _source(self, reference: str) -> Record:
        record = await self._store.find(reference)
        if record.state not in _TAKEN_FROM:
            raise WrongState(f"no snapshot can be taken of sandbox {record.id}: {states.unusable(record.state)}")
        return record

    async def volumes(self, kind: str | None, provider: str | None, *, sizes: bool) -> list[Volume]:
        found = [
            each
            for host in await self._providers.having(Capability.VOLUMES, self._store, provider)
            for each in await self._volumes_of(host, sizes=sizes)
            if kind in (None, each.kind)
        ]
        return sorted(found, key=lambda volume: volume.name)

    async def _volumes_of(self, provider: Provider, *, sizes: bool = False) -> list[Volume]:
        """Those of a provider; if we are one project's, those of that project in this registry."""
        mine, registry = self._store.project, self._store.instance
        found = await _with_volumes(provider).volumes(sizes=sizes)
        return [each for each in found if mine is None or (each.project == mine and each.instance == registry)]

    async def remove_volume(self, name: str, provider: str | None) -> None:
        hosts = await self._providers.having(Capability.VOLUMES, self._store, provider)
        holder = _only_holder("volume", name, [(host, await self._volumes_of(host)) for host in hosts])
        if holder is None:
            asked = ", ".join(host.name for host in hosts) or "none"
            advice = "`--provider` (`provider=`) names another"
            raise NotFound(f"no volume is called {name!r}; asked were: {asked}. {advice}")
        await _with_volumes(holder).remove_volume(name)
        self._store.ledger.note("remove", volume=name, provider=holder.name)


@contextmanager
def _named(kept: str, name: str) -> Iterator[None]:
    """Tell of a snapshot by the name that it was called by, and not by the one it is kept under."""
    try:
        yield
    except Conflict as error:
        if kept == name:
            raise
        raise Conflict(error.message.replace(kept, name)) from None


def _with_snapshots(provider: Provider) -> CanSnapshot:
    able: CanSnapshot = require_capability(provider, Capability.SNAPSHOT)
    return able


def _with_volumes(provider: Provider) -> HasVolumes:
    able: HasVolumes = require_capability(provider, Capability.VOLUMES)
    return able


def _only_holder(what: str, name: str, kept: Sequence[tuple[Provider, Sequence[Kept]]]) -> Provider | None:
    """The provider that has something of that name. Raises Conflict if several have."""
    holders = [host for host, found in kept if any(each.name == name for each in found)]
    if len(holders) > 1:
        names = ", ".join(host.name for host in holders)
        raise Conflict(f"several providers have a {what} {name!r} ({names}): say which one")
    return holders[0] if holders else None


async def _stop_again(box: CanStop, record: Record) -> None:
    try:
        await box.stop(record.id)
    except SkerryError as error:
        _log.warning("sandbox %s is half started until the next reconcile: %s", record.id, error)
