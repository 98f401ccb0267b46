"""What programs import: sandboxes that the registry of this installation knows, without a manager in sight."""

from __future__ import annotations

import asyncio
from typing import Self, Unpack
from weakref import WeakKeyDictionary

import msgspec

from skerry import sandbox
from skerry.errors import WrongState
from skerry.lifecycle import State
from skerry.manager import AsyncSandboxManager
from skerry.providers.base import Provider
from skerry.spec import Spec, SpecOptions


class _Shared:
    """One manager for all sandboxes of an event loop, open while one of them needs it."""

    def __init__(self) -> None:
        self._users = 0
        self._manager: AsyncSandboxManager | None = None
        self._lock = asyncio.Lock()

    async def take(self) -> AsyncSandboxManager:
        async with self._lock:
            if self._manager is None:
                manager = AsyncSandboxManager()
                self._manager = await manager.__aenter__()
            self._users += 1
            return self._manager

    async def give_back(self) -> None:
        async with self._lock:
            self._users -= 1
            if self._users == 0 and self._manager is not None:
                manager, self._manager = self._manager, None
                await manager.aclose()


_shared: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


def _of_this_loop() -> _Shared:
    return _shared.setdefault(asyncio.get_running_loop(), _Shared())


class AsyncSandbox(sandbox.AsyncSandbox):
    """An isolated machine. `async with AsyncSandbox(memory="512M") as sandbox:` makes one and destroys it at the end.

    If the program dies before, the next one that opens the registry destroys it. `create` and `open` are for those who
    decide themselves when it ends.
    """

    _manager: AsyncSandboxManager | None = None
    _lasting = False
    _is_registered = False

    def __init__(self, *, provider_object: Provider | None = None, **options: Unpack[SpecOptions]) -> None:
        super().__init__(provider_object=provider_object, **options)
        self._is_registered = provider_object is None

    @classmethod
    async def create(cls, spec: Spec | None = None, provider: Provider | None = None) -> Self:
        """Make a sandbox that lives until it is destroyed or its time is over. With a provider object of your own it
        is yours alone, and no registry knows it."""
        if provider is not None:
            return await super().create(spec, provider)
        self = cls()
        if spec is not None:
            self._bind(self.id, spec, None)
        self._lasting = True
        await self._create()
        return self

    @classmethod
    async def open(cls, id: str, provider: Provider | str | None = None) -> Self:
        """Reach a sandbox again that was made elsewhere or before, by its id, the beginning of it, or its name."""
        if isinstance(provider, Provider):
            return await super().open(id, provider)
        manager = await _of_this_loop().take()
        self = cls.__new__(cls)
        try:
            found = await manager.get(id)
            self._bind(found.id, found.spec, found._provider)
            self.enforced, self._state = found.enforced, found.state
            self._is_registered, self._manager = True, manager
            await self.ping()
        except BaseException:
            await _of_this_loop().give_back()
            raise
        return self

    async def _create(self) -> None:
        if not self._is_registered:
            await super()._create()
            return
        self._state = State.CREATING
        manager = await _of_this_loop().take()
        try:
            made = await manager.create(self.spec, id=self.id, ephemeral=not self._lasting)
        except BaseException:
            self._state = State.DESTROYED
            await _of_this_loop().give_back()
            raise
        self._provider, self.enforced, self._state = made._provider, made.enforced, made.state
        self.spec = msgspec.structs.replace(self.spec, workspace=made.spec.workspace)
        self._manager = manager

    async def destroy(self, *, volumes: bool = False) -> None:
        """End it and remove all of it. Quiet if that has happened already."""
        if not self._is_registered:
            await super().destroy(volumes=volumes)
            return
        await super().close()
        if self._state is State.DESTROYED:
            return
        if self._state is None:
            raise WrongState("this sandbox was never started")
        manager = self._manager or await _of_this_loop().take()
        try:
            await manager.destroy(self.id, volumes=volumes)
            self._state = State.DESTROYED
        finally:
            self._manager = None
            await _of_this_loop().give_back()

    async def close(self) -> None:
        """Let go of the stream and the registry. The sandbox lives on, and any call opens the stream again."""
        await super().close()
        if self._manager is not None:
            self._manager = None
            await _of_this_loop().give_back()

    async def set_lifetime(self, lifetime: float | str | None = None, idle: float | str | None = None) -> None:
        """Change when it ends by itself, counted from now; None is never."""
        if self._manager is None:
            await super().set_lifetime(lifetime, idle)
        else:
            await self._manager.set_lifetime(self.id, lifetime, idle)
