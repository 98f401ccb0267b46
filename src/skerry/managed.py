"""A sandbox as the manager hands it out: its end, and when that will be, are written down."""

from __future__ import annotations

from typing import Protocol, Self

from skerry.lifecycle import State
from skerry.sandbox import AsyncSandbox


class Keeper(Protocol):
    """Who knows of it: the manager."""

    async def destroy(self, reference: str, *, volumes: bool = False) -> None: ...

    async def set_lifetime(
        self, reference: str, lifetime: float | str | None = None, idle: float | str | None = None
    ) -> None: ...


class ManagedSandbox(AsyncSandbox):
    _manager: Keeper

    async def __aenter__(self) -> Self:
        """It is ready already; leaving the `with` destroys it."""
        return self

    async def destroy(self, *, volumes: bool = False) -> None:
        await self.close()
        if self._state is not State.DESTROYED:
            await self._manager.destroy(self.id, volumes=volumes)
            self._state = State.DESTROYED

    async def set_lifetime(self, lifetime: float | str | None = None, idle: float | str | None = None) -> None:
        await self._manager.set_lifetime(self.id, lifetime, idle)
