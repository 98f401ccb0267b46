"""Volumes of an engine: the agent's own, the data of a sandbox, which outlives it, and the caches of a project."""

from __future__ import annotations

import asyncio
import os
import secrets
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from skerry import clock
from skerry.aio import backoff
from skerry.errors import Conflict, NotFound, ProviderError, SkerryError
from skerry.providers.base import Volume, log
from skerry.providers.dockerapi.api import Engine
from skerry.providers.dockerapi.containers import SINCE_LABEL, folder_tar, is_abandoned, list_all, scratch, tar, unpack
from skerry.providers.shared import layout
from skerry.providers.shared.volume_plan import KIND, Wanted, as_volume, older_runtimes

if TYPE_CHECKING:
    from skerry.providers.dockerapi.image_config import BoxUser

_FILL_TIMEOUT_S = 120.0
_LAYOUT = "2"
"""Another when the folders below are others."""
_WHOLE = "skerry.whole"
"""The label of the mark with the name of the volume that is whole."""
_SIGHT = "skerry.sight"
"""The label with the name of a file in the volume that no other has: who sees it shares the daemon's files."""
_ASIDE = "volumes"
_COUNT_S = 30.0
_COUNT_AGAIN_S = 0.1


class FoundVolume(msgspec.Struct, rename="pascal"):
    """A volume as an engine tells of it."""

    name: str = ""
    labels: dict[str, str] | None = None
    mountpoint: str = ""
    created_at: str = ""
    usage_data: dict[str, int] | None = None


class VolumeList(msgspec.Struct, rename="pascal"):
    volumes: list[FoundVolume] | None = None


class EngineAgentVolume:
    """The agent and its interpreter, filled in once by each version, mounted read-only into every box.

    A volume cannot be renamed, so a second, empty one marks which of those that were filled at once is whole and used.
    """

    def __init__(self, engine: Engine, cache: Path) -> None:
        self._engine = engine
        self._agent = layout.AgentFolders(cache, _LAYOUT)
        self._is_whole = False
        self._filling = asyncio.Lock()
        self.volume = ""
        self.is_here = False
        """Whether this machine has its files, as far as we may see them; known once the volume is whole."""

    async def prepare(self, image: str) -> None:
        """Have the volume whole; `image` is any that the engine has. Raises ProviderError if others remove it."""
        async with self._filling:
            if not await self.look():
                await self._fill(image)

    async def look(self) -> bool:
        """Whether the volume is whole; nothing is changed."""
        await self._agent.find()
        if not self._is_whole:
            self._is_whole = await self._is_marked()
        return self._is_whole

    def forget(self) -> None:
        """Somebody may have removed it: look again next time."""
        self._is_whole = False

    @property
    def argv(self) -> list[str]:
        """The command that runs a script of the agent, up to the script."""
        return self._agent.argv

    @property
    def _mark(self) -> str:
        return f"{self._agent.volume}-whole"

    async def _is_marked(self) -> bool:
        mark = await self._ours(self._mark)
        labels = (mark.labels or {}) if mark is not None else {}
        name, sight = labels.get(_WHOLE, ""), labels.get(_SIGHT, "")
        volume = await self._ours(name) if name.startswith(self._agent.volume) else None
        if volume is None:
            return False
        self.volume = name
        self.is_here = sight.isalnum() and os.path.exists(f"{volume.mountpoint}/{sight}")
        return True

    async def _ours(self, volume: str) -> FoundVolume | None:
        """Engines make the volumes that they miss, empty and without labels."""
        try:
            found = await self._engine.get(f"/volumes/{volume}", FoundVolume)
        except NotFound:
            return None
        return found if "skerry" in (found.labels or {}) else None

    async def _fill(self, image: str) -> None:
        """Fill a volume of our own and mark it, or use that of whoever was quicker. One that is marked is never written
        to: boxes run from it."""
        with suppress(NotFound):
            await self._engine.delete(f"/volumes/{self._mark}")  # what it names is gone
        log.info("%s: filling the agent volume %s", self._engine.provider, self._agent.volume)
        volume, sight = f"{self._agent.volume}-{secrets.token_hex(4)}", secrets.token_hex(8)
        labels = {"skerry": self._engine.provider, "skerry.volume": "runtime", SINCE_LABEL: str(clock.now())}
        await self._engine.post("/volumes/create", json={"Name": volume, "Labels": labels})
        mount = {"Type": "volume", "Source": volume, "Target": layout.RUNTIME}
        content = await asyncio.to_thread(self._tar, sight)
        async with scratch(self._engine, image, mounts=[mount]) as container:
            await unpack(self._engine, container, layout.RUNTIME, content, _FILL_TIMEOUT_S)
        told = {**labels, _WHOLE: volume, _SIGHT: sight}
        with suppress(Conflict):
            await self._engine.post("/volumes/create", json={"Name": self._mark, "Labels": told})
        self._is_whole = await self._is_marked()
        await self._sweep("" if self.volume == volume else volume)
        if not self._is_whole:
            raise ProviderError("the volume with the agent was removed while it was filled; try again")

    async def _sweep(self, own: str) -> None:
        """Remove the volume that we filled in vain, and those of programs that died while they filled one."""
        filters = {"label": ["skerry.volume=runtime"], "name": [self._agent.volume]}
        found = await self._engine.get("/volumes", VolumeList, query={"filters": filters})
        for each in found.volumes or []:
            is_other = each.name not in (self.volume, self._mark) and each.name.startswith(f"{self._agent.volume}-")
            if is_other and (each.name == own or is_abandoned(each.labels)):
                try:
                    await self._engine.delete(f"/volumes/{each.name}")
                    log.info("%s: removed the abandoned agent volume %s", self._engine.provider, each.name)
                except (NotFound, Conflict) as error:  # boxes of before use it
                    log.debug("%s: agent volume %s stays: %s", self._engine.provider, each.name, error)

    def _tar(self, sight: str) -> bytes:
        def fill(archive: tarfile.TarFile) -> None:
            self._agent.pack(archive)
            run = tarfile.TarInfo(os.path.basename(layout.RUN))
            run.type, run.mode = tarfile.DIRTYPE, 0o1777  # runc gives a tmpfs the mode of what it covers
            archive.addfile(run)
            archive.addfile(tarfile.TarInfo(sight))

        return tar(fill)


