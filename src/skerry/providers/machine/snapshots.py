"""Snapshots: copies of the disks of boxes, each a file that leans on nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec

from skerry.errors import Conflict, NotFound, ProviderError
from skerry.host import sparse
from skerry.providers.base import Snapshot
from skerry.providers.machine import boxes
from skerry.providers.machine.boxes import MachineBox, MachineMeta
from skerry.vm.images.artifact_cache import ArtifactCache

Copy = Callable[[Path], Awaitable[None]]
"""Copies a box's disk to that path; beside it may come its memory and its data, to `memory_beside`, `data_beside`."""

_ABOUT = "snapshot.json"
_DISK = "disk.raw"
_DATA = "data.raw"
_MEMORY = "memory"
_CHUNK = 1 << 20
_FRESH_S = 30.0
"""How long what was just written or compared is not compared once more: many boxes are made of one at once."""


def memory_beside(disk: Path) -> Path:
    return disk.with_name(_MEMORY)


def data_beside(disk: Path) -> Path:
    return disk.with_name(_DATA)


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot, and the facts that a box of it is made with."""

    name: str
    sandbox: str
    created_at: float
    checksum: str
    size: int
    image: str
    asked: str
    writable_root: bool
    data: str | None = None
    """Checksum of its data volume, which belongs to the memory."""
    memory: bool = False

    def told(self) -> Snapshot:
        return Snapshot(
            name=self.name,
            id=self.checksum,
            sandbox=self.sandbox,
            size=self.size,
            created_at=self.created_at,
            memory=self.memory,
        )


class DiskSnapshots:
    """Snapshots of a state folder."""

    def __init__(self, state_dir: Path) -> None:
        self._boxes = state_dir
        self._cache = ArtifactCache(state_dir / "snapshots")
        self._folder = self._cache.folder
        self._fresh: dict[str, tuple[float, object]] = {}

    async def take(self, box: MachineBox, meta: MachineMeta, name: str, copy: Copy) -> Snapshot:
        """Take one, whole or not at all. Raises Conflict if the name is taken, and ProviderError."""
        self.refuse_taken(name)
        try:
            with self._cache.aside() as parent:
                aside = parent / name
                aside.mkdir(mode=0o700)
                await copy(aside / _DISK)
                taken = await asyncio.to_thread(_note, aside, box, meta)
                aside.rename(self._folder / name)
        except OSError as error:
            self.refuse_taken(name)
            raise ProviderError(f"the snapshot {name!r} cannot be taken: {error}") from error
        self.trust(taken)
        return taken.told()

    def trust(self, taken: Taken) -> None:
        """Take its files for what was put there, for a while, unless they change."""
        self._fresh = {name: each for name, each in self._fresh.items() if each[0] > time.monotonic()}
        self._fresh[taken.name] = time.monotonic() + _FRESH_S, self._stamp(taken)

    def is_fresh(self, taken: Taken) -> bool:
        until, stamp = self._fresh.get(taken.name, (0.0, None))
        return time.monotonic() < until and stamp == self._stamp(taken)

    def _stamp(self, taken: Taken) -> object:
        files = [path for path in (self._folder / taken.name).rglob("*") if path.is_file()]
        found = [(path, path.stat()) for path in sorted(files)]
        return [(path, status.st_ino, status.st_size, status.st_ctime_ns) for path, status in found]

    def refuse_taken(self, name: str) -> None:
        if (self._folder / name).exists():
            raise Conflict(f"there is already a snapshot {name!r}: choose another name, or remove it")

    def get(self, name: str) -> Taken:
        """Raises NotFound."""
        try:
            return msgspec.json.decode((self._folder / name / _ABOUT).read_bytes(), type=Taken)
        except (OSError, msgspec.MsgspecError):
            raise NotFound(f"no snapshot is called {name!r}") from None

    async def disk(self, taken: Taken) -> Path:
        """Path of its disk. Raises ProviderError if it is damaged."""
        return await self._whole(taken, _DISK, taken.checksum)

    async def data(self, taken: Taken) -> Path | None:
        """Path of the data volume that belongs to its memory, if it has any. Raises ProviderError if it is damaged."""
        return None if taken.data is None else await self._whole(taken, _DATA, taken.data)

    def memory(self, taken: Taken) -> Path | None:
        """Folder of its memory, if it has any; whoever uses it checks it."""
        return self._folder / taken.name / _MEMORY if taken.memory else None

    async def _whole(self, taken: Taken, name: str, wanted: str) -> Path:
        disk = self._folder / taken.name / name
        if self.is_fresh(taken):
            return disk
        try:
            found = await asyncio.to_thread(checksum, disk)
        except OSError as error:
            found = str(error)
        if found != wanted:
            advice = "it cannot be used; remove it, and take another"
            raise ProviderError(f"the snapshot {taken.name!r} is damaged: its disk is not what was put there: {advice}")
        return disk

    def all(self) -> list[Snapshot]:
        found = []
        for path in sorted(self._folder.glob(f"[!.]*/{_ABOUT}")):
            with contextlib.suppress(NotFound):
                found.append(self.get(path.parent.name).told())
        return found

    def remove(self, name: str) -> None:
        """Raises NotFound, and Conflict while a box is made of it."""
        self.get(name)
        for id, meta in boxes.all_metas(self._boxes):
            if meta.snapshot == name:
                raise Conflict(f"snapshot {name!r} is what sandbox {id} was made of: end that first")
        with self._cache.aside() as aside:
            (self._folder / name).rename(aside / name)  # gone at once, whatever becomes of the rest


def _note(folder: Path, box: MachineBox, meta: MachineMeta) -> Taken:
    """Write the note beside a disk."""
    disk, data = folder / _DISK, folder / _DATA
    files = [path for path in folder.rglob("*") if path.is_file()]
    taken = Taken(
        name=folder.name,
        sandbox=box.id,
        created_at=time.time(),
        checksum=checksum(disk),
        size=sum(path.stat().st_blocks * 512 for path in files),
        image=meta.image,
        asked=meta.asked,
        writable_root=meta.writable_root,
        data=checksum(data) if data.exists() else None,
        memory=(folder / _MEMORY).exists(),
    )
    disk.chmod(0o444)  # for machines with uids of their own
    (folder / _ABOUT).write_bytes(msgspec.json.encode(taken))
    return taken


def checksum(path: Path) -> str:
    """Digest of a file's data; holes are passed over, so that an empty disk is read in no time."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        digest.update(b"%d\0" % os.fstat(file.fileno()).st_size)
        for at, data in _pieces(file.fileno()):
            if data.count(0) != len(data):
                digest.update(b"%d\0" % at + data)
    return digest.hexdigest()


def _pieces(fd: int) -> Iterator[tuple[int, bytes]]:
    """Yield a file's data, at places that do not depend on its holes."""
    last = -1
    for start, end in sparse.extents(fd):
        for at in range(start - start % _CHUNK, end, _CHUNK):
            if at > last:
                last = at
                yield at, os.pread(fd, _CHUNK, at)
