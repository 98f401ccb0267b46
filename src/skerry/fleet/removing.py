"""Ending many members at once, as well as it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from skerry.spec import SandboxId

_AT_ONCE = 32
_REMOVE_S = 120.0
"""How long a box may take to go; its end is written down before, so that the next reconcile goes on with it."""


async def remove(ids: Mapping[str, SandboxId], destroy: Callable[[SandboxId], Awaitable[None]]) -> dict[str, str]:
    """Destroy them in parallel; by name which of them failed, and why."""
    slots = asyncio.Semaphore(_AT_ONCE)
    failed: dict[str, str] = {}

    async def one(name: str, id: SandboxId) -> None:
        try:
            async with slots, asyncio.timeout(_REMOVE_S):
                await destroy(id)
        except TimeoutError:
            failed[name] = f"sandbox {id} did not go within {_REMOVE_S:g} s: it goes with the next reconcile"
        except Exception as error:  # whatever a provider raises, the others go
            failed[name] = str(error) or type(error).__name__

    async with asyncio.TaskGroup() as group:
        for name, id in ids.items():
            group.create_task(one(name, id))
    return failed
