"""Filter of system calls (`shared.syscalls`) as a classic BPF program, built with nothing but `struct`."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from skerry.providers.shared import syscalls

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine names, as `os.uname` spells them, and the kernel's AUDIT_ARCH of each."""

_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCH_OFFSET, _ARGS_OFFSET = 0, 4, 16

Instruction = tuple[int, int, int, int]
Body = list[Instruction]


def program(machine: str) -> bytes:
    """The filter for one of `ARCHITECTURES`, in the form that `bwrap --seccomp` reads."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in _instructions(machine))


def _instructions(machine: str) -> Iterator[Instruction]:
    yield _load(_ARCH_OFFSET)
    yield _JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]
    yield _return(_KILL_PROCESS)
    yield _load(_NUMBER_OFFSET)
    yield from _search(_verdicts(syscalls.MACHINES.index(machine)))


def _verdicts(column: int) -> list[tuple[int, Body]]:
    """The first number of each run of calls that are treated alike, and how; the last are all that nobody knows yet,
    those of x86's third ABI included."""
    special: dict[int, Body] = {syscalls.JUDGED[name][column]: body for name, body in _judges().items()}
    for table, code in ((syscalls.REFUSED, errno.EPERM), (syscalls.ABSENT, errno.ENOSYS)):
        special |= {number: [_refuse(code)] for each in table.values() if (number := each[column]) is not None}
    special[syscalls.LAST_KNOWN_CALL + 1] = [_refuse(errno.ENOSYS)]
    runs: list[tuple[int, Body]] = []
    for number in range(syscalls.LAST_KNOWN_CALL + 2):
        body = special.get(number, [_return(_ALLOW)])
        if not runs or runs[-1][1] != body:
            runs.append((number, body))
    return runs


def _search(runs: Sequence[tuple[int, Body]]) -> Body:
    """Find the run of a number by halves: the kernel goes through the filter for each number that there is, whenever a
    box is made."""
    if len(runs) == 1:
        return runs[0][1]
    middle = len(runs) // 2
    low, high = _search(runs[:middle]), _search(runs[middle:])
    return [(_JUMP_AT_LEAST, len(low), 0, runs[middle][0]), *low, *high]


def _judges() -> dict[str, Body]:
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
