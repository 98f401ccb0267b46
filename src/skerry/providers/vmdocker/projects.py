"""Notes of projects and their boxes, in files that are written before the things themselves are made.

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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from skerry import clock
from skerry.clock import End, Moment
from skerry.errors import InvalidSpec, NotFound
from skerry.host import folders, locks
from skerry.model.spec import SandboxId, parse_id
from skerry.providers.base import Snapshot, Volume
from skerry.vm.folder import read_note, write_note


class BoxNote(msgspec.Struct, frozen=True, kw_only=True):
    """Note of a box."""

    project: str
    created_at: float
    labels: dict[str, str] = {}
    image: str = ""
    """Name that it asked for."""
    end: End | None = None
    """When its time is over; None: nobody knows."""
    is_whole: bool = False
    """It was made, and its agent has answered."""
    is_off: bool = False
    """It was stopped, or has ended: it needs no machine."""
    has_ended: bool = False
    """It has ended by itself, and will not be started again."""


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a machine's disk that cannot be had again, as far as they are known while the machine is off."""

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
    """Files of one project."""

    def __init__(self, state_dir: Path, name: str) -> None:
        self.name = name
        self.key = hashlib.sha256(name.encode()).hexdigest()[:12]
        self.folder = state_dir / self.key
        self.vm = self.folder / "vm"
        self._lock = state_dir / "locks" / self.key
        self._up = self.folder / "up"
        self._idle = self.folder / "idle"

    def make(self) -> None:
        folders.make(self.folder)
        write_note(self.folder / "project.json", {"project": self.name})

    @asynccontextmanager
    async def locked(self, timeout_s: float) -> AsyncIterator[None]:
        """Hold its machine against all others, who may be starting it, which takes long."""
        folders.make(self._lock.parent)
        fd = os.open(self._lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with open(fd, "rb"):
            held = f"another process has been at the machine of {self.name} for {timeout_s:g} s"
            await locks.wait_async(fd, timeout_s, held)
            try:
                yield
            finally:
                locks.release(fd)  # `look` takes whoever has it for somebody at work, and leaves what is left as it is

    @property
    def is_up(self) -> bool:
        return self._up.exists()

    @property
    def up_at(self) -> int:
        """Number that differs for each start of its machine."""
        try:
            return self._up.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    @property
    def has_network(self) -> bool:
        """Whether its machine was started with a network card, if it is up."""
        return read_note(self._up, bool) or False

    def mark_up(self, is_up: bool, *, network: bool = False) -> None:
        if is_up:
            write_note(self._up, network)
        else:
            self._up.unlink(missing_ok=True)

    @property
    def is_idle(self) -> bool:
        """Its machine was told that nobody needs it."""
        return self._idle.exists()

    @property
    def idle_s(self) -> float:
        """Time since then, as far as is known."""
        since = read_note(self._idle, Moment)
        return (since.age_s(clock.now()) if since is not None else None) or 0.0

    def mark_idle(self, is_idle: bool) -> None:
        if is_idle:
            write_note(self._idle, clock.now())
        else:
            self._idle.unlink(missing_ok=True)

    @property
    def holdings(self) -> Holdings:
        return read_note(self.folder / "holdings.json", Holdings) or Holdings()

    def hold(self, **changes: Any) -> None:
        """Change the note of its holdings; only for who holds the lock."""
        write_note(self.folder / "holdings.json", msgspec.structs.replace(self.holdings, **changes))

    def empty(self) -> None:
        """Remove its machine, disk and all."""
        folders.remove(self.vm)
        self.hold(doomed=())

    def remove(self) -> None:
        """Remove all of it; the note of its name goes last."""
        for entry in [*self.folder.glob("*")]:
            if entry.is_dir():
                folders.remove(entry)
            elif entry.name != "project.json":
                entry.unlink()
        (self.folder / "project.json").unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            self.folder.rmdir()


class Projects:
    """All projects of an installation."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._boxes = state_dir / "boxes"

    def get(self, name: str) -> Project:
        return Project(self._state_dir, name)

    def all(self) -> list[Project]:
        found = []
        for path in sorted(self._state_dir.glob("*/project.json")):
            about = read_note(path, dict[str, str])
            if about is not None and "project" in about:
                found.append(self.get(about["project"]))
        return found

    def note(self, id: SandboxId, box: BoxNote) -> None:
        folders.make(self._boxes)
        write_note(self._boxes / f"{id}.json", box)

    def change(self, id: SandboxId, **changes: Any) -> None:
        """Note more of a box, unless it is gone."""
        with suppress(NotFound):
            self.note(id, msgspec.structs.replace(self.box(id), **changes))

    def forget(self, id: SandboxId) -> None:
        (self._boxes / f"{id}.json").unlink(missing_ok=True)

    def box(self, id: SandboxId) -> BoxNote:
        """Raises NotFound."""
        found = read_note(self._boxes / f"{id}.json", BoxNote)
        if found is None:
            raise NotFound(f"there is no box {id}")
        return found

    def boxes(self, project: Project | None = None) -> dict[SandboxId, BoxNote]:
        found = {}
        for path in self._boxes.glob("*.json"):
            box = read_note(path, BoxNote)
            with suppress(InvalidSpec):
                if box is not None and (project is None or box.project == project.name):
                    found[parse_id(path.stem)] = box
        return found
