"""Snapshots as images: the files of a box, its work folder included, under a name."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skerry import transfers
from skerry.agent.client import AgentClient
from skerry.agent.guest import trees
from skerry.errors import Conflict, NotFound, ProviderError, SkerryError
from skerry.host import folders, locks
from skerry.providers import layout
from skerry.providers.base import Snapshot
from skerry.providers.engine import image_config, tars
from skerry.providers.engine.api import Engine
from skerry.providers.engine.scratch import is_abandoned, scratch
from skerry.providers.engine.states import Inspected
from skerry.spec import SandboxId

REPOSITORY = "skerry-snapshot"
LABEL = "skerry.snapshot"
_ASIDE = ".snapshot-"
_COPY_TIMEOUT_S = 600.0
_MAX_BYTES = 1 << 40
_MAX_ENTRIES = 1_000_000


class Snapshots:
    def __init__(self, engine: Engine, cache: Path) -> None:
        self._engine = engine
        self._cache = cache

    async def take(self, id: SandboxId, name: str, box: Inspected, client: AgentClient) -> Snapshot:
        """The box's root as it is, and its work folder, which lies on a disk of its own, beside it."""
        if await self._find(name):
            raise Conflict(f"there is a snapshot {name!r} already; remove it, or choose another name")
        with self._aside() as folder:
            home = folder / "home"
            await transfers.download_tree(client, {"path": layout.HOME}, home, _MAX_BYTES)
            root = await self._commit(layout.container_name(id), label=name)
            labels = {LABEL: name, "skerry.from": id, "skerry.instance": _instance(box)}
            image = await image_config.resolve(self._engine, box.image)
            # What the box had of its own besides its files is not the snapshot's.
            config = {"User": image.user, "WorkingDir": image.folder}
            async with scratch(self._engine, root, labels=labels, config=config) as container:
                await self._put(container, home, folder / "home.tar")
                await self._commit(container, tag=name)
        found = await self._find(name)
        if not found:
            raise ProviderError(f"snapshot {name!r} was made, and is not there")
        return found[0]

    async def all(self) -> list[Snapshot]:
        """Whoever asks removes what was left by programs that died while they took one."""
        for image in await self._list(None):
            if _is_unnamed(image) and is_abandoned(float(image.get("Created", 0))):
                with suppress(SkerryError):  # something is made of it, or the next one tries again
                    await self._engine.delete(f"/images/{image['Id']}")
        await asyncio.to_thread(folders.remove_abandoned, self._cache, _ASIDE, is_abandoned)
        return await self._find(None)

    async def remove(self, name: str) -> None:
        if not await self._find(name):
            raise NotFound(f"there is no snapshot {name!r}")
        try:
            await self._engine.delete(f"/images/{REPOSITORY}:{name}")
        except Conflict as error:
            raise Conflict(f"snapshot {name!r} is in use: end the sandboxes that were made of it first") from error

    async def unfold(self, image: str, client: AgentClient) -> None:
        """Put the work folder of a snapshot into the one of a new box."""
        with self._aside() as folder:
            archive = folder / "home.tar"
            async with scratch(self._engine, image) as container:
                path, query = f"/containers/{container}/archive", {"path": layout.HOME}
                async with self._engine.stream("GET", path, query=query, whole_s=_COPY_TIMEOUT_S) as answer:
                    with archive.open("wb") as file:
                        async for piece in answer:
                            file.write(piece)
            with archive.open("rb") as file:
                await asyncio.to_thread(
                    trees.unpack, file.read, os.fsencode(folder), max_bytes=_MAX_BYTES, max_entries=_MAX_ENTRIES
                )
            await transfers.upload_tree(client, folder / Path(layout.HOME).name, {"path": layout.HOME})

    async def _find(self, name: str | None) -> list[Snapshot]:
        return [found for image in await self._list(name) if (found := _as_snapshot(image)) is not None]

    async def _list(self, name: str | None) -> list[dict[str, Any]]:
        label = LABEL if name is None else f"{LABEL}={name}"
        return await self._engine.get("/images/json", list[dict[str, Any]], query={"filters": {"label": [label]}})

    async def _commit(self, container: str, *, tag: str | None = None, label: str | None = None) -> str:
        query = {"container": container, "repo": REPOSITORY if tag else None, "tag": tag}
        if label is not None:
            query["changes"] = f"LABEL {LABEL}={label}"
        made = await self._engine.post("/commit", dict[str, Any], query=query, json={}, timeout_s=_COPY_TIMEOUT_S)
        return str(made["Id"])

    async def _put(self, container: str, home: Path, archive: Path) -> None:
        with archive.open("wb") as file:
            await asyncio.to_thread(trees.pack, os.fsencode(home), file.write)
        made = tars.folder(layout.HOME.lstrip("/"))
        await self._engine.put(f"/containers/{container}/archive", query={"path": "/"}, body=made)
        await self._engine.put(
            f"/containers/{container}/archive",
            query={"path": layout.HOME},
            body=tars.pieces(archive),
            timeout_s=_COPY_TIMEOUT_S,
        )

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=self._cache) as folder, locks.holding(Path(folder)):
                yield Path(folder)
        except OSError as error:
            raise ProviderError(f"the files cannot be kept in {self._cache} meanwhile: {error.strerror}") from error


def _instance(box: Inspected) -> str:
    return (box.config.labels or {}).get("skerry.instance", "")


def _is_unnamed(image: dict[str, Any]) -> bool:
    return not set(image.get("RepoTags") or []) - {"<none>:<none>"}


def _as_snapshot(image: dict[str, Any]) -> Snapshot | None:
    """None for what only descends from a snapshot and carries its labels."""
    labels = image.get("Labels") or {}
    name = labels.get(LABEL, "")
    tags = [tag.rpartition("/")[2] for tag in image.get("RepoTags") or []]
    if f"{REPOSITORY}:{name}" not in tags:
        return None
    return Snapshot(
        name=name,
        id=str(image["Id"]),
        sandbox=labels.get("skerry.from", ""),
        size=int(image.get("Size", 0)),
        created_at=float(image.get("Created", 0)),
    )
