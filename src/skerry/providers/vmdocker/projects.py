"""What is known of projects and their boxes, in files that are written before what they tell of is made.

boxes/<id>.json          which project a box is of, and what it is to be
<key>/project.json       the project's name; the key is short, since a socket's path ends at 107 bytes
<key>/holdings.json      what its machine's disk has that is worth keeping
<key>/up                 Docker answers in the machine, or did; whoever starts it takes this away first
<key>/vm/                the machine
locks/<key>              held by whoever changes the machine of a project
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from skerry.errors import InvalidSpec, NotFound
from skerry.host import folders, locks
from skerry.providers.base import Snapshot, Volume
from skerry.spec import SandboxId, parse_id

T = TypeVar("T")


class Box(msgspec.Struct, frozen=True, kw_only=True):
    """What is noted of a box."""

    project: str
    created_at: float
    labels: dict[str, str] = {}
    image: str = ""
    """The name that it asked for."""
    ends_at: float | None = None
    """When its time is over; None: nobody knows."""
    is_whole: bool = False
    """It was made, and its agent has answered."""
    is_off: bool = False
    """It was stopped, or has ended: it needs no machine."""
    has_ended: bool = False
    """It has ended by itself, and will not be started again."""


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's disk has that cannot be had again, as far as it is known while the machine is off."""

    volumes: tuple[Volume, ...] = ()
    snapshots: tuple[Snapshot, ...] = ()
    doomed: tuple[str, ...] = ()
    """Volumes that were removed while the machine was off."""
    was_lent: bool = False
    """Somebody got the address of its Docker, and may have put anything there."""

    @property
    def is_worth_keeping(self) -> bool:
        return bool(self.volumes or self.snapshots or self.was_lent)


class Project:
    """The files of one project."""

    def __init__(self, state_dir: Path, name: str) -> None:
        self.name = name
        self.key = hashlib.sha256(name.encode()).hexdigest()[:12]
        self.folder = state_dir / self.key
        self.vm = self.folder / "vm"
        self._lock = state_dir / "locks" / self.key
        self._up = self.folder / "up"
        self._idle = self.folder / "idle"

    def make(self) -> None:
        self.folder.mkdir(mode=0o711, parents=True, exist_ok=True)
        _write(self.folder / "project.json", {"project": self.name})

    @asynccontextmanager
    async def locked(self, timeout_s: float) -> AsyncIterator[None]:
        """Keep all others from its machine; they may be starting it, which takes long."""
        self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            held = f"another process has been at the machine of {self.name} for {timeout_s:g} s"
            await locks.wait_async(fd, timeout_s, held)
            yield
        finally:
            os.close(fd)

    @property
    def is_up(self) -> bool:
        return self._up.exists()

    @property
    def up_at(self) -> int:
        """Another for each time that its machine was started."""
        try:
            return self._up.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def mark_up(self, is_up: bool) -> None:
        _mark(self._up, is_up)

    @property
    def idle_since(self) -> float | None:
        """When its machine was told that nobody needs it."""
        try:
            return self._idle.stat().st_mtime
        except FileNotFoundError:
            return None

    def mark_idle(self, is_idle: bool) -> None:
        _mark(self._idle, is_idle)

    @property
    def holdings(self) -> Holdings:
        return _read(self.folder / "holdings.json", Holdings) or Holdings()

    def hold(self, **changes: Any) -> None:
        """Note what it has; only for who holds the lock."""
        _write(self.folder / "holdings.json", msgspec.structs.replace(self.holdings, **changes))

    def hold_volumes(self, volumes: Iterable[Volume]) -> None:
        """Some that are about to be made."""
        held = self.holdings
        names = {volume.name for volume in held.volumes}
        new = tuple(volume for volume in volumes if volume.name not in names)
        if new:
            self.hold(volumes=(*held.volumes, *new))

    def empty(self) -> None:
        """Remove its machine, disk and all."""
        folders.remove(self.vm)
        self.hold(doomed=())

    def remove(self) -> None:
        """All of it; what is noted of its name goes last."""
        for entry in [*self.folder.glob("*")]:
            if entry.is_dir():
                folders.remove(entry)
            elif entry.name != "project.json":
                entry.unlink()
        (self.folder / "project.json").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.folder.rmdir()


class Projects:
    """All of an installation."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._boxes = state_dir / "boxes"

    def get(self, name: str) -> Project:
        return Project(self._state_dir, name)

    def all(self) -> list[Project]:
        found = []
        for path in sorted(self._state_dir.glob("*/project.json")):
            about = _read(path, dict[str, str])
            if about is not None and "project" in about:
                found.append(self.get(about["project"]))
        return found

    def note(self, id: SandboxId, box: Box) -> None:
        self._boxes.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write(self._boxes / f"{id}.json", box)

    def change(self, id: SandboxId, **changes: Any) -> None:
        """Note more of a box, unless it is gone."""
        with suppress(NotFound):
            self.note(id, msgspec.structs.replace(self.box(id), **changes))

    def forget(self, id: SandboxId) -> None:
        (self._boxes / f"{id}.json").unlink(missing_ok=True)

    def box(self, id: SandboxId) -> Box:
        """Raises NotFound."""
        found = _read(self._boxes / f"{id}.json", Box)
        if found is None:
            raise NotFound(f"there is no box {id}")
        return found

    def boxes(self, project: Project | None = None) -> dict[SandboxId, Box]:
        found = {}
        for path in self._boxes.glob("*.json"):
            box = _read(path, Box)
            with suppress(InvalidSpec):
                if box is not None and (project is None or box.project == project.name):
                    found[parse_id(path.stem)] = box
        return found


def _mark(path: Path, is_there: bool) -> None:
    if is_there:
        path.touch(mode=0o600)
    else:
        path.unlink(missing_ok=True)


def _write(path: Path, value: Any) -> None:
    """Whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_bytes(msgspec.json.encode(value))
    draft.replace(path)


def _read(path: Path, type: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
