"""Walls of a box, raised by the kernel's own calls, for a process that a zygote has forked: what bubblewrap does for
every other box, in the same order. It begins with one user namespace and one of processes, as root of the first; it
ends as the box's user in a second one, with no capability, no way to gain one, and a filter of system calls."""

from __future__ import annotations

import ctypes
import posix
from _socket import sethostname
from _struct import pack

from . import setup

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TREE = "/box"
"""Where a zygote has the tree that its boxes share. Beside it is the /proc without which the kernel gives them none."""

NEW_USERS, NEW_PIDS = 0x10000000, 0x20000000
_NEW_MOUNTS, _NEW_CGROUPS, _NEW_HOST_NAME, _NEW_IPC, _NEW_NETWORK = 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x40000000
_INTO_CGROUP = 1 << 33
_CLONE3, _MOUNT_SETATTR = 435, 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CHILD_ENDED = 17

_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _BIND, _RECURSIVE = 1, 2, 4, 8, 4096, 16384
_DETACH = 2
_HERE, _AT_EMPTY_PATH = -100, 0x1000
_SET_DUMPABLE, _SET_SECCOMP, _DROP_FROM_BOUNDING_SET, _SET_NO_NEW_PRIVS, _AMBIENT = 4, 22, 24, 38, 47
_FILTER, _CLEAR_ALL, _ALL_CAPABILITIES = 2, 4, 64
_CAPABILITY_VERSION = 0x20080522
_INVALID = 22

# without letting go of the interpreter's lock: nothing may happen between a fork and its two returns
_libc = ctypes.PyDLL(None, use_errno=True)
_functions = {name: getattr(_libc, name) for name in ("capset", "mount", "prctl", "syscall", "umount2", "unshare")}
_machine = posix.uname().machine
_NO_WRITING = pack("4Q", _READ_ONLY | _NO_SUID | _NO_DEVICES, 0, 0, 0)


def _call(name: str, *args: int | bytes | None) -> int:
    """Call a function of libc, with numbers of 32 bits and the addresses of bytes: the types that `ctypes` would make
    for anything else cost a fork more memory than all of its walls. Raises OSError if it fails."""
    result: int = _functions[name](*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {posix.strerror(number)}")
    return result


def fork(flags: int, group: int | None) -> int:
    """Fork into new namespaces and, by a descriptor of its folder, into a control group. Raises OSError."""
    flags |= _INTO_CGROUP if group is not None else 0
    args = pack("11Q", flags, 0, 0, 0, _CHILD_ENDED, 0, 0, 0, 0, 0, group or 0)
    return _call("syscall", _CLONE3, args, len(args))


def give_up_capabilities(kept: tuple[int, ...] = ()) -> None:
    """Have no capabilities from now on but these, and no program that gives any. Raises OSError."""
    _call("prctl", _SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("prctl", _AMBIENT, _CLEAR_ALL, 0, 0, 0)
    for capability in range(_ALL_CAPABILITIES):
        try:
            if capability not in kept:
                _call("prctl", _DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
        except OSError as error:
            if error.errno != _INVALID:
                raise
            break  # this kernel has no more of them
    bits = sum(1 << capability for capability in kept)
    _call("capset", pack("2I", _CAPABILITY_VERSION, 0), pack("6I", bits, bits, 0, 0, 0, 0))


def address_of(entry: int) -> int:
    """Address that the kernel told us of as we started, by its number in the auxiliary vector."""
    _libc.getauxval.restype = ctypes.c_ulong
    found: int = _libc.getauxval(ctypes.c_ulong(entry))
    return found


def write_memory(address: int, data: bytes) -> None:
    ctypes.memmove(address, data, len(data))


class Filter:
    """A filter of system calls, as the kernel takes it: made before a fork, and used in it."""

    def __init__(self, program: bytes) -> None:
        self._instructions = ctypes.create_string_buffer(program, len(program))  # the address of which is in the head
        self.head = pack("HP", len(program) // 8, ctypes.addressof(self._instructions))


def raise_walls(box: dict[str, Any], uid: int, gid: int, calls: Filter) -> None:
    """Go from a fork to the inside of a box; `uid` and `gid` are those that the fork had. Raises OSError."""
    posix.setsid()
    _call("prctl", _SET_DUMPABLE, 1, 0, 0, 0)  # else what is to be written of us in /proc is not ours
    _map_ids((0, uid), (0, gid))
    posix.setresgid(0, 0, 0)
    posix.setresuid(0, 0, 0)
    _write("/proc/sys/user/max_user_namespaces", b"1")  # the second one that follows, and no more
    _call("unshare", _NEW_MOUNTS | _NEW_CGROUPS | _NEW_HOST_NAME | _NEW_IPC | _NEW_NETWORK)
    sethostname("sandbox")
    setup.raise_loopback()
    if box["rules"]:
        setup.open_low_ports()
    _enter_tree(box)
    _call("unshare", NEW_USERS)
    _map_ids((box["user"][0], 0), (box["user"][1], 0))
    give_up_capabilities()
    # by prctl, and last of all: nothing that a box may not do is needed from here on
    _call("prctl", _SET_SECCOMP, _FILTER, calls.head, 0, 0)


def _map_ids(uids: tuple[int, int], gids: tuple[int, int]) -> None:
    _write("/proc/self/setgroups", b"deny")
    _write("/proc/self/uid_map", b"%d %d 1" % uids)
    _write("/proc/self/gid_map", b"%d %d 1" % gids)


def _write(path: str, text: bytes) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text)
    finally:
        posix.close(fd)


def _enter_tree(box: dict[str, Any]) -> None:
    """Make the tree our root, with what no two boxes share mounted in it, and nothing else in sight."""
    _mount(TREE, TREE, None, _BIND | _RECURSIVE)
    posix.chdir(TREE)  # the one on top
    _mount("proc", "proc", "proc", _NO_SUID | _NO_DEVICES | _NO_EXEC)
    for name in box["masked"]:
        _mount("dev/null", name, None, _BIND)
        _close(name)
    _mount("proc/sys", "proc/sys", None, _BIND | _RECURSIVE)
    _close("proc/sys")
    _mount("devpts", "dev/pts", "devpts", _NO_SUID | _NO_EXEC, "newinstance,ptmxmode=0666,mode=620")
    for name, options in box["folders"]:
        _mount("tmpfs", name, "tmpfs", _NO_SUID | _NO_DEVICES, options)
    _call("syscall", _PIVOT_ROOT[_machine], b".", b".")
    _call("umount2", b".", _DETACH)
    posix.chdir("/")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    words = [None if each is None else each.encode() for each in (source, target, kind)]
    try:
        _call("mount", *words, flags, options.encode())
    except OSError as error:
        raise OSError(error.errno, f"{target} cannot be mounted: {error.strerror}") from None


def _close(target: str) -> None:
    """Let nothing at a mount point be written, and none of it be a device or a program of another user."""
    _call("syscall", _MOUNT_SETATTR, _HERE, target.encode(), 0, _NO_WRITING, len(_NO_WRITING))
