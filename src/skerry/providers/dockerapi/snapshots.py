"""Snapshots as images: the files of a box, its work folder included, under a name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skerry import clock
from skerry.agent import transfers
from skerry.agent.client import AgentClient
from skerry.agent.guest import trees
from skerry.errors import Conflict, NotFound, ProviderError, SkerryError, TooLarge
from skerry.host import folders
from skerry.model.spec import SandboxId
from skerry.providers.base import Snapshot, log
from skerry.providers.dockerapi import containers, image_config
from skerry.providers.dockerapi.api import Engine
from skerry.providers.shared import layout
from skerry.units import format_size

REPOSITORY = "skerry-snapshot"
LABEL = "skerry.snapshot"
_ASIDE = ".snapshot-"
_COPY_TIMEOUT_S = 600.0
_MAX_ENTRIES = 1_000_000
_HEADERS = 16 << 20
"""Room for the headers of a tar."""


class EngineSnapshots:
    def __init__(self, engine: Engine, cache: Path, max_root: int) -> None:
        """`max_root` is the most that is kept of a root that was written to."""
        self._engine = engine
        self._cache = cache
        self._max_root = max_root

    async def take(
        self, id: SandboxId, name: str, box: containers.Inspected, disk: int, client: AgentClient
    ) -> Snapshot:
        """Keep the box's root and its work folder, if that fits on its disk. Raises Conflict, TooLarge."""
        if await self._find(name):
            raise Conflict(f"there is a snapshot {name!r} already; remove it, or choose another name")
        await self._check_root(id)
        with self._aside() as folder:
            home = folder / "home"
            too_much = (
                f"no snapshot is taken of {layout.HOME}: it is larger than the box's disk of {format_size(disk)}, "
                "where files with holes, and those with several names, count whole each time"
            )
            await transfers.download_tree(client, {"path": layout.HOME}, home, disk, too_much)
            root = await self._commit(layout.container_name(id), label=name)
            instance = (box.config.labels or {}).get("skerry.instance", "")
            labels = {LABEL: name, "skerry.from": id, "skerry.instance": instance}
            image = await image_config.resolve(self._engine, box.image)
            # What the box had of its own besides its files is not the snapshot's.
            config: dict[str, Any] = {"User": image.user, "WorkingDir": image.folder}
            if image.command:
                config |= {"Entrypoint": image.entrypoint, "Cmd": image.cmd}
            async with containers.scratch(self._engine, root, labels=labels, config=config) as container:
                archive = folder / "home.tar"
                with archive.open("wb") as file:
                    await asyncio.to_thread(trees.pack, os.fsencode(home), file.write)
                await containers.unpack(self._engine, container, "/", containers.folder_tar(layout.HOME.lstrip("/")))
                await containers.unpack(
                    self._engine, container, layout.HOME, containers.pieces_of(archive), _COPY_TIMEOUT_S
                )
                await self._commit(container, tag=name)
        found = await self._find(name)
        if not found:
            raise ProviderError(f"snapshot {name!r} was made, and is not there")
        return found[0]

    async def all(self) -> list[Snapshot]:
        """List them, and remove orphans of programs that died while they took one."""
        for image in await self._list(None):
            is_unnamed = not set(image.get("RepoTags") or []) - {"<none>:<none>"}
            if is_unnamed and containers.is_abandoned(image.get("Labels")):
                try:
                    await self._engine.delete(f"/images/{image['Id']}")
                    log.info("%s: removed what was left of a snapshot, image %s", self._engine.provider, image["Id"])
                except SkerryError as error:  # something is made of it, or the next one tries again
                    log.debug("%s: image %s of a snapshot stays: %s", self._engine.provider, image["Id"], error)
        await asyncio.to_thread(folders.sweep, self._cache, _ASIDE, containers.ABANDONED_S)
        return await self._find(None)

    async def remove(self, name: str) -> None:
        if not await self._find(name):
            raise NotFound(f"there is no snapshot {name!r}")
        try:
            await self._engine.delete(f"/images/{REPOSITORY}:{name}")
        except Conflict as error:
            raise Conflict(f"snapshot {name!r} is in use: end the sandboxes that were made of it first") from error

    async def unfold(self, image: str, disk: int, client: AgentClient) -> None:
        """Put the work folder of a snapshot into the one of a new box. Raises TooLarge if that has no room."""
        no_room = f"the work folder of the snapshot is larger than the new box's disk of {format_size(disk)}: give disk"
        with self._aside() as folder:
            archive = folder / "home.tar"
            async with containers.scratch(self._engine, image) as container:
                path, query = f"/containers/{container}/archive", {"path": layout.HOME}
                async with self._engine.stream("GET", path, query=query, whole_s=_COPY_TIMEOUT_S) as answer:
                    with archive.open("wb") as file:
                        async for piece in answer:
                            file.write(piece)
                            if file.tell() > 2 * disk + _HEADERS:
                                raise TooLarge(no_room)
            limits = {"max_bytes": disk, "max_entries": _MAX_ENTRIES}
            try:
                with archive.open("rb") as file:
                    await asyncio.to_thread(trees.unpack, file.read, os.fsencode(folder), **limits)
            except trees.TooMuch:
                raise TooLarge(no_room) from None
            await transfers.upload_tree(client, folder / Path(layout.HOME).name, {"path": layout.HOME})

    async def _check_root(self, id: SandboxId) -> None:
        """Raise TooLarge if the root is too large: the engine copies it with every hole filled."""
        path = f"/containers/{layout.container_name(id)}/json"
        written = (await self._engine.get(path, dict[str, Any], query={"size": True})).get("SizeRw") or 0
        if written > self._max_root:
            raise TooLarge(
                f"no snapshot is taken: the box has written {format_size(written)} to its root, and at most "
                f"{format_size(self._max_root)} are kept. To keep more, set providers.{self._engine.provider}.max_root"
            )

    async def _find(self, name: str | None) -> list[Snapshot]:
        return [found for image in await self._list(name) if (found := _as_snapshot(image)) is not None]

    async def _list(self, name: str | None) -> list[dict[str, Any]]:
        label = LABEL if name is None else f"{LABEL}={name}"
        return await self._engine.get("/images/json", list[dict[str, Any]], query={"filters": {"label": [label]}})

    async def _commit(self, container: str, *, tag: str | None = None, label: str | None = None) -> str:
        # Not frozen meanwhile: an engine that dies then calls the box "running" ever after, and nothing in it moves.
        # Its work folder was read while it ran as well.
        query = {"container": container, "repo": REPOSITORY if tag else None, "tag": tag, "pause": False}
        if label is not None:
            query["changes"] = f"LABEL {LABEL}={label} {containers.SINCE_LABEL}={clock.now()}"
        made = await self._engine.post("/commit", dict[str, Any], query=query, json={}, timeout_s=_COPY_TIMEOUT_S)
        return str(made["Id"])

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            with folders.scratch(self._cache, _ASIDE) as folder:
                yield folder
        except OSError as error:
            raise ProviderError(f"the files cannot be kept in {self._cache} meanwhile: {error.strerror}") from error


def _as_snapshot(image: dict[str, Any]) -> Snapshot | None:
    """None for an image that only descends from a snapshot and carries its labels."""
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
