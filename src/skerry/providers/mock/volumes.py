"""The volumes of a mock host: folders that outlive boxes and are seen by several."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

import msgspec

from skerry import caches
from skerry.errors import Conflict, NotFound
from skerry.providers.base import Volume
from skerry.providers.mock.filesystem import FileSystem, Node, below
from skerry.spec import Cache, SandboxId, Spec

DATA = "/.data"
_INSTANCE = "skerry.instance"


@dataclass(eq=False)
class Kept:
    volume: Volume
    folder: Node

    def size(self) -> int:
        return sum(len(node.data) for _, node in below(self.folder, b"/"))


class Volumes:
    """By name; a name tells apart what must not be shared: installations, projects, sandboxes."""

    def __init__(self) -> None:
        self._kept: dict[str, Kept] = {}

    def mount(self, files: FileSystem, id: SandboxId, spec: Spec, uid: int, now: float) -> None:
        """Put a box's volumes into its files, made where they are not there yet."""
        instance = spec.labels.get(_INSTANCE, "")
        if spec.data is not False:
            name = f"data-{id}" if spec.name is None else f"data-{instance}-{spec.project}-{spec.name}"
            volume = Volume(
                name=name,
                kind="data",
                project=spec.project,
                sandbox=id,
                label=spec.name or "",
                instance=instance,
                created_at=now,
            )
            files.mount(DATA.encode(), self._take(volume, uid))
        for cache, path in caches.mounts(spec):
            name = f"cache-{instance}-{spec.project}-{cache}"
            volume = Volume(
                name=name, kind="cache", project=spec.project, label=cache, instance=instance, created_at=now
            )
            files.mount(os.fsencode(path), self._take(volume, uid), read_only=spec.cache is Cache.READ)

    def _take(self, volume: Volume, uid: int) -> Node:
        kept = self._kept.get(volume.name)
        folder = Node(stat.S_IFDIR | 0o755, uid, uid, volume.created_at or 0.0) if kept is None else kept.folder
        self._kept[volume.name] = Kept(volume, folder)
        return folder

    def all(self, users: list[Spec], ids: list[SandboxId], *, sizes: bool) -> list[Volume]:
        return [_told(kept, in_use=self._is_used(kept.volume, users, ids), sizes=sizes) for kept in self._kept.values()]

    def remove(self, name: str, users: list[Spec], ids: list[SandboxId]) -> None:
        if name not in self._kept:
            raise NotFound(f"the mock host has no volume {name!r}")
        if self._is_used(self._kept[name].volume, users, ids):
            raise Conflict(f"the volume {name!r} is used by a box")
        del self._kept[name]

    def remove_of(self, id: SandboxId) -> None:
        """The data that was last mounted for that box."""
        for name in [name for name, kept in self._kept.items() if kept.volume.sandbox == id]:
            del self._kept[name]

    def _is_used(self, volume: Volume, users: list[Spec], ids: list[SandboxId]) -> bool:
        if volume.kind == "data":
            return volume.sandbox in ids
        mounted = {(spec.project, cache) for spec in users for cache, _ in caches.mounts(spec)}
        return (volume.project, volume.label) in mounted


def _told(kept: Kept, *, in_use: bool, sizes: bool) -> Volume:
    return msgspec.structs.replace(kept.volume, size=kept.size() if sizes else None, in_use=in_use)
