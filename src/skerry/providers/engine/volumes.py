"""Named volumes: the data of a sandbox, which outlives it, and the caches of a project."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from skerry.errors import Conflict, NotFound, ProviderError
from skerry.providers.base import Volume
from skerry.providers.engine import tars
from skerry.providers.engine.api import Engine
from skerry.providers.engine.image_config import User
from skerry.providers.engine.scratch import scratch
from skerry.providers.volume_plan import KIND, Wanted, as_volume

_ASIDE = "volumes"
_COUNT_S = 30.0
_COUNT_AGAIN_S = 0.1


class _Found(msgspec.Struct, rename="pascal"):
    name: str
    labels: dict[str, str] | None = None
    mountpoint: str = ""
    created_at: str = ""
    usage_data: dict[str, int] | None = None


class _List(msgspec.Struct, rename="pascal"):
    volumes: list[_Found] | None = None


class Volumes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def make(self, wanted: Sequence[Wanted], user: User, image: str, *, is_local: bool) -> None:
        """Have them, and give each to the box's user."""
        left = []
        for each in wanted:
            made = await self._engine.post("/volumes/create", _Found, json={"Name": each.name, "Labels": each.labels})
            if not (is_local and _own(made.mountpoint, each, user)):
                left.append(each)
        if left:
            await self._own_elsewhere(left, user, image)

    async def _own_elsewhere(self, wanted: Sequence[Wanted], user: User, image: str) -> None:
        """Where we do not share the engine's files: unpack their folders, with owner and mode, over themselves."""
        mounts = [{**as_mount(each), "Target": f"/{_ASIDE}/{each.name}", "ReadOnly": False} for each in wanted]
        async with scratch(self._engine, image, mounts=mounts) as container:
            for each in wanted:
                content = tars.folder(f"{_ASIDE}/{each.name}", mode=each.mode, uid=user.uid, gid=user.gid)
                await self._engine.put(f"/containers/{container}/archive", query={"path": "/"}, body=content)

    async def all(self, *, sizes: bool) -> list[Volume]:
        used, known = await self._used(), await self._sizes() if sizes else {}
        return [
            as_volume(
                each.name,
                each.labels or {},
                in_use=each.name in used,
                size=known.get(each.name),
                created_at=datetime.fromisoformat(each.created_at).timestamp() if each.created_at else None,
            )
            for each in await self._list()
            if (each.labels or {}).get(KIND) != "runtime"
        ]

    async def remove(self, name: str) -> None:
        labels = (await self._engine.get(f"/volumes/{name}", _Found)).labels or {}
        if labels.get("skerry") != self._engine.provider:
            raise NotFound(f"volume {name!r} is not one of skerry's")
        try:
            await self._engine.delete(f"/volumes/{name}")
        except Conflict as error:
            raise Conflict(f"volume {name!r} is in use: end the sandboxes that have it first") from error

    async def _list(self) -> list[_Found]:
        query = {"filters": {"label": [f"skerry={self._engine.provider}"]}}
        return (await self._engine.get("/volumes", _List, query=query)).volumes or []

    async def _sizes(self) -> dict[str, int]:
        """By name, for all there are; those that the engine does not tell are not in it."""
        everything = (await self._disk_use()).volumes or []
        sizes = {each.name: (each.usage_data or {}).get("Size", -1) for each in everything}
        return {name: size for name, size in sizes.items() if size >= 0}

    async def _disk_use(self) -> _List:
        """Docker counts for one at a time, and refuses the others."""
        deadline = time.monotonic() + _COUNT_S
        while True:
            try:
                return await self._engine.get("/system/df", _List)
            except ProviderError as error:
                if "already running" not in str(error) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_COUNT_AGAIN_S)

    async def _used(self) -> set[str]:
        query = {"all": True, "filters": {"label": [f"skerry={self._engine.provider}"]}}
        found = await self._engine.get("/containers/json", list[dict[str, Any]], query=query)
        return {str(mount.get("Name")) for container in found for mount in container.get("Mounts") or []}


def _own(mountpoint: str, wanted: Wanted, user: User) -> bool:
    """Give a volume to its user on this host, where we may."""
    if os.geteuid() != 0 or not os.path.isdir(mountpoint):
        return False
    os.chown(mountpoint, user.uid, user.gid, follow_symlinks=False)
    os.chmod(mountpoint, wanted.mode)
    return True


def as_mount(wanted: Wanted) -> dict[str, Any]:
    options = {"NoCopy": True}
    return {
        "Type": "volume",
        "Source": wanted.name,
        "Target": wanted.target,
        "ReadOnly": wanted.read_only,
        "VolumeOptions": options,
    }
