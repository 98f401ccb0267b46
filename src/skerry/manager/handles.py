"""The handles that a manager gives out, and all that a handle needs of the registry."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from skerry.agent.client import AgentClient
from skerry.errors import Conflict, LimitReached, NotFound, Unsupported, WrongState
from skerry.ledger import facts
from skerry.ledger.ledger import Ledger
from skerry.manager import destroy
from skerry.manager.addresses import Addresses
from skerry.manager.admission import HostRoom
from skerry.manager.create import Creator
from skerry.manager.network import Networks
from skerry.manager.providers import Providers
from skerry.manager.repair import Repair
from skerry.manager.watch import Watcher
from skerry.model.records import Cause, Record, kept_snapshot
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.providers.base import Enforcement, Provider
from skerry.sandbox.connection import Connection
from skerry.sandbox.network import Decide
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

_OTHERS_S = 900.0
"""How long a sandbox is waited for that another program makes: pulling its image may take a while."""
_RECENT_S = 0.1
"""How long what the registry said of a sandbox is believed where many calls for it come one after the other."""
_log = logging.getLogger("skerry.manager")


class _Told(msgspec.Struct):
    env: dict[str, str]


class Handles:
    """One handle for each sandbox that was asked for; they keep their streams until they are released."""

    def __init__(
        self,
        store: Store,
        providers: Providers,
        creator: Creator,
        watch: Watcher,
        repair: Repair,
        on_seen: Callable[[Record], None],
        addresses: Addresses,
        networks: Networks,
    ) -> None:
        """`on_seen` hears of each sandbox that is used."""
        self._store = store
        self._providers = providers
        self._creator = creator
        self._watch = watch
        self._repair = repair
        self._on_seen = on_seen
        self.addresses = addresses
        self.networks = networks
        self._handles: dict[SandboxId, AsyncSandbox] = {}

    def provider(self, name: str) -> Provider:
        return self._providers.get(name)

    @property
    def ledger(self) -> Ledger:
        return self._store.ledger

    async def room(self) -> HostRoom:
        """What the host has left for boxes, and what its sandboxes were promised."""
        return self._creator.admission.describe(self._creator.config, await self._store.promised_memory())

    def of(self, record: Record) -> AsyncSandbox:
        """The handle of a sandbox, in the state that the record tells. That of one that has ended is not kept."""
        handle = self._handles.get(record.id)
        if handle is None:
            handle = AsyncSandbox.of_record(record, self)
            if record.is_live:
                self._handles[record.id] = handle
        else:
            handle.follow(record)
        self._on_seen(record)
        return handle

    def recent(self, id: str) -> AsyncSandbox | None:
        """The handle of a sandbox by its whole id, if the registry said a moment ago that it is ready; else None. What
        others have done to it since, a call would have met as well that came a moment before."""
        handle = self._handles.get(SandboxId(id))
        if handle is None or handle.state is not State.READY:
            return None
        return handle if time.monotonic() - handle.connection.known_at < _RECENT_S else None

    async def release(self, id: SandboxId) -> None:
        """Close the streams of a handle and forget it. Quiet if there is none."""
        handle = self._handles.pop(id, None)
        if handle is not None:
            await handle.close()

    async def keep_only(self, live: Container[SandboxId], known: Iterable[SandboxId]) -> None:
        """Release the handles of what was `known` and is not `live`: others ended it, or it ended by itself."""
        for id in known:
            if id not in live:
                await self.release(id)

    @property
    def known(self) -> Sequence[SandboxId]:
        """The sandboxes that there are handles of."""
        return [*self._handles]

    async def aclose(self) -> None:
        for id in self.known:
            await self.release(id)

    async def live_record(self, reference: str) -> Record:
        """Raises NotFound if there is none, or it has ended."""
        record = await self._store.find(reference)
        if not record.is_live:
            raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}")
        await self.addresses.ensure([record])
        await self.networks.ensure([record])
        self._on_seen(record)
        return record

    async def look(self, id: SandboxId) -> Record:
        """The record of a sandbox that does not answer, once its host was asked what became of it."""
        return await self._repair.look(await self._store.get(id))

    async def make(
        self,
        id: SandboxId,
        spec: Spec,
        *,
        ephemeral: bool = False,
        key: str | None = None,
        on_known: Callable[[], None] | None = None,
    ) -> Record:
        """Create a sandbox, or wait for the one that was asked for by this key before. Raises WrongState if that is
        lost, or its maker comes to no end."""
        provider = self._providers.get(spec.provider)
        if spec.snapshot is not None:
            spec = msgspec.structs.replace(spec, snapshot=kept_snapshot(self._store.project, spec.snapshot))
        try:
            made = self._creator.create(id, spec, provider, ephemeral=ephemeral, key=key, on_known=on_known)
            record, is_new = await made
        except (Unsupported, LimitReached, Conflict) as error:
            _log.info("sandbox %s is refused: %s", id, error)
            raise
        if not is_new:
            try:
                async with asyncio.timeout(_OTHERS_S):
                    record = await self._watch.until(record.id, {State.READY, State.PAUSED, State.STOPPED})
            except TimeoutError:
                reason = f"another program has been making it for {_OTHERS_S:g} s: try again, or destroy it"
                raise WrongState(
                    f"sandbox {record.id}, which was asked for by this key, is not ready; {reason}"
                ) from None
        self._on_seen(record)
        return record

    async def adopt(self, id: SandboxId, spec: Spec, enforced: Mapping[str, Enforcement] | None = None) -> Record:
        """Take a box that was made elsewhere into the registry. Raises Conflict or LimitReached."""
        provider = self._providers.get(spec.provider)
        told: dict[str, Any] = msgspec.to_builtins(dict(enforced or {}))
        record, _ = await self._creator.reserve(id, spec, provider, state=State.READY, enforced=told)
        self.ledger.note("adopt", id, **facts.of_spec(spec, self.ledger.redactor))
        return record

    async def destroy(
        self,
        reference: str,
        *,
        volumes: bool = False,
        cause: Cause = Cause.USER,
        grace_s: float | None = None,
        connection: Connection | None = None,
    ) -> None:
        """Destroy a sandbox and remove all of it. Quiet if it has ended; safe while it is being made. Its processes are
        asked to end first, through `connection` if a handle of the caller's own has one. Until they have, nothing is
        decided: if this program dies meanwhile, the sandbox lives on."""
        record = await self._store.find(reference)
        if grace_s := destroy.grace_of(record, cause, grace_s):
            await (connection or self.of(record).connection).terminate(grace_s)
        if connection is not None:
            connection.close()
        await self.release(record.id)
        if record.is_live:
            record = await destroy.mark_for_destroy(self._store, record, cause, volumes=volumes)
            await self.addresses.end(record)
            await self.networks.forget(record)
            try:
                await destroy.finish(self._store, self._providers.get(record.spec.provider), record)
            finally:
                self._creator.admission.ended()

    async def terminate(self, record: Record, grace_s: float | None) -> None:
        """Ask the processes of a sandbox to end, as `destroy` does; it goes on itself."""
        await self.of(record).connection.terminate(destroy.grace_of(record, Cause.USER, grace_s))

    async def note_lifetime(self, id: SandboxId, lifetime: float | str | None, idle: float | str | None) -> Record:
        """Write down when it ends by itself, counted from now."""
        current = await self._store.get(id)
        spec = current.spec.but(lifetime=lifetime, idle=idle)
        record = await self._store.change(current, spec=spec, kind="lifetime", restart_lifetime=True)
        self._on_seen(record)
        return record

    async def change_rules(self, id: SandboxId, decide: Decide) -> Record:
        """Change what it may reach."""
        return await self.networks.change(id, decide)

    async def provide(self, id: SandboxId, values: Mapping[str, str]) -> None:
        """Give its secrets other values."""
        await self.networks.provide(await self._store.get(id), values)

    async def note_env(self, id: SandboxId, env: Mapping[str, str]) -> None:
        """Write down, without the values, what is about to be added to its environment."""
        await self._store.note_env(id, env)

    async def known_env(self, id: SandboxId, client: AgentClient, own: Mapping[str, str]) -> dict[str, str]:
        """The variables that any program added to its environment. Its own agent has the values; of what that tells,
        and of what the handle itself has added, only what was written down last counts."""
        told = await client.call("set_env", {"env": {}}, type=_Told)
        return {**await self._store.vouched(id, told.env), **await self._store.vouched(id, own)}
