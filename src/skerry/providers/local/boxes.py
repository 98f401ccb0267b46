"""The folder of a box: what was intended and what runs, written so that any process can find and end it."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec

from skerry.errors import InvalidSpec, NotFound
from skerry.host import folders, locks
from skerry.host.processes import Process, boot_id
from skerry.spec import SandboxId, parse_id

_META = "meta.json"
_PROCESSES = "processes.json"
_WHOLE = "whole"
_SOCKET = "agent.sock"
_BACKLOG = 128


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """What a box was meant to be, written before anything of it exists."""

    created_at: float
    boot_id: str
    uid: int | None
    """The host uid that is only this box's; None if it shares the manager's."""
    groups: list[str]
    labels: dict[str, str] = {}


class Box:
    """One box's folder."""

    def __init__(self, state_dir: Path, id: SandboxId) -> None:
        self.id = id
        self.path = state_dir / id
        self.lock_fd = -1
        """While the box is locked: a tool that inherits it keeps the lock until it has ended, even if we are killed."""

    def make(self) -> None:
        folders.make_new(self.path, f"a box {self.id}")

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """Hold the box against every other process; False if there is no such box (any more)."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            yield False
            return
        try:
            locks.wait(fd, timeout_s, f"box {self.id} is held by another process")
            self.lock_fd = fd
            yield self.path.exists()
        finally:
            self.lock_fd = -1
            os.close(fd)

    def write_meta(self, meta: Meta) -> None:
        self._write(_META, msgspec.json.encode(meta))

    def read_meta(self) -> Meta | None:
        """None if nothing (or half a file) is there."""
        try:
            return msgspec.json.decode((self.path / _META).read_bytes(), type=Meta)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def write_processes(self, running: list[Process]) -> None:
        """The box's first process, then the launcher outside it."""
        self._write(_PROCESSES, msgspec.json.encode(running))

    def read_processes(self) -> list[Process]:
        """None are known until the box has been made."""
        try:
            return msgspec.json.decode((self.path / _PROCESSES).read_bytes(), type=list[Process])
        except (FileNotFoundError, msgspec.MsgspecError):
            return []

    def _write(self, name: str, data: bytes) -> None:
        # each file is written once: a rename over another would wait for the disk
        draft = self.path / f"{name}.new"
        draft.touch(mode=0o600)
        draft.write_bytes(data)
        draft.rename(self.path / name)

    def mark_whole(self) -> None:
        """All of it is there, its limits hold and its agent has answered."""
        (self.path / _WHOLE).touch(mode=0o600)

    def is_running(self) -> bool:
        """A box that was left half-made does not count, though its agent may answer: it may have no limits yet."""
        if not (self.path / _WHOLE).exists():
            return False
        meta, running = self.read_meta(), self.read_processes()
        return meta is not None and meta.boot_id == boot_id() and bool(running) and running[0].is_alive()

    @property
    def disk_image(self) -> Path:
        return self.path / "disk.img"

    @property
    def socket_path(self) -> Path:
        return self.path / _SOCKET

    def listen(self) -> socket.socket:
        """The listening socket that the box inherits, so that a connection waits from the first moment."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        os.fchmod(listener.fileno(), 0o600)
        with self._folder() as folder:
            listener.bind(f"{folder}/{_SOCKET}")
        listener.listen(_BACKLOG)
        return listener

    def connect(self) -> socket.socket:
        """A connection to the agent, which may not have accepted it yet."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with self._folder() as folder:
            connection.connect(f"{folder}/{_SOCKET}")
        return connection

    @contextlib.contextmanager
    def _folder(self) -> Iterator[str]:
        """A short name of the folder: the address of a unix socket ends at 107 bytes."""
        try:
            fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            raise NotFound(f"there is no box {self.id}") from None
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def remove(self) -> None:
        # flat and only ever written by us: what the box wrote went with its tmpfs or its disk image
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)


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
