"""Named volumes: the data of a sandbox, which outlives it, and the caches of a project."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from skerry import caches
from skerry.errors import Conflict, NotFound
from skerry.providers.base import Volume
from skerry.providers.engine import layout, tars
from skerry.providers.engine.api import Engine
from skerry.providers.engine.image_config import User
from skerry.providers.engine.scratch import scratch
from skerry.spec import Cache, SandboxId, Spec

INSTANCE = "skerry.instance"
_KIND = "skerry.volume"
_ASIDE = "volumes"


class Wanted(msgspec.Struct, frozen=True):
    """A volume that a box is to have."""

    name: str
    target: str
    labels: dict[str, str]
    mode: int
    read_only: bool = False

    def as_mount(self) -> dict[str, Any]:
        options = {"NoCopy": True}
        return {
            "Type": "volume",
            "Source": self.name,
            "Target": self.target,
            "ReadOnly": self.read_only,
            "VolumeOptions": options,
        }


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

    def wanted(self, id: SandboxId, spec: Spec) -> list[Wanted]:
        instance = spec.labels.get(INSTANCE, "")
        common = {"skerry": self._engine.provider, "skerry.project": spec.project, INSTANCE: instance}
        wanted = []
        if has_data(spec):
            labels = {**common, _KIND: "data", "skerry.sandbox": id, "skerry.name": spec.name or ""}
            wanted.append(Wanted(_data_name(id, spec, instance), layout.DATA, labels, 0o755))
        for tool, path in caches.mounts(spec):
            labels = {**common, _KIND: "cache", "skerry.name": tool}
            name = f"skerry-cache-{tool}-{_short(instance, spec.project)}"
            wanted.append(Wanted(name, path, labels, 0o1777, spec.cache is Cache.READ))
        return wanted

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
        mounts = [{**each.as_mount(), "Target": f"/{_ASIDE}/{each.name}", "ReadOnly": False} for each in wanted]
        async with scratch(self._engine, image, mounts=mounts) as container:
            for each in wanted:
                content = tars.folder(f"{_ASIDE}/{each.name}", mode=each.mode, uid=user.uid, gid=user.gid)
                await self._engine.put(f"/containers/{container}/archive", query={"path": "/"}, body=content)

    async def all(self, *, sizes: bool) -> list[Volume]:
        used, known = await self._used(), await self._sizes() if sizes else {}
        return [
            _as_volume(each, in_use=each.name in used, size=known.get(each.name))
            for each in await self._list()
            if (each.labels or {}).get(_KIND) != "runtime"
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
        everything = (await self._engine.get("/system/df", _List)).volumes or []
        sizes = {each.name: (each.usage_data or {}).get("Size", -1) for each in everything}
        return {name: size for name, size in sizes.items() if size >= 0}

    async def _used(self) -> set[str]:
        query = {"all": True, "filters": {"label": [f"skerry={self._engine.provider}"]}}
        found = await self._engine.get("/containers/json", list[dict[str, Any]], query=query)
        return {str(mount.get("Name")) for container in found for mount in container.get("Mounts") or []}


def has_data(spec: Spec) -> bool:
    """A volume has no quota, so one that was not asked for is not there where a limit was."""
    return spec.disk is None if spec.data is None else spec.data


def _data_name(id: SandboxId, spec: Spec, instance: str) -> str:
    """By the sandbox's name, if it has one: made again under that name, it finds its data."""
    if spec.name is None:
        return f"skerry-data-{id}"
    return f"skerry-data-{spec.name}-{_short(instance, spec.project, spec.name)}"


def _short(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _own(mountpoint: str, wanted: Wanted, user: User) -> bool:
    """Give a volume to its user on this host, where we may."""
    if os.geteuid() != 0 or not os.path.isdir(mountpoint):
        return False
    os.chown(mountpoint, user.uid, user.gid, follow_symlinks=False)
    os.chmod(mountpoint, wanted.mode)
    return True


def _as_volume(found: _Found, *, in_use: bool, size: int | None) -> Volume:
    labels: Mapping[str, str] = found.labels or {}
    return Volume(
        name=found.name,
        kind=labels.get(_KIND, ""),
        project=labels.get("skerry.project", ""),
        sandbox=labels.get("skerry.sandbox"),
        label=labels.get("skerry.name", ""),
        size=size,
        in_use=in_use,
        created_at=datetime.fromisoformat(found.created_at).timestamp() if found.created_at else None,
    )
