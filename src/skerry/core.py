"""What all parts of the manager stand on: store and providers, and to find a sandbox and to end it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Self

import msgspec

from skerry import ending
from skerry.config import Config
from skerry.config import load as load_config
from skerry.errors import ConfigError, NotFound, WrongState
from skerry.making import Maker
from skerry.managed import ManagedSandbox
from skerry.providers.base import Capability, Enforcement, Provider
from skerry.records import Cause, Filter, Record
from skerry.repair import Repair
from skerry.sandbox import AsyncSandbox
from skerry.spec import SandboxId
from skerry.store import Store


class ManagerCore:
    def __init__(
        self,
        config: Config | None = None,
        *,
        store: Store | None = None,
        providers: Mapping[str, Provider] | None = None,
        reconcile: bool = True,
    ) -> None:
        self._config = config or load_config()
        self._given_store = store
        self._open_store: Store | None = store
        self._providers: dict[str, Provider] = dict(providers or {})
        self._given_providers = frozenset(self._providers)
        self._reconcile_on_start = reconcile
        self._handles: dict[SandboxId, ManagedSandbox] = {}

    @property
    def config(self) -> Config:
        return self._config

    @property
    def store(self) -> Store:
        if self._open_store is None:
            raise WrongState("the manager is not open: enter it with `async with`")
        return self._open_store

    @property
    def _maker(self) -> Maker:
        return Maker(self.store, self._config)

    @property
    def _repair(self) -> Repair:
        return Repair(self.store, self.provider, self._maker)

    async def __aenter__(self) -> Self:
        if self._open_store is None:
            self._open_store = await Store.open(self._config.database)
        if self._reconcile_on_start:
            await self._repair.unfinished()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of streams, providers and the store. Sandboxes live on."""
        for handle in self._handles.values():
            await handle.close()
        self._handles.clear()
        for name, provider in self._providers.items():
            if name not in self._given_providers:
                await provider.aclose()
        if self._open_store is not None and self._given_store is None:
            await self._open_store.aclose()
            self._open_store = None

    def provider(self, name: str) -> Provider:
        if name not in self._providers:
            self._providers[name] = self._config.load_provider(name)
        return self._providers[name]

    async def _provider_names(self, *, include_ended: bool = False) -> list[str]:
        """Every provider that the registry speaks of, and the default one."""
        records = await self.store.list(Filter(include_ended=include_ended))
        return sorted({record.spec.provider for record in records} | {self._config.provider, *self._providers})

    async def _able_providers(self, capability: Capability, name: str | None) -> list[Provider]:
        """The one that is meant; or all that have a capability, also those whose sandboxes have all ended."""
        if name is not None:
            return [self.provider(name)]
        found = []
        for each in await self._provider_names(include_ended=True):
            with suppress(NotFound, ConfigError):  # one that is no longer installed holds nothing that we could reach
                found.append(self.provider(each))
        return [provider for provider in found if capability in provider.capabilities]

    def _handle(self, record: Record) -> ManagedSandbox:
        handle = self._handles.get(record.id)
        if handle is None:
            handle = ManagedSandbox.__new__(ManagedSandbox)
            handle._bind(record.id, record.spec, self.provider(record.spec.provider))
            handle._manager = self
            self._handles[record.id] = handle
        handle._state = record.state
        handle.enforced = msgspec.convert(record.enforced, dict[str, Enforcement])
        return handle

    async def get(self, reference: str) -> AsyncSandbox:
        """A sandbox by its id, the beginning of it, or its name."""
        record = await self.record(reference)
        if not record.is_live:
            raise NotFound(f"sandbox {record.id} has ended: {record.cause or 'destroyed'}")
        return self._handle(record)

    async def record(self, reference: str) -> Record:
        """What the registry knows of it, also when it has ended."""
        return await self.store.find(reference)

    async def destroy(self, reference: str, *, volumes: bool = False, cause: Cause = Cause.USER) -> None:
        """End a sandbox and remove all of it. Quiet if it has ended; safe while it is being made."""
        record = await self.record(reference)
        handle = self._handles.pop(record.id, None)
        if handle is not None:
            await handle.close()
        if record.is_live:
            record = await ending.doom(self.store, record, cause, volumes=volumes)
            await ending.finish(self.store, self.provider, record)

    async def set_lifetime(
        self, reference: str, lifetime: float | str | None = None, idle: float | str | None = None
    ) -> None:
        """Change when it ends by itself, counted from now; None is never. The agent keeps the time."""
        record = await self.record(reference)
        await AsyncSandbox.set_lifetime(self._handle(record), lifetime, idle)
        spec = record.spec.but(lifetime=lifetime, idle=idle)
        if spec.lifetime_s:
            spec = msgspec.structs.replace(spec, lifetime_s=time.time() - record.created_at + spec.lifetime_s)
        await self.store.change(await self.store.get(record.id), spec=spec, kind="lifetime")
        self._handle(record).spec = spec
