"""Create a sandbox: a record, then a box with its work in it, then the word that it is ready; or nothing of it all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import msgspec

from skerry import aio, trace
from skerry.agent.client import AgentClient
from skerry.config import Config
from skerry.errors import Conflict, SkerryError, StoreError, WrongState
from skerry.ledger import facts
from skerry.manager import destroy, identity, workspace
from skerry.manager.addresses import Addresses, Reserved
from skerry.manager.admission import Admission
from skerry.manager.decide import INSTANCE_LABEL
from skerry.manager.network import Networks
from skerry.manager.providers import admit, host_errors, refuse_unenforced
from skerry.model.records import SETUP_LABEL, Cause, Record
from skerry.model.spec import SandboxId, Spec, Workspace
from skerry.model.states import State
from skerry.providers.base import CID_LABEL, Enforcement, Isolation, Provider
from skerry.sandbox import service
from skerry.store import Changes, Store

_WITHDRAW_S = 2.0
"""How long a registry that has just failed is asked once more."""
_log = logging.getLogger("skerry.manager")

TakeFiles = Callable[[], Awaitable[object]]
Enforced = Mapping[str, Enforcement]


class Creator:
    """Makes sandboxes, each with a record in the registry."""

    def __init__(
        self, store: Store, config: Config, addresses: Addresses, networks: Networks, admission: Admission
    ) -> None:
        self._store = store
        self.config = config
        self._addresses = addresses
        self.networks = networks
        self.admission = admission

    async def create(
        self,
        id: SandboxId,
        spec: Spec,
        provider: Provider,
        *,
        ephemeral: bool = False,
        key: str | None = None,
        take_files: TakeFiles | None = None,
        on_known: Callable[[], None] | None = None,
    ) -> tuple[Record, bool]:
        """A sandbox that is ready, and True; or the one that was asked for by this key before, and False. `on_known`
        hears of it when the registry has it. `take_files` makes the snapshot that it begins with, work and all."""
        with trace.span("skerry.create", provider=provider.name, sandbox=id):
            self._addresses.check(spec)
            self.networks.check(spec)
            admitted = await admit(provider, workspace.for_box(spec))
            until = asyncio.get_running_loop().time() + self.config.admission.wait_s
            with identity.being_made(id):
                reserve = partial(self._reserve, id, spec, provider, ephemeral, key)
                record, is_new = await self.admission.reserved(reserve, until)
                if on_known is not None:
                    on_known()
                if is_new:
                    try:
                        record = await self._make(record, spec, provider, admitted, take_files, until)
                    finally:
                        self.admission.ended()
            if not is_new and record.state is State.CREATING and not record.remaker and identity.is_abandoned(record):
                await self._give_up(record, WrongState("it was begun while the registry was out of reach"))
            return record, is_new

    async def _make(
        self,
        record: Record,
        spec: Spec,
        provider: Provider,
        admitted: Enforced,
        take_files: TakeFiles | None,
        until: float,
    ) -> Record:
        """Make the box of a sandbox that has a record, and serve its addresses; or nothing."""
        async with self._room(record, spec, provider, until), self._ports(record, spec) as reserved:
            boxed = self.spec_of_box(record, spec, provider)
            enforced, filled = await self._boot(record, boxed, provider, take_files)
            found: dict[str, Any] = {} if filled is None else {"workspace": filled}
            found |= {"ports": reserved.ports} if reserved.ports else {}
            record = await self._publish(record, provider, {**admitted, **enforced}, found)
            try:
                await self._addresses.start(record, reserved)
            except BaseException:
                await aio.run_to_end(self._take_back(record, provider))
                raise
        return record

    @asynccontextmanager
    async def _room(self, record: Record, spec: Spec, provider: Provider, until: float) -> AsyncIterator[None]:
        """See that the host has room for it, and tell the ledger of it, before there is a box."""
        async with AsyncExitStack() as kept:
            try:
                await kept.enter_async_context(self.admission.room_for(spec, provider, self.config, until))
                self._store.ledger.append("create", record.id, **facts.of_spec(spec, self._store.ledger.redactor))
            except BaseException as error:
                await aio.run_to_end(self._give_up(record, error))
                raise
            yield

    def room_to_start(self, record: Record, provider: Provider) -> AbstractAsyncContextManager[None]:
        """Keep room for a box that is there while it is started; it has its promise already. Raises HostFull."""
        until = asyncio.get_running_loop().time() + self.config.admission.wait_s
        return self.admission.room_for(record.spec, provider, self.config, until)

    @asynccontextmanager
    async def _ports(self, record: Record, spec: Spec) -> AsyncIterator[Reserved]:
        """Keep the ports of this host that the spec asks for, before there is a box."""
        with ExitStack() as kept:
            reserved = Reserved()
            if spec.ports:
                try:
                    reserved = kept.enter_context(self._addresses.reserved(spec, await self._store.list()))
                except BaseException as error:
                    await aio.run_to_end(self._give_up(record, error))
                    raise
            yield reserved

    async def reserve(self, id: SandboxId, spec: Spec, provider: Provider, **options: Any) -> tuple[Record, bool]:
        """Take a place in the registry for this process; `options` as for `Store.reserve`."""
        if provider.takes_memory_here:
            options |= {"memory": provider.memory_of(spec), "max_memory": self.admission.promisable(self.config)}
        owner, most = identity.this_process(), self.config.max_sandboxes
        return await self._store.reserve(
            id, spec, owner=owner, boot_id=self._store.now().boot, max_sandboxes=most, **options
        )

    async def _reserve(
        self, id: SandboxId, spec: Spec, provider: Provider, ephemeral: bool, key: str | None
    ) -> tuple[Record, bool]:
        """Take a place in the registry. If we are cancelled meanwhile, or the registry fails, it is given back."""
        told = self.networks.env(spec)
        reserving = asyncio.ensure_future(self.reserve(id, spec, provider, ephemeral=ephemeral, key=key, told=told))
        try:
            await asyncio.wait([reserving])
            return reserving.result()
        except asyncio.CancelledError as cancelled:
            await asyncio.wait([reserving])
            if not reserving.cancelled() and reserving.exception() is None and reserving.result()[1]:
                await aio.run_to_end(self._give_up(reserving.result()[0], cancelled))
            raise
        except StoreError as error:  # it may have been written all the same, and then whoever has the key would wait
            await aio.run_to_end(self._withdraw(id, error))
            raise

    async def _withdraw(self, id: SandboxId, error: StoreError) -> None:
        """Give up the place of a sandbox, if there is one. Whether there is, the registry did not say."""
        with suppress(SkerryError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_S):
                await self._give_up(await self._store.get(id), error)

    def spec_of_box(self, record: Record, spec: Spec, provider: Provider) -> Spec:
        """The spec that the provider is told: whose box it is, the CID of a machine, the variables of its network, and
        that one which nobody finds again keeps nothing."""
        spec = self.networks.with_env(spec)
        labels = {**spec.labels, INSTANCE_LABEL: self._store.instance} if self._store.instance else spec.labels
        if record.cid is not None and provider.isolation is Isolation.VM:
            labels = {**labels, CID_LABEL: str(record.cid)}
        keeps_nothing = record.ephemeral and spec.name is None and spec.data is None and "data" in provider.honours
        data = False if keeps_nothing else spec.data
        if labels == spec.labels and data is spec.data:
            return spec
        return msgspec.structs.replace(spec, labels=labels, data=data)

    async def _boot(
        self, record: Record, spec: Spec, provider: Provider, take_files: TakeFiles | None
    ) -> tuple[Enforced, Workspace | None]:
        """Make the box with its work in it; what was read back of its limits, and which commit the work is at."""
        try:
            asked = spec if take_files is None else workspace.for_box(spec)
            async with workspace.opened(asked, provider.holds(asked)) as work:
                await self.wait_for_slot(record)
                if take_files is not None:
                    await take_files()
                up = partial(self.networks.bring_up, record.id, spec, record)
                return await make_box(provider, record.id, work, up), work.spec.workspace
        except BaseException as error:
            await aio.run_to_end(self._give_up(record, error))
            raise

    async def wait_for_slot(self, record: Record) -> None:
        """Wait until fewer than `max_boots` sandboxes boot, over all programs."""
        await self.admission.slot(
            lambda: self._store.boot_slot(record.id, max_boots=self.config.max_boots, owner_alive=identity.may_live)
        )

    async def _publish(
        self, record: Record, provider: Provider, enforced: Enforced, found: Mapping[str, Any]
    ) -> Record:
        try:
            return await aio.run_to_end(self._mark_ready(record, provider, enforced, found))
        except asyncio.CancelledError:  # it is ready, and nobody waits for it any more
            await aio.run_to_end(self._take_back(record, provider))
            raise

    async def _mark_ready(
        self, record: Record, provider: Provider, enforced: Enforced, found: Mapping[str, Any]
    ) -> Record:
        """Say that the box is made, and what its spec has come to, unless somebody has decided its end meanwhile."""

        def ready(current: Record) -> Changes:
            spec = msgspec.structs.replace(current.spec, **found) if found else None
            return {"to": State.READY, "enforced": dict(enforced), "spec": spec}

        try:
            with suppress(Conflict):
                return await self._store.change(record, **ready(record))
            current = await self._store.get(record.id)
            if current.doomed or not current.is_live:
                raise WrongState(f"sandbox {record.id} was destroyed while it was made")
            await self.networks.look(current)  # its rules may be others since
            return await self._store.change(current, **ready(current))
        except BaseException as error:
            await provider.destroy(record.id, volumes=record.name is None)
            await self._give_up(record, error)
            raise

    async def _take_back(self, record: Record, provider: Provider) -> None:
        record = await destroy.mark_for_destroy(self._store, await self._store.get(record.id), Cause.CREATION_FAILED)
        await self._addresses.end(record)
        await self.networks.forget(record)
        await destroy.finish(self._store, provider, record)

    async def _give_up(self, record: Record, error: BaseException) -> None:
        """Write down that nothing came of it. If that fails too, reconcile sees that nobody makes it."""
        why = str(error) or type(error).__name__
        _log.info("sandbox %s was not created: %s", record.id, type(error).__name__)
        try:
            current = await self._store.get(record.id)
            if current.is_live:
                cause = current.cause if current.doomed else Cause.CREATION_FAILED
                changes: Changes = {"to": State.DESTROYED}
                if is_left_behind(error):  # the next reconcile goes on with it
                    volumes = destroy.takes_volumes(record, Cause.CREATION_FAILED) or None
                    changes = {"doomed": True, "volumes": volumes, "kind": "doomed"}
                changes |= {"cause": cause, "detail": why[-4096:]}
                await self._store.change(current, **changes)
        except SkerryError as failure:
            error.add_note(f"and the registry could not be told: {failure}")


async def make_box(
    provider: Provider,
    id: SandboxId,
    work: workspace.Work,
    bring_up: Callable[[], Awaitable[None]],
    *,
    keep_volumes: bool = False,
) -> Enforced:
    """Make the box with its work in it, and bring its network up, or nothing of it all; what was read back of its
    limits."""
    held = await create_or_nothing(provider, id, workspace.for_box(work.spec), keep_volumes=keep_volumes)
    try:
        await work.fill(provider, id)
        await bring_up()
        if SETUP_LABEL not in work.spec.labels:
            await begin_service(provider, id, work.spec)
    except BaseException:
        await aio.run_to_end(provider.destroy(id, volumes=work.spec.name is None and not keep_volumes))
        raise
    return held


async def begin_service(provider: Provider, id: SandboxId, spec: Spec) -> None:
    """Have the agent of a box that runs begin the spec's command, if there is one. That it fails is its state, which
    `status` tells, and no failure of the box."""
    if spec.command is not None:
        client = await AgentClient.greet(await provider.dial(id))
        try:
            await service.begin(client, spec)
        finally:
            client.close()


async def create_or_nothing(provider: Provider, id: SandboxId, spec: Spec, *, keep_volumes: bool = False) -> Enforced:
    """Create the box, or leave nothing of it behind, whatever happens: failure, cancellation, a limit that was asked
    for and is not held after all. What was read back of its limits. A cancelled create is first awaited to its end,
    since many engines go on creating, and then destroyed. The data of a name was perhaps there before, so only what has
    no name goes with the box."""
    creating = asyncio.ensure_future(_create(provider, id, spec))
    try:
        await asyncio.wait([creating])  # and not `shield`, which from Python 3.14 on logs a failure that nobody awaits
        held = creating.result() or {}
        refuse_unenforced(provider, spec, held)
        return held
    except BaseException as error:
        try:
            await aio.run_to_end(_undo(provider, id, creating, volumes=spec.name is None and not keep_volumes))
        except (SkerryError, OSError) as failure:
            _log.warning("the box of sandbox %s is left behind: %s", id, failure)
            error.add_note(f"and what was begun could not be removed: {failure}")
            error.left_behind = True  # type: ignore[attr-defined]
        raise


async def _create(provider: Provider, id: SandboxId, spec: Spec) -> Enforced | None:
    with host_errors(), trace.span("skerry.provider.create", provider=provider.name, sandbox=id):
        return await provider.create(id, spec)


async def _undo(provider: Provider, id: SandboxId, creating: asyncio.Future[Any], *, volumes: bool) -> None:
    await asyncio.wait([creating])
    if not creating.cancelled() and isinstance(creating.exception(), Conflict):
        return  # the id is another box's: there is nothing of ours, and that one is not ours to destroy
    await provider.destroy(id, volumes=volumes)


def is_left_behind(error: BaseException) -> bool:
    """Whether a create that failed may have left something, since it could not be undone."""
    return getattr(error, "left_behind", False)
