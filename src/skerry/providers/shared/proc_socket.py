"""The short way to an agent in a container: straight to its socket, where we share its kernel and may see its files."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from contextlib import ExitStack

from skerry.aio import backoff
from skerry.errors import AgentUnreachable
from skerry.net.stream import FdStream, Stream
from skerry.providers.shared.layout import SOCKET

_WAIT_S = (0.001, 0.002)
"""First and longest wait between two looks for a socket."""


class NotShared(Exception):
    """We cannot see the container's files: another host, another kernel, or not our right."""


def is_of(pid: int, container: str) -> bool:
    """Whether a process of this host is that container's: engines name its control group by the container's id."""
    try:
        with open(f"/proc/{pid}/cgroup") as groups:
            return bool(container) and container in groups.read()
    except OSError:
        return False


def process_of(pid: int, container: str) -> int | None:
    """A descriptor of the process that stands for a container, if it is one of this host."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if is_of(pid, container):
        return fd
    os.close(fd)
    return None


async def connect(pid: int, timeout_s: float) -> Stream:
    """Connect to the socket in the files of a process of this host; an agent that is just starting is waited for."""
    for delay_s in backoff(*_WAIT_S, timeout_s):
        if (fd := _try(pid)) is not None:
            return FdStream(fd, fd)
        await asyncio.sleep(delay_s)
    raise AgentUnreachable(f"no agent listens in the box after {timeout_s:g} s")


def _try(pid: int) -> int | None:
    """None while nobody listens. No link is followed: all behind the first step is the box's to choose."""
    *folders, name = SOCKET.strip("/").split("/")
    flags = os.O_PATH | os.O_CLOEXEC
    with ExitStack() as opened:

        def step(name: str, flags: int, at: int | None = None) -> int:
            fd = os.open(name, flags, dir_fd=at)
            opened.callback(os.close, fd)
            return fd

        try:
            at = step(f"/proc/{pid}/root", flags | os.O_DIRECTORY)
            for folder in folders:
                at = step(folder, flags | os.O_DIRECTORY | os.O_NOFOLLOW, at)
        except OSError as error:
            raise NotShared(error) from error
        try:
            at = step(name, flags | os.O_NOFOLLOW, at)
        except FileNotFoundError:
            return None  # the folder is there, so this is the right place
        if not stat.S_ISSOCK(os.fstat(at).st_mode):
            raise AgentUnreachable("something else is in the place of the agent's socket")
        sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        try:
            sock.connect(f"/proc/self/fd/{at}")
        except (ConnectionRefusedError, BlockingIOError):
            return None
        except OSError as error:
            raise NotShared(error) from error
        (listener,) = struct.unpack_from("i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if listener != pid:
            raise AgentUnreachable("another process of the box listens in the place of its agent")
        return sock.detach()
