"""Runs in a box: what a process of the box can do to another one, by each way that there is.

`seize.py PID` tries on that process. Nothing is written that was not there before.
"""

from __future__ import annotations

import ctypes
import os
import sys

SIZE = 8
PIDFD_OPEN, PIDFD_GETFD = 434, 438
ATTACH, DETACH, SEIZE = 16, 17, 0x4206
libc = ctypes.CDLL(None, use_errno=True)


class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def place(pid: int) -> int:
    """Where something can be written: known, or somewhere in the middle of what there may be."""
    with open(f"/proc/{pid}/maps") as file:
        for line in file:
            span, mode = line.split()[:2]
            if mode == "rw-p":
                return int(span.partition("-")[0], 16)
    raise OSError(2, "")


def memory(pid: int) -> None:
    with open(f"/proc/{pid}/mem", "r+b", 0) as file:
        file.seek(place(pid))
        was = file.read(SIZE)
        file.seek(place(pid))
        file.write(was)


def across(pid: int, name: str) -> None:
    room = ctypes.create_string_buffer(SIZE)
    ours = Part(ctypes.addressof(room), SIZE)
    theirs = Part(place(pid), SIZE)
    for call in dict.fromkeys(("process_vm_readv", name)):
        checked(getattr(libc, call)(pid, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0))


def trace(pid: int, how: int) -> None:
    checked(libc.ptrace(how, pid, None, None))
    if how == ATTACH:
        os.waitpid(pid, 0)
    libc.ptrace(DETACH, pid, None, None)


def take_descriptor(pid: int) -> None:
    handle = checked(libc.syscall(PIDFD_OPEN, pid, 0))
    checked(libc.syscall(PIDFD_GETFD, handle, 0, 0))


def read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


WAYS = {
    "write its memory": memory,
    "read its memory by a call": lambda pid: across(pid, "process_vm_readv"),
    "write its memory by a call": lambda pid: across(pid, "process_vm_writev"),
    "trace it": lambda pid: trace(pid, ATTACH),
    "seize it": lambda pid: trace(pid, SEIZE),
    "take a descriptor": take_descriptor,
    "follow a descriptor": lambda pid: os.readlink(f"/proc/{pid}/fd/0"),
    "read its maps": place,
    "read its environment": lambda pid: read(f"/proc/{pid}/environ"),
    "read its vector": lambda pid: read(f"/proc/{pid}/auxv"),
}


def main() -> None:
    pid = int(sys.argv[1])
    for name, attempt in WAYS.items():
        try:
            attempt(pid)
            print(name, "got in", sep=": ")
        except (OSError, AttributeError) as error:
            print(name, type(error).__name__, sep=": ")


main()
