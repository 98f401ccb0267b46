"""Volumes of a pool: the data of a sandbox, which outlives it, and the caches of a project."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import msgspec

from skerry.errors import Conflict, NotFound, SkerryError
from skerry.providers.base import Volume
from skerry.providers.incus.api import PROVIDER, Api
from skerry.providers.incus.instances import as_config, labels
from skerry.providers.volume_plan import KIND, Wanted, as_volume
from skerry.spec import SandboxId


class _Found(msgspec.Struct):
    name: str
    config: dict[str, str] = {}
    used_by: list[str] | None = None
    created_at: str = ""
    location: str = ""

    @property
    def target(self) -> dict[str, str]:
        """Pools of a cluster may be apart: the member that has it has to be told."""
        return _at(self.location)


class Volumes:
    def __init__(self, api: Api) -> None:
        self._api = api

    async def make(self, pool: str, wanted: Sequence[Wanted], member: str | None, size: int | None) -> None:
        """Have them all. Boxes have host uids of their own, and a volume has to look the same to each."""
        if not wanted:
            return
        query = {"target": member} if member else {}

        async def one(each: Wanted) -> None:
            # A cache is its whole project's, and not for one box to bound.
            quota = {"size": str(size)} if size is not None and _is_data(each) else {}
            config = {"security.shifted": "true", **quota, **as_config(each.labels)}
            try:
                await self._api.do("POST", _path(pool), query=query, json={"name": each.name, "config": config})
            except Conflict:
                if quota:  # it is from an earlier box, which may have had another disk
                    await self._api.do("PATCH", f"{_path(pool)}/{each.name}", query=query, json={"config": quota})

        if len(wanted) == 1:
            await one(wanted[0])
            return
        there = {each.name for each in await self._list(pool) if each.target in ({}, query)}
        await asyncio.gather(*(one(each) for each in wanted if _is_data(each) or each.name not in there))

    async def home(self, pool: str, wanted: Sequence[Wanted]) -> str | None:
        """The member of a cluster that has the data of a box from before; None if none has, or any can reach it."""
        names = {each.name for each in wanted if _is_data(each)}
        found = [each.target for each in await self._list(pool) if each.name in names] if names else []
        return found[0].get("target") if found else None

    async def all(self, pool: str, *, sizes: bool) -> list[Volume]:
        ours: dict[str, list[_Found]] = {}
        for each in await self._list(pool):
            if labels(each.config).get(KIND) != "runtime":
                ours.setdefault(each.name, []).append(each)
        return await asyncio.gather(*(self._as_one(pool, each, sizes=sizes) for each in ours.values()))

    async def _as_one(self, pool: str, parts: Sequence[_Found], *, sizes: bool) -> Volume:
        """The cache of a project is on each member of a cluster that it was used on."""
        known = await asyncio.gather(*(self._size(pool, each) for each in parts)) if sizes else []
        made = [datetime.fromisoformat(each.created_at).timestamp() for each in parts if each.created_at]
        return as_volume(
            parts[0].name,
            labels(parts[0].config),
            in_use=any(each.used_by for each in parts),
            size=sum(size for size in known if size is not None) if any(size is not None for size in known) else None,
            created_at=min(made, default=None),
        )

    async def data_of(self, pool: str, id: SandboxId) -> list[tuple[str, str]]:
        """The names and members of a box's volumes, by their label, for a box that is gone."""
        return [
            (each.name, each.location)
            for each in await self._list(pool)
            if labels(each.config).get(KIND) == "data" and labels(each.config).get("skerry.sandbox") == id
        ]

    async def drop(self, pool: str, name: str, member: str) -> None:
        """Quiet if it is gone, or another box has it too."""
        with suppress(NotFound, Conflict):
            await self._api.do("DELETE", f"{_path(pool)}/{name}", query=_at(member))

    async def remove(self, pool: str, name: str) -> None:
        found = [each for each in await self._list(pool) if each.name == name]
        if not found:
            raise NotFound(f"volume {name!r} is not one of skerry's")
        for each in found:
            if each.used_by:
                raise Conflict(f"volume {name!r} is in use: end the sandboxes that have it first")
            await self._api.do("DELETE", f"{_path(pool)}/{name}", query=each.target)

    async def _list(self, pool: str) -> list[_Found]:
        found = await self._api.get(_path(pool), list[_Found], query={"recursion": "1"})
        return [each for each in found if labels(each.config).get("skerry") == PROVIDER]

    async def _size(self, pool: str, volume: _Found) -> int | None:
        """None where the pool does not tell."""
        with suppress(SkerryError):
            path = f"{_path(pool)}/{volume.name}/state"
            usage = (await self._api.get(path, dict[str, Any], query=volume.target)).get("usage")
            return int(usage["used"]) if usage else None
        return None


def _is_data(wanted: Wanted) -> bool:
    return wanted.labels.get(KIND) == "data"


def _at(member: str) -> dict[str, str]:
    return {"target": member} if member not in ("", "none") else {}


def _path(pool: str) -> str:
    return f"/1.0/storage-pools/{pool}/volumes/custom"


def device(pool: str, wanted: Wanted) -> dict[str, str]:
    common = {"type": "disk", "pool": pool, "source": wanted.name, "path": wanted.target}
    return {**common, "readonly": "true"} if wanted.read_only else common
