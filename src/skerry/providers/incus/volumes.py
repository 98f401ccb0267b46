"""Volumes of a pool: the agent's own, the data of a sandbox, which outlives it, and the caches of a project."""

from __future__ import annotations

import asyncio
import io
import secrets
import tarfile
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import Conflict, NotFound, SkerryError
from skerry.model.spec import SandboxId
from skerry.providers.base import Volume, log
from skerry.providers.incus.api import PROVIDER, IncusApi
from skerry.providers.incus.info import IncusInfo
from skerry.providers.incus.instances import as_config, inspect, labels
from skerry.providers.shared import layout
from skerry.providers.shared.volume_plan import KIND, Wanted, as_volume, older_runtimes

_FILL_TIMEOUT_S = 120.0
_LAYOUT = "1"
"""Another when the folders of the volume are others."""


class IncusAgentVolume:
    """The agent and its interpreter in a volume, for a daemon that does not see the folders of this host."""

    def __init__(self, api: IncusApi, cache: Path) -> None:
        self._api = api
        self._agent = layout.AgentFolders(cache, _LAYOUT)
        self._whole: set[str] = set()
        self._filling: dict[str, asyncio.Lock] = {}

    async def argv(self) -> list[str]:
        """The command that runs a script of the agent, up to the script."""
        await self._agent.find()
        return self._agent.argv

    async def devices(self, info: IncusInfo, member: str | None) -> dict[str, dict[str, str]]:
        """Devices by which a box has both, read-only: folders of this host, or of the volume."""
        await self._agent.find()
        is_here = info.is_local and not info.is_confined
        volume = "" if is_here else await self._volume(info.pool, member)
        return {
            name: {
                "type": "disk",
                "readonly": "true",
                "path": f"{layout.RUNTIME}/{name}",
                **({"source": str(folder)} if is_here else {"pool": info.pool, "source": f"{volume}/{name}"}),
            }
            for name, folder in self._agent.folders.items()
        }

    def forget(self) -> None:
        """Somebody may have removed it: look again next time."""
        self._whole.clear()

    async def _volume(self, pool: str, member: str | None) -> str:
        """Have one for all boxes of a member; many that are made at once wait for the first."""
        place = member or ""
        if place not in self._whole:
            async with self._filling.setdefault(place, asyncio.Lock()):
                if place not in self._whole:
                    await self._have(_path(pool), self._agent.volume, _at(member))
                    self._whole.add(place)
            self._filling.pop(place, None)
        return self._agent.volume

    async def _have(self, volumes: str, name: str, query: dict[str, str]) -> None:
        """Fill one aside and name it only when it is whole; another program that was quicker has made the same."""
        with suppress(NotFound):
            await self._api.get(f"{volumes}/{name}", dict[str, Any], query=query)
            return
        log.info("incus: filling the agent volume %s", name)
        aside = f"{name}-{secrets.token_hex(4)}"
        content = await asyncio.to_thread(self._backup, aside)
        headers = {"Content-Type": "application/octet-stream", "X-Incus-name": aside}
        await self._api.do("POST", volumes, query=query, body=content, headers=headers, timeout_s=_FILL_TIMEOUT_S)
        try:
            await self._api.do("POST", f"{volumes}/{aside}", query=query, json={"name": name})
        except Conflict:
            log.debug("incus: another program was quicker with the agent volume %s", name)
            with suppress(NotFound):
                await self._api.do("DELETE", f"{volumes}/{aside}", query=query)

    async def sweep(self, pool: str) -> None:
        """Remove those of older versions that no box uses."""
        found = await self._api.get(_path(pool), list[_Found], query={"recursion": "1"})
        ours = [each for each in found if labels(each.config).get(KIND) == "runtime"]
        made = {each.name: each.created_at for each in ours}
        older = older_runtimes(made, made)
        for each in ours:
            if each.name in older and not each.used_by:
                try:
                    await self._api.do("DELETE", f"{_path(pool)}/{each.name}", query=each.target)
                    log.info("incus: removed the agent volume %s of an older version", each.name)
                except SkerryError as error:
                    log.debug("incus: agent volume %s stays: %s", each.name, error)

    def _backup(self, name: str) -> bytes:
        """The folders as the backup of a volume, which is what Incus takes in whole."""
        # As they are: to a box the host's root is nobody, and all may read them.
        config = {"security.unmapped": "true", **as_config({"skerry": PROVIDER, KIND: "runtime"})}
        volume = {"name": name, "type": "custom", "content_type": "filesystem", "config": config}
        index = {"name": name, "backend": "dir", "pool": "default", "type": "custom", "config": {"volume": volume}}
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w") as archive:
            entry = tarfile.TarInfo("backup/index.yaml")
            text = msgspec.json.encode(index)  # which is YAML as well
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
            root = tarfile.TarInfo("backup/volume")
            root.type, root.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(root)
            self._agent.pack(archive, "backup/volume/")
        return content.getvalue()


class _Found(msgspec.Struct):
    name: str
    config: dict[str, str] = {}
    used_by: list[str] | None = None
    created_at: str = ""
    location: str = ""

    @property
    def target(self) -> dict[str, str]:
        return _at(self.location)


class IncusVolumes:
    def __init__(self, api: IncusApi) -> None:
        self._api = api

    async def make(self, pool: str, wanted: Sequence[Wanted], member: str | None, size: int | None) -> None:
        """Have them all. Boxes have host uids of their own, and a volume has to look the same to each."""
        if not wanted:
            return
        query = _at(member)

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
        sizes_known = [size for size in known if size is not None]
        made = [datetime.fromisoformat(each.created_at).timestamp() for each in parts if each.created_at]
        return as_volume(
            parts[0].name,
            labels(parts[0].config),
            in_use=any(each.used_by for each in parts),
            size=sum(sizes_known) if sizes_known else None,
            created_at=min(made, default=None),
        )

    async def data_of(self, pool: str, id: SandboxId) -> list[tuple[str, str]]:
        """The data volume of a box and its member, by its devices if it is there, else by its label."""
        with suppress(NotFound):
            box = await inspect(self._api, id)
            return [(each["source"], box.location) for each in box.devices.values() if each.get("path") == layout.DATA]
        return [
            (each.name, each.location)
            for each in await self._list(pool)
            if labels(each.config).get(KIND) == "data" and labels(each.config).get("skerry.sandbox") == id
        ]

    async def drop(self, pool: str, name: str, member: str) -> None:
        """Quiet if it is gone, or another box has it too."""
        try:
            await self._api.do("DELETE", f"{_path(pool)}/{name}", query=_at(member))
        except (NotFound, Conflict) as error:
            log.debug("incus: volume %s stays: %s", name, error)

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
        path = f"{_path(pool)}/{volume.name}/state"
        try:
            usage = (await self._api.get(path, dict[str, Any], query=volume.target)).get("usage")
        except SkerryError as error:
            log.debug("incus: the size of volume %s is not known: %s", volume.name, error)
            return None
        return int(usage["used"]) if usage else None


def _is_data(wanted: Wanted) -> bool:
    return wanted.labels.get(KIND) == "data"


def _at(member: str | None) -> dict[str, str]:
    """The query for a volume of a member: pools of a cluster may be apart."""
    return {"target": member} if member and member != "none" else {}


def _path(pool: str) -> str:
    return f"/1.0/storage-pools/{pool}/volumes/custom"
