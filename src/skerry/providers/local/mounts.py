"""What a manager that is root mounts for a box on the host: a disk of limited size, and ways to closed folders."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

from skerry.errors import ProviderError
from skerry.providers.local.boxes import Box
from skerry.spec import SandboxId

_FOLDER = Path("/run/skerry/mounts")
"""Not with the rest of a box, which may lie in a folder that is closed to its uid."""

_TIMEOUT_S = 30


def why_no_disk() -> str | None:
    """None where disk images can be made and mounted."""
    if os.geteuid() != 0:
        return "loop mounts need root"
    if not os.path.exists("/dev/loop-control"):
        return "there is no /dev/loop-control"
    missing = [tool for tool in ("mke2fs", "mount", "umount") if shutil.which(tool) is None]
    return f"{missing[0]} is not installed" if missing else None


def attach_disk(box: Box, size: int, uid: int) -> int:
    """Make and mount an image; a descriptor of its root, which belongs to `uid`. Only what is written takes room."""
    image = box.disk_image
    with open(image, "xb") as file:
        file.truncate(size)
    options = f"root_owner={uid}:{uid},lazy_itable_init=1,nodiscard"
    _run(box, "mke2fs", "-q", "-F", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", options, str(image))
    point = _new_point(box.id, is_folder=True)
    _run(box, "mount", "-o", "loop,nosuid,nodev,noatime", str(image), str(point))
    (point / "lost+found").rmdir()
    return os.open(point, os.O_PATH | os.O_CLOEXEC)


def open_way(box: Box, fd: int) -> int:
    """A descriptor of the same file or folder that a stranger may resolve: bubblewrap, as the box's uid, looks up the
    path behind each descriptor it binds. Takes `fd`; what is closed to strangers is mounted where it is not."""
    if _is_open_to_all(Path(os.readlink(f"/proc/self/fd/{fd}"))):
        return fd
    try:
        point = _new_point(box.id, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
        _run(box, "mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{fd}", str(point), fds=(fd,))
        return os.open(point, os.O_PATH | os.O_CLOEXEC)
    finally:
        os.close(fd)


def detach_all(box: Box, timeout_s: float) -> None:
    """Unmount all that was mounted for a box; the kernel may need a moment to let go of what dead processes held."""
    folder = _FOLDER / box.id
    if os.geteuid() != 0 or not folder.exists():
        return
    deadline = time.monotonic() + timeout_s
    for path in folder.iterdir():
        delay_s = 0.005
        while _mount_id(path) != _mount_id(folder):
            try:
                _run(box, "umount", str(path))
            except ProviderError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(delay_s)
                delay_s = min(2 * delay_s, 0.1)
    shutil.rmtree(folder)


def _new_point(id: SandboxId, *, is_folder: bool) -> Path:
    folder = _FOLDER / id
    folder.mkdir(mode=0o711, parents=True, exist_ok=True)
    point = folder / str(len(os.listdir(folder)))
    if is_folder:
        point.mkdir()
    else:
        point.touch(exist_ok=False)
    return point


def _is_open_to_all(path: Path) -> bool:
    return all(os.stat(parent).st_mode & stat.S_IXOTH for parent in path.parents)


def _mount_id(path: Path) -> str:
    """Which mount a path lies on; unlike `ismount` it also tells of a mounted file."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return Path(f"/proc/self/fdinfo/{fd}").read_text().partition("mnt_id:")[2].split()[0]
    finally:
        os.close(fd)


def _run(box: Box, tool: str, *arguments: str, fds: tuple[int, ...] = ()) -> None:
    program = shutil.which(tool) or tool
    try:
        done = subprocess.run(
            [program, *arguments],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            pass_fds=(*fds, box.lock_fd),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError(f"{tool} failed for a box: {error}") from error
    if done.returncode != 0:
        raise ProviderError(f"{tool} failed for a box: {done.stderr.decode(errors='replace').strip()}")
