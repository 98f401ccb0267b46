"""Filter of system calls (`shared.syscalls`) as a classic BPF program, built with nothing but `struct`."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping
from itertools import chain

from skerry.providers.shared import syscalls

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine names, as `os.uname` spells them, and the kernel's AUDIT_ARCH of each."""

_X32_BIT = 0x40000000
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_LOAD, _JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16

Instruction = tuple[int, int, int, int]


def program(machine: str) -> bytes:
    """The filter for one of `ARCHITECTURES`, in the form that `bwrap --seccomp` reads."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine))


def _instructions(machine: str) -> Iterator[Instruction]:
    column = syscalls.MACHINES.index(machine)
    yield _load(_ARCH_OFFSET)
    yield _JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]
    yield _return(_KILL_PROCESS)
    yield _load(_NUMBER_OFFSET)
    if machine == "x86_64":
        yield from _when(_JUMP_AT_LEAST, _X32_BIT, _refuse(errno.ENOSYS))
    yield from _when(_JUMP_GREATER, syscalls.LAST_KNOWN_CALL, _refuse(errno.ENOSYS))
    for table, code in ((syscalls.REFUSED, errno.EPERM), (syscalls.ABSENT, errno.ENOSYS)):
        for numbers in table.values():
            number = numbers[column]
            if number is not None:
                yield from _when(_JUMP_EQUAL, number, _refuse(code))
    for name, body in _judges().items():
        yield _JUMP_EQUAL, 0, len(body), syscalls.JUDGED[name][column]
        yield from body
    yield _return(_ALLOW)


def _judges() -> dict[str, list[Instruction]]:
    """Instructions for calls whose arguments decide."""
    allow, refuse, unsupported = _return(_ALLOW), _refuse(errno.EPERM), _refuse(errno.EAFNOSUPPORT)
    injections = [_when(_JUMP_EQUAL, request, refuse) for request in syscalls.TERMINAL_INJECTION]
    families = [_when(_JUMP_EQUAL, family, allow) for family in syscalls.SOCKET_FAMILIES]
    route = [_load_argument(2), *_when(_JUMP_EQUAL, syscalls.NETLINK_ROUTE, allow)]
    netlink = [(_JUMP_EQUAL, 0, len(route), syscalls.AF_NETLINK), *route]
    return {
        "clone": [_load_argument(0), *_when(_JUMP_ANY_BIT, syscalls.CLONE_NEW_ANY, refuse), allow],
        "ioctl": [_load_argument(1), *chain(*injections), allow],
        "socket": [_load_argument(0), *chain(*families), *netlink, unsupported],
        "socketpair": [_load_argument(0), *_when(_JUMP_EQUAL, syscalls.AF_UNIX, allow), unsupported],
    }


def _load(offset: int) -> Instruction:
    return _LOAD, 0, 0, offset


def _load_argument(index: int) -> Instruction:
    """The low 32 bits: the kernel drops the rest of an int, so a compare of 64 could be evaded (CVE-2019-10063)."""
    return _load(_ARGS_OFFSET + 8 * index)


def _when(jump: int, value: int, then: Instruction) -> tuple[Instruction, Instruction]:
    return (jump, 0, 1, value), then


def _return(action: int) -> Instruction:
    return _RETURN, 0, 0, action


def _refuse(code: int) -> Instruction:
    return _return(_ERRNO | code)
