"""The volume with the agent and its interpreter: filled once by each version, then mounted read-only into every box."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import tarfile
from contextlib import suppress
from pathlib import Path

import msgspec

from skerry.agent import runtime
from skerry.errors import Conflict, NotFound
from skerry.providers import layout
from skerry.providers.engine import tars
from skerry.providers.engine.api import Engine
from skerry.providers.engine.scratch import scratch

_FILL_TIMEOUT_S = 120.0
_LAYOUT = "2"
"""Another when the folders below are others."""
_SIGHT = "skerry.sight"
"""The label with the name of a file in the volume that no other has: who sees it shares the daemon's files."""


class _Found(msgspec.Struct, rename="pascal"):
    labels: dict[str, str] | None = None
    mountpoint: str = ""


class Runtime:
    """A volume cannot be renamed or marked when it is whole, so a second, empty one is the mark."""

    def __init__(self, engine: Engine, cache: Path) -> None:
        self._engine = engine
        self._cache = cache
        self._is_whole = False
        self._folders: dict[str, Path] | None = None
        self.argv: list[str] = []
        """The command that runs a script of the agent, up to the script."""
        self.volume = ""
        self.is_here = False
        """Whether this machine has its files, as far as we may see them; known once the volume is whole."""

    async def prepare(self, image: str) -> None:
        """Have the volume whole; `image` is any that the engine has."""
        if not await self.look():
            await self._fill(image)
            await self.look()
        self._is_whole = True

    async def look(self) -> bool:
        """Whether the volume is whole; nothing is changed."""
        if self._folders is None:
            await asyncio.get_running_loop().run_in_executor(None, self._find)
        if not self._is_whole:
            self._is_whole = await self._is_marked()
        return self._is_whole

    def forget(self) -> None:
        """Somebody may have removed it: look again next time."""
        self._is_whole = False

    def _find(self) -> None:
        portable = runtime.portable(self._cache)
        agent = runtime.agent_folder(self._cache, portable.python)
        key = hashlib.sha256(f"{_LAYOUT}\0{portable.folder.name}\0{agent.name}".encode()).hexdigest()[:16]
        self._folders = {"agent": agent, "python": portable.folder}
        self.argv = portable.argv(layout.PYTHON)
        self.volume = f"skerry-runtime-{key}"

    @property
    def _mark(self) -> str:
        return f"{self.volume}-whole"

    async def _is_marked(self) -> bool:
        mark = await self._ours(self._mark)
        volume = await self._ours(self.volume) if mark is not None else None
        if mark is None or volume is None:
            return False
        sight = (mark.labels or {}).get(_SIGHT, "")
        self.is_here = sight.isalnum() and os.path.exists(f"{volume.mountpoint}/{sight}")
        return True

    async def _ours(self, volume: str) -> _Found | None:
        """Engines make the volumes that they miss, empty and without labels."""
        try:
            found = await self._engine.get(f"/volumes/{volume}", _Found)
        except NotFound:
            return None
        return found if "skerry" in (found.labels or {}) else None

    async def _fill(self, image: str) -> None:
        """Through a container that never runs; those who fill it at the same time write the same, but for the
        file to be seen by, of which the mark names one."""
        with suppress(NotFound):
            await self._engine.delete(f"/volumes/{self._mark}")
        if await self._ours(self.volume) is None:
            with suppress(NotFound, Conflict):
                await self._engine.delete(f"/volumes/{self.volume}")
        labels = {"skerry": self._engine.provider, "skerry.volume": "runtime"}
        await self._engine.post("/volumes/create", json={"Name": self.volume, "Labels": labels})
        mount = {"Type": "volume", "Source": self.volume, "Target": layout.RUNTIME}
        sight = secrets.token_hex(8)
        content = await asyncio.get_running_loop().run_in_executor(None, self._tar, sight)
        async with scratch(self._engine, image, mounts=[mount]) as container:
            query = {"path": layout.RUNTIME}
            await self._engine.put(
                f"/containers/{container}/archive", query=query, body=content, timeout_s=_FILL_TIMEOUT_S
            )
        await self._engine.post("/volumes/create", json={"Name": self._mark, "Labels": {**labels, _SIGHT: sight}})

    def _tar(self, sight: str) -> bytes:
        def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid = entry.gid = 0
            entry.uname = entry.gname = ""
            return entry

        def fill(archive: tarfile.TarFile) -> None:
            for name, folder in (self._folders or {}).items():
                archive.add(folder, name, filter=plain)
            run = tarfile.TarInfo(os.path.basename(layout.RUN))
            run.type, run.mode = tarfile.DIRTYPE, 0o1777  # runc gives a tmpfs the mode of what it covers
            archive.addfile(run)
            archive.addfile(tarfile.TarInfo(sight))

        return tars.tar(fill)
