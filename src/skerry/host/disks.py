"""Disks of limited size for boxes, where we are root: ext4 images that take only the room of what is written."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

from skerry import aio
from skerry.errors import ProviderError
from skerry.host import folders

_log = logging.getLogger("skerry.host")

MOUNTS = Path("/run/skerry/mounts")
"""One folder for each box. Not with the rest of a box, which may lie in a folder that is closed to its uid."""


def why_none() -> str | None:
    """The reason why disk images cannot be made and mounted here, or None."""
    if os.geteuid() != 0:
        return "loop mounts need root"
    if not os.path.exists("/dev/loop-control"):
        return "there is no /dev/loop-control"
    missing = [tool for tool in ("mke2fs", "mount", "umount") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else None


def make_folder(id: str, gid: int = 0) -> Path:
    """Make the folder of a box's mounts, if there is none: only root gets in, and the box's own group if it has one.
    Ids are no secret, and what is mounted may be open to all."""
    folders.make(MOUNTS, 0o711)
    _close_older()
    folder = MOUNTS / id
    folder.mkdir(mode=0o700, exist_ok=True)
    os.chown(folder, 0, gid)
    folder.chmod(0o710 if gid else 0o700)
    return folder


@cache
def _close_older() -> None:
    """Close folders of older versions, which let everybody in. What runs has bound what it needs of them."""
    MOUNTS.chmod(0o711)
    for folder in MOUNTS.iterdir():
        if folder.stat().st_mode & 0o007:
            folder.chmod(0o700)


def make(image: Path, size: int, uid: int, gid: int, *, fds: tuple[int, ...] = ()) -> None:
    """Make an image whose root belongs to that user. Raises ProviderError."""
    with open(image, "xb") as file:
        file.truncate(size)
    options = f"root_owner={uid}:{gid},lazy_itable_init=1,nodiscard"
    run("mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", options, str(image), fds=fds)


def mount(image: Path, point: Path, *, fds: tuple[int, ...] = ()) -> None:
    run("mount", "-o", "loop,nosuid,nodev,noatime", str(image), str(point), fds=fds)


def is_mounted(point: Path) -> bool:
    """Whether something is mounted there; also of a file, unlike `ismount`."""
    return _mount_id(point) != _mount_id(point.parent)


def unmount(point: Path, deadline: float, *, fds: tuple[int, ...] = ()) -> None:
    """Unmount, as soon as the kernel lets go of what dead processes held. Raises ProviderError."""
    delays = aio.backoff(0.005, 0.1, deadline - time.monotonic())
    while is_mounted(point):
        try:
            run("umount", str(point), fds=fds)
        except ProviderError as error:
            if (delay_s := next(delays, None)) is None:
                raise
            _log.debug("%s is not unmounted yet: %s", point, error)
            time.sleep(delay_s)


def run(tool: str, *arguments: str, fds: tuple[int, ...] = ()) -> None:
    program = shutil.which(tool) or tool
    try:
        done = subprocess.run(
            [program, *arguments], env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, pass_fds=fds
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError(f"{tool} failed for a box: {error}") from error
    if done.returncode != 0:
        raise ProviderError(f"{tool} failed for a box: {done.stderr.decode(errors='replace').strip()}")


def _mount_id(path: Path) -> str:
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return Path(f"/proc/self/fdinfo/{fd}").read_text().partition("mnt_id:")[2].split()[0]
    finally:
        os.close(fd)
