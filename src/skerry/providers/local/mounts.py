"""What a manager that is root mounts for a box on the host: a disk of limited size, and ways to closed folders."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

from skerry.providers import disks
from skerry.providers.local.boxes import Box
from skerry.spec import SandboxId


def attach_disk(box: Box, size: int, uid: int) -> int:
    """Make and mount an image; a descriptor of its root, which belongs to `uid`."""
    disks.make(box.disk_image, size, uid, uid, fds=(box.lock_fd,))
    point = _new_point(box.id, is_folder=True)
    disks.mount(box.disk_image, point, fds=(box.lock_fd,))
    (point / "lost+found").rmdir()
    return os.open(point, os.O_PATH | os.O_CLOEXEC)


def open_way(box: Box, fd: int) -> int:
    """A descriptor of the same file or folder that a stranger may resolve: bubblewrap, as the box's uid, looks up the
    path behind each descriptor it binds. Takes `fd`; what is closed to strangers is mounted where it is not."""
    if _is_open_to_all(Path(os.readlink(f"/proc/self/fd/{fd}"))):
        return fd
    try:
        point = _new_point(box.id, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
        source = f"/proc/self/fd/{fd}"
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


def _new_point(id: SandboxId, *, is_folder: bool) -> Path:
    folder = disks.MOUNTS / id
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    point = folder / str(len(os.listdir(folder)))
    if is_folder:
        point.mkdir()
    else:
        point.touch(exist_ok=False)
    return point


def _is_open_to_all(path: Path) -> bool:
    return all(os.stat(parent).st_mode & stat.S_IXOTH for parent in path.parents)
