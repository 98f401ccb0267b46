"""Data volumes: disks that outlive the boxes that use them, each of one box at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from skerry.errors import Conflict, NotFound
from skerry.host import folders, sparse
from skerry.model.spec import SandboxId
from skerry.providers.base import Volume
from skerry.providers.machine import boxes
from skerry.providers.shared.volume_plan import Wanted, as_volume
from skerry.vm.folder import locked_file, read_note, write_note

_LOCK = ".lock"
_ABOUT = ".json"
_DISK = ".ext4"


class _VolumeNote(msgspec.Struct, frozen=True, kw_only=True):
    created_at: float
    labels: dict[str, str]


class DiskVolumes:
    """Volumes of a state folder: each is a disk and a note beside it; only a guest ever looks into one."""

    def __init__(self, state_dir: Path) -> None:
        self._boxes = state_dir
        self._folder = state_dir / "volumes"

    @contextlib.contextmanager
    def claiming(self, name: str | None, id: SandboxId) -> Iterator[None]:
        """Hold the volume while its user is noted. Raises Conflict if another box has it."""
        if name is None:
            yield
            return
        with self._locked():
            user = self._users().get(name)
            if user not in (None, id):
                raise Conflict(f"volume {name!r} is the data of sandbox {user}: a disk has one user at a time")
            yield

    def disk(self, name: str) -> Path:
        return self._folder / f"{name}{_DISK}"

    async def make(self, wanted: Wanted, blank: Path, *, anew: bool = False) -> Path:
        """Path of its disk, which begins as `blank` if there is none yet, or it has to be that: then what the sandbox
        had there is replaced. Raises Conflict if it is another's."""
        disk = self.disk(wanted.name)
        if anew and disk.exists():
            there = read_note(self._folder / f"{wanted.name}{_ABOUT}", _VolumeNote)
            if there is None or there.labels.get("skerry.sandbox") != wanted.labels["skerry.sandbox"]:
                reason = "a machine that goes on with its memory needs its own; take another name"
                raise Conflict(f"volume {wanted.name!r} holds the data of another sandbox: {reason}")
        if anew or not disk.exists():
            about = _VolumeNote(created_at=time.time(), labels=wanted.labels)
            folders.make(self._folder)
            write_note(self._folder / f"{wanted.name}{_ABOUT}", about)
            aside = disk.with_suffix(".new")
            aside.unlink(missing_ok=True)
            await asyncio.to_thread(sparse.copy, blank, aside)
            aside.chmod(0o600)
            aside.rename(disk)
        return disk

    def all(self) -> list[Volume]:
        users = self._users()
        return [
            as_volume(name, about.labels, in_use=name in users, size=self._size(name), created_at=about.created_at)
            for name, about in self._abouts()
        ]

    def remove(self, name: str) -> None:
        """Raises NotFound, and Conflict while a box has it."""
        with self._locked():
            if name not in dict(self._abouts()):
                raise NotFound(f"volume {name!r} is not one of skerry's")
            if (user := self._users().get(name)) is not None:
                raise Conflict(f"volume {name!r} is the data of sandbox {user}: end that first")
            self._unlink(name)

    def drop_data_of(self, id: SandboxId, name: str | None) -> None:
        """Remove the data of a box that is gone, by its name, else by its label. Quiet if there is none."""
        with self._locked():
            names = (
                [name] if name else [each for each, about in self._abouts() if about.labels.get("skerry.sandbox") == id]
            )
            for each in names:
                if each not in self._users():
                    self._unlink(each)

    def _unlink(self, name: str) -> None:
        for suffix in (_DISK, ".new", _ABOUT):
            (self._folder / f"{name}{suffix}").unlink(missing_ok=True)

    def _users(self) -> dict[str, SandboxId]:
        return {meta.volume: id for id, meta in boxes.all_metas(self._boxes) if meta.volume is not None}

    def _abouts(self) -> Iterator[tuple[str, _VolumeNote]]:
        for path in sorted(self._folder.glob(f"*{_ABOUT}")):
            if (about := read_note(path, _VolumeNote)) is not None:
                yield path.name.removesuffix(_ABOUT), about

    def _size(self, name: str) -> int:
        """Room that it takes on the host's disk."""
        try:
            return (self._folder / f"{name}{_DISK}").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def _locked(self) -> contextlib.AbstractContextManager[None]:
        folders.make(self._folder)
        return locked_file(self._folder / _LOCK)
