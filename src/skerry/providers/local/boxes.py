"""Boxes on disk: the folder of each, by which any process can find and end it, and what root mounts for it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from skerry.clock import boot_id
from skerry.errors import NotFound
from skerry.host import disks, folders, locks
from skerry.host.processes import Process
from skerry.model.spec import SandboxId

_log = logging.getLogger("skerry.providers")

T = TypeVar("T")

_WHOLE = "whole"


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """Intent of a box, written before anything of it exists."""

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
        self.disk_image = self.path / "disk.img"
        self.socket_path = self.path / "agent.sock"
        self.lock_fd = -1
        """While the box is locked: a tool that inherits it keeps the lock until it has ended, even if we are killed."""

    def make(self) -> None:
        folders.make_new(self.path, f"a box {self.id}")

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """Hold the box against every other process; False if there is no such box (any more)."""
        try:
            fd = locks.open_folder(self.path)
        except FileNotFoundError:
            yield False
            return
        try:
            locks.wait(fd, timeout_s, f"box {self.id} is held by another process")
            self.lock_fd = fd
            yield locks.is_in_place(fd, self.path)
        finally:
            self.lock_fd = -1
            os.close(fd)

    def write_meta(self, meta: Meta) -> None:
        self._write("meta.json", msgspec.json.encode(meta))

    def read_meta(self) -> Meta | None:
        """Read the intent; None if nothing (or half a file) is there."""
        return self._read("meta.json", Meta)

    def write_processes(self, running: list[Process]) -> None:
        """Note the box's first process, then the launcher outside it."""
        self._write("processes.json", msgspec.json.encode(running))

    def forget_processes(self) -> None:
        """Take the note back, of processes that are dead, before others are made in their place."""
        (self.path / "processes.json").unlink(missing_ok=True)

    def read_processes(self) -> list[Process]:
        """Read the processes; none are known until the box has been made."""
        return self._read("processes.json", list[Process]) or []

    def _read(self, name: str, type: type[T]) -> T | None:
        try:
            return msgspec.json.decode((self.path / name).read_bytes(), type=type)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            _log.warning("box %s: its %s is damaged: %s", self.id, name, error)
            return None

    def _write(self, name: str, data: bytes) -> None:
        # each file is written once: a rename over another would wait for the disk
        draft = f"{self.path}/{name}.new"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:
            file.write(data)
        os.rename(draft, f"{self.path}/{name}")

    def mark_whole(self) -> None:
        """Note that all of it is there, its limits hold and its agent has answered."""
        (self.path / _WHOLE).touch(mode=0o600)

    def is_whole(self) -> bool:
        """Whether all notes of it are there: one that lacks some was never made, or somebody is removing it."""
        return (self.path / _WHOLE).exists() and self.read_meta() is not None and bool(self.read_processes())

    def is_running(self) -> bool:
        """Whether it is alive and whole: one left half-made may have no limits yet, though its agent answers."""
        if not (self.path / _WHOLE).exists():
            return False
        meta, running = self.read_meta(), self.read_processes()
        return meta is not None and meta.boot_id == boot_id() and bool(running) and running[0].is_alive()

    def listen(self) -> socket.socket:
        """Make the listening socket that the box inherits, so that a connection waits from the first moment; another in
        its place, if one was made in vain."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self.socket_path.unlink(missing_ok=True)
            os.fchmod(listener.fileno(), 0o600)
            folder = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
            try:  # by a short name of the folder: the address of a unix socket ends at 107 bytes
                listener.bind(f"/proc/self/fd/{folder}/{self.socket_path.name}")
            finally:
                os.close(folder)
            listener.listen(1024)
        except BaseException as error:
            listener.close()
            if isinstance(error, FileNotFoundError):
                raise NotFound(f"there is no box {self.id}") from None
            raise
        return listener

    def remove(self) -> None:
        # flat and only ever written by us: what the box wrote went with its tmpfs or its disk image
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)


def all_boxes(state_dir: Path) -> list[Box]:
    return [Box(state_dir, id) for id in folders.ids_in(state_dir)]


def attach_disk(box: Box, size: int, uid: int) -> int:
    """Make and mount an image; returns a descriptor of its root, which belongs to `uid`."""
    disks.make(box.disk_image, size, uid, uid, fds=(box.lock_fd,))
    point = _new_point(box.id, uid, is_folder=True)
    disks.mount(box.disk_image, point, fds=(box.lock_fd,))
    (point / "lost+found").rmdir()
    return os.open(point, os.O_PATH | os.O_CLOEXEC)


def open_for_uid(box: Box, fd: int, uid: int) -> int:
    """Open the same file or folder so that `uid` may resolve it: bubblewrap, as the box's uid, looks up the path
    behind each descriptor it binds. Takes `fd`; what is closed to strangers is mounted where it is open to that uid."""
    source = f"/proc/self/fd/{fd}"
    if all(os.stat(parent).st_mode & stat.S_IXOTH for parent in Path(os.readlink(source)).parents):
        return fd
    try:
        point = _new_point(box.id, uid, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
        disks.run("mount", "--no-canonicalize", "--bind", source, str(point), fds=(fd, box.lock_fd))
        return os.open(point, os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(fd)


def detach_all(box: Box, timeout_s: float) -> None:
    """Unmount all that was mounted for a box."""
    folder = disks.MOUNTS / box.id
    if os.geteuid() != 0 or not folder.exists():
        return
    deadline = time.monotonic() + timeout_s
    for path in folder.iterdir():
        disks.unmount(path, deadline, fds=(box.lock_fd,))
    shutil.rmtree(folder)


def _new_point(id: SandboxId, gid: int, *, is_folder: bool) -> Path:
    folder = disks.make_folder(id, gid)
    point = folder / str(len(os.listdir(folder)))
    if is_folder:
        point.mkdir()
    else:
        point.touch(exist_ok=False)
    return point
