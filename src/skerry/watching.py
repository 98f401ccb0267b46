"""Following what providers tell of their boxes, so that what others do by hand is written down when it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from skerry import lifecycle
from skerry.errors import SkerryError
from skerry.providers.base import BoxChange, CanWatch, Capability, Provider
from skerry.reconcile import FOLLOWED
from skerry.repair import Repair
from skerry.store import Store

_LOOK_S = 2.0
"""How often it is seen whether there are sandboxes of another provider by now."""
_BACKOFF_S = (0.1, 30.0)
"""First and longest wait until a provider that went away is tried again."""


class Watcher:
    def __init__(self, store: Store, provider: Callable[[str], Provider], repair: Repair) -> None:
        self._store = store
        self._provider = provider
        self._repair = repair

    async def run(self) -> None:
        """Until it is cancelled."""
        watched: set[str] = set()
        async with asyncio.TaskGroup() as group:
            while True:
                for name in await self._names() - watched:
                    watched.add(name)
                    group.create_task(self._watch(name))
                await asyncio.sleep(_LOOK_S)

    async def _names(self) -> set[str]:
        with suppress(SkerryError):  # a registry that is away is asked again
            return {record.spec.provider for record in await self._store.list()}
        return set()

    async def _watch(self, name: str) -> None:
        """What happened while a provider was away is told when it is back: it begins with every box there is."""
        try:
            host: CanWatch = lifecycle.able(self._provider(name), Capability.WATCH)
        except SkerryError:
            return  # it tells nothing, or cannot be loaded
        wait, longest = _BACKOFF_S
        while True:
            changes = host.watch()
            try:
                async for change in changes:
                    wait = _BACKOFF_S[0]
                    await self._follow(name, change)
            except (SkerryError, OSError):
                pass
            finally:
                close = getattr(changes, "aclose", None)
                if close is not None:
                    await close()
            await asyncio.sleep(wait)
            wait = min(wait * 2, longest)

    async def _follow(self, name: str, change: BoxChange) -> None:
        with suppress(SkerryError):  # the next change, or the next reconcile, sees it again
            record = await self._store.get(change.id)
            state = None if change.status is None else FOLLOWED.get(change.status.state)
            if record.is_live and record.spec.provider == name and record.state is not state:
                await self._repair.sandbox(record)