async def sweep_runtimes(engine: Engine) -> None:
    """Remove the agent volumes of older versions, each with its mark. The engine keeps one that a box uses."""
    filters = {"label": [f"{KIND}=runtime", f"skerry={engine.provider}"]}
    found = (await engine.get("/volumes", VolumeList, query={"filters": filters})).volumes or []
    marks = {whole: each.name for each in found if (whole := (each.labels or {}).get(_WHOLE))}
    volumes = {each.name: each.created_at for each in found if each.name not in marks.values()}
    for name in older_runtimes(volumes, marks):
        try:
            await engine.delete(f"/volumes/{name}")
            if name in marks:
                await engine.delete(f"/volumes/{marks[name]}")
            log.info("%s: removed the agent volume %s of an older version", engine.provider, name)
        except SkerryError as error:
            log.debug("%s: agent volume %s stays: %s", engine.provider, name, error)


class EngineVolumes:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def make(self, wanted: Sequence[Wanted], user: BoxUser, image: str, *, is_local: bool) -> None:
        """Have them, and give each to the box's user."""
        left = []
        for each in wanted:
            made = await self._engine.post(
                "/volumes/create", FoundVolume, json={"Name": each.name, "Labels": each.labels}
            )
            if is_local and os.geteuid() == 0 and os.path.isdir(made.mountpoint):
                os.chown(made.mountpoint, user.uid, user.gid, follow_symlinks=False)
                os.chmod(made.mountpoint, each.mode)
            else:
                left.append(each)
        if not left:
            return
        # Where we do not share the engine's files, their folders are unpacked over themselves, with owner and mode.
        mounts = [as_mount(each.name, f"/{_ASIDE}/{each.name}", read_only=False) for each in left]
        async with scratch(self._engine, image, mounts=mounts) as container:
            for each in left:
                content = folder_tar(f"{_ASIDE}/{each.name}", mode=each.mode, uid=user.uid, gid=user.gid)
                await unpack(self._engine, container, "/", content)

    async def all(self, *, sizes: bool) -> list[Volume]:
        ours = f"skerry={self._engine.provider}"
        boxes, known = await list_all(self._engine, ours), await self._sizes() if sizes else {}
        used = {str(mount.get("Name")) for box in boxes for mount in box.mounts or []}
        found = await self._engine.get("/volumes", VolumeList, query={"filters": {"label": [ours]}})
        return [
            as_volume(
                each.name,
                each.labels or {},
                in_use=each.name in used,
                size=known.get(each.name),
                created_at=datetime.fromisoformat(each.created_at).timestamp() if each.created_at else None,
            )
            for each in found.volumes or []
            if (each.labels or {}).get(KIND) != "runtime"
        ]

    async def remove(self, name: str) -> None:
        labels = (await self._engine.get(f"/volumes/{name}", FoundVolume)).labels or {}
        if labels.get("skerry") != self._engine.provider:
            raise NotFound(f"volume {name!r} is not one of skerry's")
        try:
            await self._engine.delete(f"/volumes/{name}")
        except Conflict as error:
            raise Conflict(f"volume {name!r} is in use: end the sandboxes that have it first") from error

    async def _sizes(self) -> dict[str, int]:
        """Sizes by name, as far as the engine tells them. Docker counts for one at a time, and refuses the others."""
        deadline = time.monotonic() + _COUNT_S
        for delay_s in backoff(_COUNT_AGAIN_S, _COUNT_AGAIN_S):
            try:
                found = (await self._engine.get("/system/df", VolumeList)).volumes or []
                break
            except ProviderError as error:
                if "already running" not in str(error) or time.monotonic() > deadline:
                    raise
                log.debug("%s: another counts the sizes of volumes, trying again", self._engine.provider)
            await asyncio.sleep(delay_s)
        sizes = {each.name: (each.usage_data or {}).get("Size", -1) for each in found}
        return {name: size for name, size in sizes.items() if size >= 0}


def as_mount(name: str, target: str, *, read_only: bool) -> dict[str, Any]:
    """Mount a volume; a name that is a path is a folder of the engine's own host."""
    mount = {"Source": name, "Target": target, "ReadOnly": read_only}
    if name.startswith("/"):
        return {"Type": "bind", **mount, "BindOptions": {"Propagation": "rprivate"}}
    return {"Type": "volume", **mount, "VolumeOptions": {"NoCopy": True}}
