"""Starting a box: bubblewrap with an empty environment, its options and descriptors, and nothing else of ours."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import time
from collections.abc import Mapping

import msgspec

from skerry.errors import CreateFailed

_FIRST_CHILD_FD = 3
_LOG_BYTES = 64 * 1024
_PIPE_BYTES = 1 << 20
_F_ADD_SEALS = 1033
_SEAL_SHRINK_AND_GROW = 0x2 | 0x4


class Descriptors:
    """What a child inherits: each file gets the next number, from 3 on. Owns what it is given."""

    def __init__(self) -> None:
        self._sources: list[int] = []

    def add(self, fd: int) -> int:
        """The number that `fd` will have in the child."""
        self._sources.append(fd)
        return _FIRST_CHILD_FD + len(self._sources) - 1

    def add_data(self, data: bytes) -> int:
        """A file in memory with that content."""
        fd = os.memfd_create("skerry", os.MFD_CLOEXEC)
        os.truncate(fd, len(data))
        os.pwrite(fd, data, 0)
        return self.add(fd)

    def close(self) -> None:
        while self._sources:
            os.close(self._sources.pop())

    def spawn(self, argv: list[str], env: Mapping[str, str], log_fd: int) -> int:
        """Start a program in a session of its own, with these descriptors and no others."""
        numbers = range(_FIRST_CHILD_FD, _FIRST_CHILD_FD + len(self._sources))
        # above every number the child gets, so that one dup2 never overwrites the source of the next
        for index, fd in enumerate([*self._sources]):
            self._sources[index] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, numbers.stop)
            os.close(fd)
        actions: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
            (os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable() if fd > 2 and fd not in numbers
        ]
        actions += [(os.POSIX_SPAWN_DUP2, log_fd, number) for number in (1, 2)]
        actions.append((os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0))
        actions += [(os.POSIX_SPAWN_DUP2, *pair) for pair in zip(self._sources, numbers, strict=True)]
        # a manager in the background ignores SIGINT, and its boxes would inherit that
        defaults = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=defaults)


class Log:
    """What the launcher and the agent say while they start. It has a fixed size: a box cannot fill the host with it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("skerry-log", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.truncate(self.fd, _LOG_BYTES)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEAL_SHRINK_AND_GROW)

    def text(self) -> str:
        return os.pread(self.fd, _LOG_BYTES, 0).rstrip(b"\0").decode(errors="replace").strip()[-4096:]

    def close(self) -> None:
        os.close(self.fd)


def pipe_for_config() -> tuple[int, int]:
    """(read end, write end) of a pipe that takes any configuration at once. The agent starts when the pipe ends:
    if we die before that it reads nothing, and ends too."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return read_fd, write_fd


def read_child_pid(info_fd: int, deadline: float) -> int:
    """The pid of the box's first process, from bubblewrap's info, which may come in pieces."""
    text = b""
    poll = select.poll()
    poll.register(info_fd, select.POLLIN)
    while poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        piece = os.read(info_fd, 4096)
        text += piece
        try:
            return int(msgspec.json.decode(text)["child-pid"])
        except (msgspec.DecodeError, KeyError):
            if not piece:
                raise CreateFailed("bubblewrap ended before the box was made") from None
    raise CreateFailed("bubblewrap did not make the box in time")


def _inheritable() -> list[int]:
    """Descriptors that others left open for children; Python's own never are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:
            continue  # the listing's own
    return found
