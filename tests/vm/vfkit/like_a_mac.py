"""`python like_a_mac.py SCRIPT ARGUMENT...` runs a script as on a Mac: what only Linux has is not there.

Files of /proc and /sys are missed, and so are functions and numbers of Python that it has on Linux alone; what asks for
the system is told that it is macOS on Apple silicon.
"""

from __future__ import annotations

import asyncio
import os
import platform
import runpy
import select
import selectors
import signal
import socket
import sqlite3
import subprocess
import sys
import time

_LINUX = {
    os: (
        "O_PATH pidfd_open memfd_create eventfd setns unshare sched_setaffinity getrandom copy_file_range splice "
        "posix_fallocate setresuid setresgid setxattr getxattr listxattr O_DIRECT O_TMPFILE"
    ),
    socket: "AF_VSOCK SOCK_NONBLOCK SOCK_CLOEXEC SO_PEERCRED AF_NETLINK AF_PACKET",
    time: "CLOCK_BOOTTIME",
    signal: "pidfd_send_signal sigwaitinfo sigtimedwait",
    select: "epoll EPOLLIN EPOLLOUT EPOLLHUP EPOLLERR EPOLLRDHUP EPOLLPRI EPOLLET",
}
_FOLDERS = ("/proc", "/sys")


def _is_missed(path: object) -> bool:
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]
    except TypeError:  # a descriptor
        return False
    return any(text == folder or text.startswith(f"{folder}/") for folder in _FOLDERS)


def _miss(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir") and _is_missed(arguments[0]):
        raise FileNotFoundError(2, "there is no such thing on a Mac", str(arguments[0]))


def pretend() -> None:
    """From here on this process is on a Mac, as far as it can tell."""
    assert all((asyncio, sqlite3, subprocess))  # these are loaded already, and have looked at the real system
    selectors.DefaultSelector = selectors.PollSelector  # type: ignore[misc, assignment]
    for module, names in _LINUX.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    readlink = os.readlink

    def readlink_on_a_mac(path: os.PathLike[str] | str, **options: object) -> str:
        _miss("open", (path,))
        return readlink(path, **options)  # type: ignore[arg-type]

    os.readlink = readlink_on_a_mac  # type: ignore[assignment]
    sys.addaudithook(_miss)
    sys.platform = "darwin"
    platform.machine = lambda: "arm64"
    platform.system = lambda: "Darwin"


if __name__ == "__main__":
    pretend()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
