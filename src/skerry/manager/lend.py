"""Managers for handles that programs make by themselves: one for each event loop, or one of the handle's own."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from skerry.aio import require_asyncio
from skerry.config import Config
from skerry.manager.handles import Handles
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId, Spec
from skerry.providers.base import Provider
from skerry.store import Store


class _OfLoop:
    """The manager of one event loop, open while a handle needs it."""

    def __init__(self) -> None:
        self._users = 0
        self._manager: AsyncSandboxManager | None = None
        self._lock = asyncio.Lock()

    async def take(self) -> AsyncSandboxManager:
        async with self._lock:
            if self._manager is None:
                self._manager = await AsyncSandboxManager().__aenter__()
            self._users += 1
            return self._manager

    async def give_back(self) -> None:
        async with self._lock:
            self._users -= 1
            if self._users == 0 and self._manager is not None:
                manager, self._manager = self._manager, None
                await manager.aclose()


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _OfLoop] = WeakKeyDictionary()


class Shared:
    """The registry of the installation, by the manager that all handles of this event loop share."""

    async def take(self) -> Handles:
        require_asyncio()
        return (await _by_loop.setdefault(asyncio.get_running_loop(), _OfLoop()).take()).handles

    async def give_back(self, *, has_ended: bool = False) -> None:
        await _by_loop.setdefault(asyncio.get_running_loop(), _OfLoop()).give_back()


class Own:
    """A registry in memory for one handle of a provider object of the program's own. The manager is never entered, so
    it has no task and no timer that would have to be ended."""

    def __init__(self, provider: Provider, spec: Spec, settings: Config | None, adopted: SandboxId | None) -> None:
        """`settings` are those of the program if None is given; `adopted` is the id of a box that is there already."""
        self._provider = provider
        self._spec = spec
        self._settings = settings
        self._adopted = adopted
        self._store: Store | None = None
        self._handles: Handles | None = None

    async def take(self) -> Handles:
        require_asyncio()
        if self._handles is None:
            store = self._store = await Store.in_memory()
            providers = {self._spec.provider: self._provider}
            handles = AsyncSandboxManager(self._settings, store=store, providers=providers, reconcile=False).handles
            if self._adopted is not None:
                await handles.adopt(self._adopted, self._spec)
            self._handles = handles
        return self._handles

    async def give_back(self, *, has_ended: bool = False) -> None:
        if has_ended and self._store is not None:
            await self._store.aclose()
            self._store = self._handles = None
