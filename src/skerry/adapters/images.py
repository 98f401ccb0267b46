"""Images that tasks of frameworks are made of: built or pulled once, by the provider that makes boxes of them."""

from __future__ import annotations

import asyncio
from weakref import WeakValueDictionary

from skerry.adapters.compose import Build
from skerry.manager.manager import AsyncSandboxManager

_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
"""One for each image in the making."""


async def make_image(
    manager: AsyncSandboxManager,
    build: Build,
    name: str,
    provider: str,
    *,
    network: str = "bridge",
    again: bool = False,
) -> str:
    """The name of an image that is there: pulled, or built under `name`, if it was not; with `again` built anew. Raises
    what `pull_image` and `build_base_image` of the manager do."""
    name = build.image or name
    lock = _locks.setdefault(name, asyncio.Lock())
    async with lock:
        if not (again and not build.image) and await _is_there(manager, name, provider):
            return name
        if build.image:
            await manager.pull_image(name, provider=provider)
            return name
        await manager.build_base_image(
            build.context / build.dockerfile,
            provider=provider,
            name=name,
            context=build.context,
            args=build.args,
            target=build.target,
            network=network,
        )
    return name


async def _is_there(manager: AsyncSandboxManager, name: str, provider: str) -> bool:
    wanted = {name, f"{name}:latest"}
    return any(wanted & set(image.names) for image in await manager.images(provider=provider))
