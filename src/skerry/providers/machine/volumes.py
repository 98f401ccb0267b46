"""Data volumes: disks that outlive the boxes that use them, each of one box at a time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from skerry.errors import Conflict, NotFound
from skerry.providers.base import Volume
from skerry.providers.machine import boxes
from skerry.providers.volume_plan import Wanted, as_volume
from skerry.spec import SandboxId
from skerry.vm import sparse

_LOCK = ".lock"
_ABOUT = ".json"
_DISK = ".ext4"


class _About(msgspec.Struct, frozen=True, kw_only=True):
    created_at: float
    labels: dict[str, str]


class Volumes:
    """Each is a disk and, beside it, what it is; no one but a guest ever looks into one."""

    def __init__(self, state_dir: Path) -> None:
        self._boxes = state_dir
        self._folder = state_dir / "volumes"

    @contextlib.contextmanager
    def claiming(self, name: str | None, id: SandboxId) -> Iterator[None]:
        """Between the look who has it and the note that this box has. Raises Conflict if another has."""
        if name is None:
            yield
            return
        with self._locked():
            user = self._users().get(name)
            if user not in (None, id):
                raise Conflict(f"volume {name!r} is the data of sandbox {user}: a disk has one user at a time")
            yield

    async def make(self, wanted: Wanted, blank: Path) -> Path:
        """Its disk, which begins as `blank` if there is none yet."""
        disk = self._folder / f"{wanted.name}{_DISK}"
        if not disk.exists():
            self._write(wanted)
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
        with self._locked():
            if name not in dict(self._abouts()):
                raise NotFound(f"volume {name!r} is not one of skerry's")
            if (user := self._users().get(name)) is not None:
                raise Conflict(f"volume {name!r} is the data of sandbox {user}: end that first")
            self._unlink(name)

    def drop_data_of(self, id: SandboxId, name: str | None) -> None:
        """The data of a box that is gone: by the name that it had, else by its label. Quiet if there is none."""
        with self._locked():
            names = [name] if name else [each for each, about in self._abouts() if _is_data_of(about, id)]
            for each in names:
                if each not in self._users():
                    self._unlink(each)

    def _unlink(self, name: str) -> None:
        for suffix in (_DISK, ".new", _ABOUT):
            (self._folder / f"{name}{suffix}").unlink(missing_ok=True)

    def _users(self) -> dict[str, SandboxId]:
        return {meta.volume: id for id, meta in boxes.all_metas(self._boxes) if meta.volume is not None}

    def _abouts(self) -> Iterator[tuple[str, _About]]:
        for path in sorted(self._folder.glob(f"*{_ABOUT}")):
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                yield path.name.removesuffix(_ABOUT), msgspec.json.decode(path.read_bytes(), type=_About)

    def _write(self, wanted: Wanted) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self._folder / f"{wanted.name}{_ABOUT}"
        draft = about.with_suffix(".about")
        draft.write_bytes(msgspec.json.encode(_About(created_at=time.time(), labels=wanted.labels)))
        draft.rename(about)

    def _size(self, name: str) -> int:
        """What it takes of the host's disk."""
        try:
            return (self._folder / f"{name}{_DISK}").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Held for some file operations only, so nobody waits long."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def _is_data_of(about: _About, id: SandboxId) -> bool:
    return about.labels.get("skerry.sandbox") == id
