"""Calls of the kernel that Python has no names for: namespaces, privileges, the end of the machine."""

from __future__ import annotations

import ctypes
import posix

NEW_MOUNTS, NEW_PIDS = 0x20000, 0x20000000
_RESTART, _POWER_OFF = 0x1234567, 0x4321FEDC
_SET_DUMPABLE, _SET_NO_NEW_PRIVS, _DROP_FROM_BOUNDING_SET = 4, 38, 24
_CAPABILITY_VERSION = 0x20080522
_INVALID = 22
_OF_ROOT = (0, 1, 3, 4, 5, 6, 7, 10, 29, 31)
"""Capabilities that package managers and servers need: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID,
NET_BIND_SERVICE, AUDIT_WRITE, SETFCAP. None of it reaches beyond the files and processes of the box."""

c_ulong = ctypes.c_ulong
_libc = ctypes.CDLL(None, use_errno=True)
_version = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)


def call(name: str, *args: object) -> int:
    """Call a function of libc. Raises OSError if it fails."""
    result: int = getattr(_libc, name)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, posix.strerror(number), name)
    return result


def unshare(flags: int) -> None:
    call("unshare", flags)


def enter(path: str, flags: int) -> None:
    """Enter the namespace that a file of /proc stands for. Raises OSError."""
    fd = posix.open(path, posix.O_RDONLY | posix.O_CLOEXEC)
    try:
        call("setns", fd, flags)
    finally:
        posix.close(fd)


def _prctl(what: int, value: int) -> None:
    call("prctl", what, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0)))


def bar_privileges() -> None:
    """Bar this process and its children from more privileges than root of a box has. Raises OSError."""
    for capability in range(64):
        if capability in _OF_ROOT:
            continue
        try:
            _prctl(_DROP_FROM_BOUNDING_SET, capability)
        except OSError as error:
            if error.errno != _INVALID:
                raise
            return  # this kernel has no more of them


def give_up_privileges(uid: int, gid: int, may_become_root: bool) -> None:
    """Become that user for good: no other group, no capability unless it is root, and no way back but by programs for
    that, where users may become root of the box. Others of that user cannot look into this process or change it.
    Raises OSError."""
    kept = 0
    if not may_become_root:
        _prctl(_SET_NO_NEW_PRIVS, 1)
    for capability in _OF_ROOT:
        if uid == 0:
            kept |= 1 << capability
        elif not may_become_root:
            _prctl(_DROP_FROM_BOUNDING_SET, capability)
    posix.setgroups([])
    posix.setresgid(gid, gid, gid)
    posix.setresuid(uid, uid, uid)
    _prctl(_SET_DUMPABLE, 0)
    call("capset", _version, (ctypes.c_uint32 * 6)(kept, kept))


def end_machine(power_off: bool) -> None:
    call("reboot", ctypes.c_int(_POWER_OFF if power_off else _RESTART))
