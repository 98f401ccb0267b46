"""How the agent and its interpreter get into a box: folders of this host, or a volume of a daemon that is elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import io
import secrets
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from skerry.agent import runtime
from skerry.errors import Conflict, NotFound
from skerry.providers import layout
from skerry.providers.incus.api import PROVIDER, Api
from skerry.providers.incus.info import Info
from skerry.providers.incus.instances import as_config
from skerry.providers.volume_plan import KIND

_FILL_TIMEOUT_S = 120.0
_LAYOUT = "1"
"""Another when the folders of the volume are others."""


class Runtime:
    def __init__(self, api: Api, cache: Path) -> None:
        self._api = api
        self._cache = cache
        self._folders: dict[str, Path] = {}
        self._whole: set[str] = set()
        self._filling: dict[str, asyncio.Lock] = {}
        self.argv: list[str] = []
        """The command that runs a script of the agent, up to the script."""

    async def find(self) -> None:
        """Have the folders on this host."""
        if not self._folders:
            await asyncio.get_running_loop().run_in_executor(None, self._make)

    def _make(self) -> None:
        portable = runtime.portable(self._cache)
        folders = {layout.AGENT: runtime.agent_folder(self._cache, portable.python), layout.PYTHON: portable.folder}
        self.argv = portable.argv(layout.PYTHON)
        self._folders = folders

    async def devices(self, info: Info, member: str | None) -> dict[str, dict[str, str]]:
        """What a box has to be given to have both, read-only."""
        await self.find()
        common = {"type": "disk", "readonly": "true"}
        if info.is_local and not info.is_confined:
            return {
                Path(at).name: {**common, "source": str(folder), "path": at} for at, folder in self._folders.items()
            }
        volume = await self._volume(info.pool, member)
        return {
            Path(at).name: {**common, "pool": info.pool, "source": f"{volume}/{Path(at).name}", "path": at}
            for at in self._folders
        }

    def forget(self) -> None:
        """Somebody may have removed it: look again next time."""
        self._whole.clear()

    async def _volume(self, pool: str, member: str | None) -> str:
        """One for all boxes of a member; many that are made at once wait for the first."""
        key = "\0".join((_LAYOUT, *(folder.name for folder in self._folders.values())))
        name = f"skerry-runtime-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        place = f"{member or ''}/{name}"
        if place not in self._whole:
            async with self._filling.setdefault(place, asyncio.Lock()):
                if place not in self._whole:
                    await self._have(pool, name, {"target": member} if member else {})
                    self._whole.add(place)
            self._filling.pop(place, None)
        return name

    async def _have(self, pool: str, name: str, query: dict[str, str]) -> None:
        """Filled aside and named only when it is whole; another program that was quicker has made the same."""
        volumes = f"/1.0/storage-pools/{pool}/volumes/custom"
        with suppress(NotFound):
            await self._api.get(f"{volumes}/{name}", dict[str, Any], query=query)
            return
        aside = f"{name}-{secrets.token_hex(4)}"
        content = await asyncio.get_running_loop().run_in_executor(None, self._backup, aside)
        headers = {"Content-Type": "application/octet-stream", "X-Incus-name": aside}
        await self._api.do("POST", volumes, query=query, body=content, headers=headers, timeout_s=_FILL_TIMEOUT_S)
        try:
            await self._api.do("POST", f"{volumes}/{aside}", query=query, json={"name": name})
        except Conflict:
            with suppress(NotFound):
                await self._api.do("DELETE", f"{volumes}/{aside}", query=query)

    def _backup(self, name: str) -> bytes:
        """The folders as the backup of a volume, which is what Incus takes in whole."""
        labels = as_config({"skerry": PROVIDER, KIND: "runtime"})
        volume = {
            "name": name,
            "type": "custom",
            "content_type": "filesystem",
            # As they are: to a box the host's root is nobody, and all may read them.
            "config": {"security.unmapped": "true", **labels},
        }
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
            for at, folder in self._folders.items():
                archive.add(folder, f"backup/volume/{Path(at).name}", filter=_roots)
        return content.getvalue()


def _roots(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
