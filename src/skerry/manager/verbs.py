"""Verbs that only some providers have: pause and stop, snapshots and what is made of them, volumes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import Any, TypeVar, Unpack

import msgspec

from skerry import aio, trace
from skerry.agent.client import AgentClient
from skerry.errors import Conflict, InvalidSpec, NotFound, SkerryError, WrongState
from skerry.manager import destroy, identity
from skerry.manager.create import Creator
from skerry.manager.handles import Handles
from skerry.manager.providers import Providers, require_capability
from skerry.manager.rebuild import Rebuilder
from skerry.manager.repair import LOOK_S
from skerry.model import states
from skerry.model.records import (
    TEMPORARY,
    Cause,
    Filter,
    Record,
    kept_snapshot,
    shown_snapshot,
    temporary_snapshot,
)
from skerry.model.spec import Port, SandboxId, Spec, SpecOptions, new_id
from skerry.model.states import State
from skerry.providers.base import CanSnapshot, CanStop, Capability, HasVolumes, KeepsMemory, Provider, Snapshot, Volume
from skerry.sandbox import service
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Changes, Store

_TAKEN_FROM = frozenset({State.READY, State.PAUSED, State.ASLEEP, State.STOPPED})
_REMEMBERS = _TAKEN_FROM - {State.STOPPED}
_SAME_IN_A_FORK = frozenset({"provider", "image", "snapshot"})
_STOP_S = 5.0
"""Seconds that processes have to end after SIGTERM when a sandbox is stopped and nothing else is said."""
_log = logging.getLogger("skerry.manager")


class _Unused(msgspec.Struct):
    unused_s: float


Kept = TypeVar("Kept", Snapshot, Volume)


class Power:
    """Paused, stopped, and back."""

    def __init__(self, store: Store, handles: Handles, creator: Creator) -> None:
        self._store = store
        self._handles = handles
        self._creator = creator
        handles.resume = self.resume

    async def pause(self, reference: str, *, save: bool = False) -> None:
        if save:
            await self._switch(
                "sleep", reference, State.ASLEEP, Capability.MEMORY, lambda box, record: box.sleep(record.id)
            )
            return
        await self._switch("pause", reference, State.PAUSED, Capability.PAUSE, lambda box, record: box.pause(record.id))

    async def sleep_unused(self) -> float:
        """Put to sleep what nobody has used for as long as its spec says; in how many seconds there may be more."""
        ready = await self._store.list(Filter(states=frozenset({State.READY})))
        drowsy = [each for each in ready if each.spec.sleep_after_s and not each.doomed]
        return min(await asyncio.gather(*map(self._sleep_if_unused, drowsy)), default=LOOK_S)

    async def _sleep_if_unused(self, record: Record) -> float:
        after_s = record.spec.sleep_after_s or LOOK_S
        try:
            left_s = after_s - await self._unused_s(record)
            if left_s > 0:
                return left_s
            _log.info("sandbox %s sleeps: nobody has used it for %g s", record.id, after_s)
            await self.pause(record.id, save=True)
        except (SkerryError, OSError) as error:
            _log.debug("sandbox %s does not sleep: %s", record.id, error)
        return after_s

    async def _unused_s(self, record: Record) -> float:
        """For how long there was no call in it, and no running process; as its agent says, which is not woken by it."""
        client = open_already = self._handles.of(record).connection.client
        if client is None:
            client = await AgentClient.greet(await self._handles.provider(record.spec.provider).dial(record.id))
        try:
            return (await client.call("unused", type=_Unused)).unused_s
        finally:
            if open_already is None:
                client.close()

    async def resume(self, reference: str) -> None:
        before = await self._store.find(reference)
        slept, provider = before.state is State.ASLEEP, self._handles.provider(before.spec.provider)
        async with self._creator.room_to_start(before, provider) if slept else nullcontext():
            await self._switch(
                "resume", before.id, State.READY, Capability.PAUSE, lambda box, record: box.resume(record.id)
            )
        record = await self._store.get(before.id)
        if slept and record.state is State.READY and record.spec.lifetime_s:
            left_s = record.spec_from(self._store.now(), {}).lifetime_s  # the host's clock did not stand still
            await self._handles.of(record).call("set_lifetime", {"lifetime_s": left_s})
        await self._handles.networks.look(record)

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
        async with handle.connection.at_rest() if to is State.ASLEEP else nullcontext():
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
        self._snapshotting = asyncio.Lock()
        """Held from the look at a quota to the snapshot that it allows."""

    async def snapshot(self, reference: str, name: str, *, with_memory: bool = False) -> Snapshot:
        if name.startswith(TEMPORARY):
            raise InvalidSpec(f"snapshot: names that begin with {TEMPORARY!r} are for forks", field="snapshot")
        Spec(snapshot=name)  # refuses what is no name
        kept = kept_snapshot(self._store.project, name)
        record = await self._source(reference, with_memory=with_memory)
        provider = self._handles.provider(record.spec.provider)
        async with self._admitted(record.spec, with_memory=with_memory):
            span = trace.span("skerry.provider.snapshot", provider=record.spec.provider, sandbox=record.id)
            with _named(kept, name), span:
                taken = await _take(provider, record.id, kept, with_memory=with_memory)
        self._store.ledger.note("snapshot", record.id, name=name)
        return msgspec.structs.replace(taken, name=name)

    @asynccontextmanager
    async def _admitted(self, spec: Spec, *, with_memory: bool) -> AsyncIterator[None]:
        """Take a snapshot meanwhile, of a sandbox of this spec, if the quota has room for it. Raises LimitReached."""
        if self._store.quota.disk is None:
            yield
            return
        async with self._snapshotting:
            kept = sum(each.size for each in await self.snapshots(None))
            self._store.quota.admit_snapshot(spec, kept, with_memory=with_memory)
            yield

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

    async def fork(
        self, reference: str, count: int, *, with_memory: bool = False, **options: Unpack[SpecOptions]
    ) -> list[AsyncSandbox]:
        """All of them or none, from one snapshot that is taken once."""
        changed = sorted(_SAME_IN_A_FORK & options.keys())
        if changed:
            raise InvalidSpec(f"{changed[0]}: a fork has that of its source", field=changed[0])
        if count < 1 or (count > 1 and options.get("name") is not None):
            raise InvalidSpec(f"count: {count} forks cannot have that name", field="count")
        record = await self._source(reference, with_memory=with_memory)
        provider = self._handles.provider(record.spec.provider)
        ids, taking = [new_id() for _ in range(count)], asyncio.Lock()
        name, taken = temporary_snapshot(ids[0]), list[Snapshot]()
        ports = tuple(Port(port=each.port) for each in record.spec.ports)  # those of this host are its source's
        source = msgspec.structs.replace(record.spec, name=None, env={}, snapshot=name, ports=ports)
        snapshots, spec = _with_snapshots(provider), source.but(**options)

        async def take() -> None:
            async with taking:
                if not taken:
                    taken.append(await _take(provider, record.id, name, with_memory=with_memory))

        making = [asyncio.ensure_future(self._creator.create(id, spec, provider, take_files=take)) for id in ids]
        try:
            made = await asyncio.gather(*making)
        except BaseException:
            await aio.run_to_end(self._undo(making))
            raise
        finally:
            await aio.run_to_end(destroy.remove_temporary(snapshots, name, (SkerryError,)))
        return [self._handles.of(each) for each, _ in made]

    async def _undo(self, making: Sequence[asyncio.Future[tuple[Record, bool]]]) -> None:
        """End forks of which one was not made, or nobody wants any more."""
        for each in making:
            each.cancel()
        await asyncio.wait(making)
        for each in making:
            if not each.cancelled() and each.exception() is None:
                await self._handles.destroy(each.result()[0].id, volumes=True, cause=Cause.CREATION_FAILED, grace_s=0.0)

    async def _source(self, reference: str, *, with_memory: bool) -> Record:
        record = await self._store.find(reference)
        if record.state not in (_REMEMBERS if with_memory else _TAKEN_FROM):
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


async def _take(provider: Provider, id: SandboxId, name: str, *, with_memory: bool) -> Snapshot:
    """Raises Unsupported where there is no memory to be kept."""
    if not with_memory:
        return await _with_snapshots(provider).snapshot(id, name)
    able: KeepsMemory = require_capability(provider, Capability.MEMORY)
    return await able.snapshot_memory(id, name)


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
