"""Disks of limited size for boxes, where we are root: ext4 images that take only the room of what is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from skerry.errors import ProviderError

MOUNTS = Path("/run/skerry/mounts")
"""One folder for each box. Not with the rest of a box, which may lie in a folder that is closed to its uid."""

_TIMEOUT_S = 30


def why_none() -> str | None:
    """None where disk images can be made and mounted."""
    if os.geteuid() != 0:
        return "loop mounts need root"
    if not os.path.exists("/dev/loop-control"):
        return "there is no /dev/loop-control"
    missing = [tool for tool in ("mke2fs", "mount", "umount") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else None


def make(image: Path, size: int, uid: int, gid: int, *, fds: tuple[int, ...] = ()) -> None:
    """An image whose root belongs to that user."""
    with open(image, "xb") as file:
        file.truncate(size)
    options = f"root_owner={uid}:{gid},lazy_itable_init=1,nodiscard"
    run("mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", options, str(image), fds=fds)


def mount(image: Path, point: Path, *, fds: tuple[int, ...] = ()) -> None:
    run("mount", "-o", "loop,nosuid,nodev,noatime", str(image), str(point), fds=fds)


def is_mounted(point: Path) -> bool:
    """Also of a file, unlike `ismount`."""
    return _mount_id(point) != _mount_id(point.parent)


def unmount(point: Path, deadline: float, *, fds: tuple[int, ...] = ()) -> None:
    """The kernel may need a moment to let go of what dead processes held."""
    delay_s = 0.005
    while is_mounted(point):
        try:
            run("umount", str(point), fds=fds)
        except ProviderError:
            if time.monotonic() > deadline:
                raise
            time.sleep(delay_s)
            delay_s = min(2 * delay_s, 0.1)


def run(tool: str, *arguments: str, fds: tuple[int, ...] = ()) -> None:
    program = shutil.which(tool) or tool
    try:
        done = subprocess.run(
            [program, *arguments],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            pass_fds=fds,
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
