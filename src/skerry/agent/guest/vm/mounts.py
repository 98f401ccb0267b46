"""Mounts of a machine: its drives, and the root of its user, which holds nothing of the first process."""

from __future__ import annotations

import posix
import stat
import sys
from fcntl import ioctl

from ..setup import make_folder
from . import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME, BIND, MOVE = 1, 2, 4, 8, 32, 1024, 4096, 8192
REC, PRIVATE = 1 << 14, 1 << 18
_DETACH = 2

RUN = "/run/skerry"
DATA = "/.data"
ETC = f"{RUN}/etc"  # files that take the place of the image's own in /etc
DISK = f"{RUN}/disk"
_ROOT = f"{RUN}/root"
_OTHER_ROOT = f"{RUN}/other-root"
_HIDING = f"{RUN}/hiding"
_HIDDEN = ("/.data", "/.cache")
_AGENT = "/.skerry"
_SCRATCH = "/var/tmp"
_DISK_DEVICE, _DATA_DEVICE = "/dev/vdc", "/dev/vdd"
_SUPERBLOCK = 1024
_RESIZE = 0x40086610
_TMP = NOSUID | NODEV
_SYSTEM = ("/proc", "/sys", "/run", "/tmp", "/dev", _AGENT)
_DEVICES = (("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0))
_LINKS = (("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2"))
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_OWN_BOOT_ID = f"{RUN}/boot_id"
_NOT_FOR_WRITING = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    try:
        encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
        syscalls.call("mount", *encoded[:3], syscalls.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {source}: {error.strerror}", target) from None


def bind(source: str, target: str, flags: int = 0) -> None:
    """Bind a folder or file; flags of its own are set by a second call, as the kernel wants it. Raises OSError."""
    mount(source, target, None, BIND)
    if flags:
        mount(source, target, None, BIND | REMOUNT | flags)


def unmount(target: str) -> None:
    syscalls.call("umount2", target.encode(), _DETACH)


def pivot_root(new: str) -> None:
    """Make `new` the root, and drop the old one. Raises OSError."""
    posix.chdir(new)
    syscalls.call("pivot_root", b".", b".")
    unmount(".")
    posix.chdir("/")


def mount_disk() -> None:
    """Mount the disk, and grow its file system to the drive, which may have been made larger since."""
    make_folder(DISK)
    mount(_DISK_DEVICE, DISK, "ext4", NOATIME)
    with open(_DISK_DEVICE, "rb", buffering=0) as device:
        size = device.seek(0, 2)
        device.seek(_SUPERBLOCK)
        superblock = device.read(_SUPERBLOCK)
    block = 1024 << int.from_bytes(superblock[24:28], "little")
    if size // block > int.from_bytes(superblock[4:8], "little"):
        fd = posix.open(DISK, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        try:
            ioctl(fd, _RESIZE, (size // block).to_bytes(8, sys.byteorder))
        finally:
            posix.close(fd)


def mount_data() -> None:
    mount(_DATA_DEVICE, DATA, "ext4", NOATIME)


def mounted() -> list[str]:
    """Places of the drives that the first process has mounted."""
    with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
        places = [line.split()[1] for line in file]
    return [place for place in places if place in (DISK, DATA)]


def build_view(is_fixed: bool) -> None:
    """Build the part of the user's root that is the same for all boxes. Folders of an image that are for others are
    hidden; a root that is the box's own is taken as it is."""
    mount("none", "/", None, REC | PRIVATE)
    make_folder(_ROOT)
    if is_fixed:
        make_folder(_HIDING)
        for path in _HIDDEN:
            posix.mknod(_HIDING + path, stat.S_IFCHR, 0)  # what an overlay takes for a file that was removed
        mount("overlay", _ROOT, "overlay", READ_ONLY, f"lowerdir={_HIDING}:/")
    else:
        mount("/", _ROOT, None, BIND)
    posix.umask(0)
    mount("proc", _place(_ROOT, "/proc"), "proc", NOSUID | NODEV | NOEXEC)
    for path in _NOT_FOR_WRITING:
        if posix.access(_ROOT + path, posix.F_OK):
            bind(_ROOT + path, _ROOT + path, READ_ONLY | NOSUID | NODEV | NOEXEC)
    bind(_OWN_BOOT_ID, _ROOT + _BOOT_ID, READ_ONLY | NOSUID | NODEV | NOEXEC)
    mount("sys", _place(_ROOT, "/sys"), "sysfs", READ_ONLY | NOSUID | NODEV | NOEXEC)
    mount("run", _place(_ROOT, "/run"), "tmpfs", _TMP, "mode=1777,size=16m")
    mount("tmp", _place(_ROOT, "/tmp"), "tmpfs", _TMP, "mode=1777")
    _make_devices(_place(_ROOT, "/dev"))
    bind(_AGENT, _place(_ROOT, _AGENT), READ_ONLY)
    posix.umask(0o022)


def _make_devices(dev: str) -> None:
    mount("dev", dev, "tmpfs", NOSUID | NOEXEC, "mode=755,size=64k")
    for name, major, minor in _DEVICES:
        posix.mknod(f"{dev}/{name}", stat.S_IFCHR | 0o666, posix.makedev(major, minor))
    for name, target in _LINKS:
        posix.symlink(target, f"{dev}/{name}")
    posix.mkdir(f"{dev}/pts", 0o755)
    mount("devpts", f"{dev}/pts", "devpts", NOSUID | NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    posix.mkdir(f"{dev}/shm", 0o1777)
    mount("shm", f"{dev}/shm", "tmpfs", _TMP, "mode=1777")


def enter_view(params: dict[str, Any]) -> None:
    """Finish the user's root, and make it this process's own."""
    has_disk, writable = params["mount_disk"], params["writable_root"]
    if has_disk:
        mount_disk()
    root = _ROOT
    if params["mount_data"] or (has_disk and writable):
        root = _OTHER_ROOT
        make_folder(root)
        if has_disk and writable:  # over the image's, with all changes on the disk
            make_folder(f"{DISK}/upper")
            make_folder(f"{DISK}/work")
            lower = "/" if params["mount_data"] else f"{_HIDING}:/"
            mount("overlay", root, "overlay", 0, f"lowerdir={lower},upperdir={DISK}/upper,workdir={DISK}/work")
        else:  # the image's, with the folders that are hidden otherwise
            mount("/", root, None, BIND)
        for path in _SYSTEM:
            mount(_ROOT + path, _place(root, path), None, MOVE)
    if has_disk and not writable:
        make_folder(f"{DISK}/home")
        bind(f"{DISK}/home", _place(root, params["home"]), NOSUID | NODEV)
    elif not writable:
        mount("home", _place(root, params["home"]), "tmpfs", _TMP, _size(params, "tmp", "mode=755"))
    if not writable and _is_folder(root + _SCRATCH):
        mount("scratch", root + _SCRATCH, "tmpfs", _TMP, _size(params, "tmp", "mode=1777"))
    if params["mount_data"]:
        mount(_DATA_DEVICE, _place(root, DATA), "ext4", NOATIME | NOSUID | NODEV)
    for name, place in (("tmp", "/tmp"), ("shm", "/dev/shm")):
        if params.get(name):
            mount(name, root + place, None, REMOUNT | _TMP, _size(params, name, "mode=1777"))
    put_files(root)
    pivot_root(root)


def _is_folder(path: str) -> bool:
    """Whether it is one, and no link to one."""
    try:
        return stat.S_ISDIR(posix.lstat(path).st_mode)
    except OSError:
        return False


def put_files(root: str) -> None:
    """Bind our files of /etc over those of the image, but leave its links alone, wherever they lead."""
    for name in posix.listdir(ETC):
        target = f"{root}/etc/{name}"
        try:
            if not stat.S_ISREG(posix.lstat(target).st_mode):
                continue
        except FileNotFoundError:
            try:
                posix.close(posix.open(target, posix.O_CREAT | posix.O_EXCL | posix.O_WRONLY | posix.O_CLOEXEC, 0o644))
            except OSError:
                continue
        bind(f"{ETC}/{name}", target)


def write_file(name: str, text: str) -> None:
    """Write a file for /etc, in place: it may be mounted somewhere."""
    _write(f"{ETC}/{name}", text)


def write_boot_id() -> None:
    """Give this machine a boot of its own: what it was cloned from may have read the kernel's, which never changes."""
    digits = bytearray(posix.urandom(16))
    digits[6], digits[8] = digits[6] & 0x0F | 0x40, digits[8] & 0x3F | 0x80
    text = digits.hex()
    _write(_OWN_BOOT_ID, f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}\n")


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_TRUNC | posix.O_CLOEXEC, 0o644)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)


def _place(root: str, path: str) -> str:
    """Make a mount point in the user's root. Raises NotADirectoryError."""
    make_folder(root + path)
    try:
        if stat.S_ISDIR(posix.stat(root + path).st_mode):
            return root + path
    except FileNotFoundError:
        pass
    raise NotADirectoryError(20, "of the image is no folder; take another image, or a writable root", path)


def _size(params: dict[str, Any], name: str, options: str) -> str:
    return f"{options},size={int(params[name])}" if params.get(name) else options
