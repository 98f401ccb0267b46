"""The folder of a box: what was intended and what came of it, written so that any process can find and end it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from skerry.errors import InvalidSpec, NotFound
from skerry.host import folders, locks
from skerry.spec import SandboxId, parse_id
from skerry.vm.base import Drive
from skerry.vm.folder import VmFolder

_META = "meta.json"
_DISK = "disk.json"
_WHOLE = "whole"
_STOPPED = "stopped"
_PAUSED = "paused"


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a box was meant to be, written before anything of it exists."""

    created_at: float
    image: str
    """The id of its image."""
    asked: str
    """The name that it asked for, which may mean another image by now."""
    writable_root: bool = False
    snapshot: str | None = None
    """The snapshot that its disk begins as, and may lean on."""
    volume: str | None = None
    """The volume that is its data: no other box may have it at the same time."""
    labels: dict[str, str] = {}


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """The box's own disk. What is below it is noted here, where no machine can change it."""

    drive: Drive
    below: str

    @property
    def base(self) -> Path:
        return Path(self.below)


class Box:
    """One box's folder. It belongs to us; the folder of the machine below it is partly the machine's."""

    def __init__(self, state_dir: Path, id: SandboxId) -> None:
        self.id = id
        self.path = state_dir / id
        self.vm = VmFolder(self.path / "vm")
        self.template = VmFolder(self.path / "template")
        """Where a template is made if this box is the first that wants it: whoever ends the box ends that too."""

    def make(self) -> None:
        folders.make_new(self.path, f"a box {self.id}", mode=0o711)

    @contextlib.asynccontextmanager
    async def locked(self, timeout_s: float) -> AsyncIterator[bool]:
        """Hold the box against everybody else; False if there is no such box (any more)."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        try:
            await locks.wait_async(fd, timeout_s, f"box {self.id} is held by another process")
            yield _is_same(fd, self.path)
        finally:
            os.close(fd)

    @contextlib.asynccontextmanager
    async def held(self, timeout_s: float) -> AsyncIterator[Meta]:
        """Hold a box that is there, and has been made; raises NotFound."""
        async with self.locked(timeout_s) as exists:
            meta = self.read_meta() if exists else None
            if meta is None:
                raise NotFound(f"there is no box {self.id}")
            yield meta

    def write_meta(self, meta: Meta) -> None:
        self._write(_META, msgspec.json.encode(meta))

    def read_meta(self) -> Meta | None:
        """None if nothing (or half a file) is there."""
        try:
            return msgspec.json.decode((self.path / _META).read_bytes(), type=Meta)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def write_disk(self, disk: Disk) -> None:
        """The disk is there, whole."""
        self._write(_DISK, msgspec.json.encode(disk))

    def read_disk(self) -> Disk | None:
        try:
            return msgspec.json.decode((self.path / _DISK).read_bytes(), type=Disk)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def _write(self, name: str, data: bytes) -> None:
        draft = self.path / f"{name}.new"
        draft.touch(mode=0o600)
        draft.write_bytes(data)
        draft.rename(self.path / name)

    @property
    def is_whole(self) -> bool:
        """All of it was there once, its limits held and its agent answered; and it was not stopped since."""
        return (self.path / _WHOLE).exists()

    def mark_whole(self, whole: bool = True) -> None:
        self._mark(_WHOLE, whole)

    @property
    def is_stopped(self) -> bool:
        """It was to be stopped: its end is no accident, and its disk is kept for another start."""
        return (self.path / _STOPPED).exists()

    def mark_stopped(self, stopped: bool = True) -> None:
        self._mark(_STOPPED, stopped)

    @property
    def may_be_paused(self) -> bool:
        """It was to be paused; whether it is, its hypervisor knows."""
        return (self.path / _PAUSED).exists()

    def mark_paused(self, paused: bool = True) -> None:
        self._mark(_PAUSED, paused)

    def _mark(self, name: str, there: bool) -> None:
        if there:
            (self.path / name).touch(mode=0o600)
        else:
            (self.path / name).unlink(missing_ok=True)

    async def remove(self) -> None:
        await asyncio.to_thread(folders.remove, self.path)


def all_boxes(state_dir: Path) -> list[Box]:
    try:
        names = os.listdir(state_dir)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        with contextlib.suppress(InvalidSpec):
            found.append(Box(state_dir, parse_id(name)))
    return found


def all_metas(state_dir: Path) -> list[tuple[SandboxId, Meta]]:
    return [(box.id, meta) for box in all_boxes(state_dir) if (meta := box.read_meta()) is not None]


def _is_same(fd: int, path: Path) -> bool:
    """Whether the folder at this path is still the one that was opened."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
