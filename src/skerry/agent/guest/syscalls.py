"""The calls of the kernel that Python has no names for. A machine's first process alone needs them."""

from __future__ import annotations

import ctypes
import posix

READ_ONLY, NOSUID, NODEV, NOEXEC, REMOUNT, NOATIME, BIND, MOVE = 1, 2, 4, 8, 32, 1024, 4096, 8192
REC, PRIVATE = 1 << 14, 1 << 18
NEW_MOUNTS, NEW_PIDS = 0x20000, 0x20000000
RESTART, POWER_OFF = 0x1234567, 0x4321FEDC
_DETACH = 2
_SET_NO_NEW_PRIVS, _DROP_FROM_BOUNDING_SET = 38, 24
_CAPABILITY_VERSION = 0x20080522
_INVALID = 22
_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _KILL, _SETGID, _SETUID, _BIND, _AUDIT, _SETFCAP = (
    0,
    1,
    3,
    4,
    5,
    6,
    7,
    10,
    29,
    31,
)
_OF_ROOT = (_CHOWN, _DAC_OVERRIDE, _FOWNER, _FSETID, _KILL, _SETGID, _SETUID, _BIND, _AUDIT, _SETFCAP)
"""What package managers and servers need of root. None of it reaches beyond the files and processes of the box."""

_libc = ctypes.CDLL(None, use_errno=True)
_version = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)


def _call(name: str, *args: object) -> int:
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, posix.strerror(number), name)
    return result


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    try:
        encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
        _call("mount", *encoded[:3], ctypes.c_ulong(flags), encoded[3])
    except OSError as error:
        raise OSError(error.errno, f"cannot mount {source}: {error.strerror}", target) from None


def bind(source: str, target: str, flags: int = 0) -> None:
    """Another place for a folder or file; flags of its own are set by a second call, as the kernel wants it."""
    mount(source, target, None, BIND)
    if flags:
        mount(source, target, None, BIND | REMOUNT | flags)


def unmount(target: str) -> None:
    _call("umount2", target.encode(), _DETACH)


def pivot_root(new: str) -> None:
    """Be in `new`, and in nothing else."""
    posix.chdir(new)
    _call("pivot_root", b".", b".")
    unmount(".")
    posix.chdir("/")


def unshare(flags: int) -> None:
    _call("unshare", flags)


def enter(path: str, flags: int) -> None:
    """Be in the namespace that a file of /proc stands for."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        _call("setns", fd, flags)
    finally:
        posix.close(fd)


def _prctl(what: int, value: int) -> None:
    _call("prctl", what, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0)))


def bar_privileges() -> None:
    """Nothing that this process starts can have more than root of a box has, and no program gives it more."""
    _prctl(_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if capability in _OF_ROOT:
            continue
        try:
            _prctl(_DROP_FROM_BOUNDING_SET, capability)
        except OSError as error:
            if error.errno != _INVALID:
                raise
            return  # this kernel has no more of them


def give_up_privileges(uid: int, gid: int) -> None:
    """Be that user for good: no other group, no capability unless it is root, and, after `bar_privileges`, no way
    back."""
    kept = 0
    for capability in _OF_ROOT:
        if uid == 0:
            kept |= 1 << capability
        else:
            _prctl(_DROP_FROM_BOUNDING_SET, capability)
    posix.setgroups([])
    posix.setresgid(gid, gid, gid)
    posix.setresuid(uid, uid, uid)
    _call("capset", _version, (ctypes.c_uint32 * 6)(kept, kept))


def end_machine(how: int) -> None:
    _call("reboot", ctypes.c_int(how))
