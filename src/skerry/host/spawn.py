"""Programs started in a session of their own, with the descriptors they are given and no others."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Container, Iterator, Mapping
from typing import Any, Self

import msgspec

from skerry.errors import CreateFailed

_FIRST_NUMBER = 3
_MAX_LOG = 4096


def spawn(argv: list[str], env: Mapping[str, str], given: Mapping[int, int]) -> int:
    """Start a program; `given` has our descriptor for each number that it gets."""
    sources: list[int] = []
    try:
        # above every number that the child gets, so that one dup2 never overwrites the source of the next
        sources.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(given) + 1) for fd in given.values())
        actions: list[tuple[int, int] | tuple[int, int, int]] = [*_closing_all(but=given)]
        actions += [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(sources, given, strict=True)]
        # a manager in the background ignores SIGINT, and its boxes would inherit that
        defaults = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
        return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=defaults)
    finally:
        for fd in sources:
            os.close(fd)


def _closing_all(but: Container[int]) -> Iterator[tuple[int, int]]:
    """Actions of posix_spawn that close the descriptors which others left open for children; Python's own never are."""
    bound = os.sysconf("SC_OPEN_MAX")
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # the listing's own, or closed meanwhile
            if fd > 2 and fd not in but and os.get_inheritable(fd):
                if fd < bound:
                    yield os.POSIX_SPAWN_CLOSE, fd
                else:  # opened before the limit was lowered: posix_spawn takes no such number
                    os.set_inheritable(fd, False)


def task_pipe() -> tuple[int, int]:
    """Make a pipe (read end, write end) that takes any task at once. The child begins when the pipe ends: if we die
    before that it reads nothing, and ends too."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, 1 << 20)
    return read_fd, write_fd


class Descriptors:
    """Descriptors that a child inherits: each gets the next number, from 3 on. Owns what it is given."""

    def __init__(self) -> None:
        self._sources: list[int] = []

    def add(self, fd: int) -> int:
        """Take `fd`; returns the number that it will have in the child."""
        self._sources.append(fd)
        return _FIRST_NUMBER + len(self._sources) - 1

    def add_data(self, data: bytes) -> int:
        """Add a file in memory with that content."""
        fd = os.memfd_create("skerry", os.MFD_CLOEXEC)
        os.truncate(fd, len(data))
        os.pwrite(fd, data, 0)
        return self.add(fd)

    def spawn(self, argv: list[str], env: Mapping[str, str], log_fd: int) -> int:
        """Start a program with these, an empty stdin and `log_fd` for its output; returns its pid."""
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return spawn(argv, env, {0: stdin, 1: log_fd, 2: log_fd, **dict(enumerate(self._sources, _FIRST_NUMBER))})
        finally:
            os.close(stdin)

    def close(self) -> None:
        while self._sources:
            os.close(self._sources.pop())


class Child:
    """A process that gets its task on stdin and answers on stdout. It forks once it has read its task: our child has
    ended when this context does, and what goes on is nobody's."""

    def __init__(self, argv: list[str], env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
        self._is_over = False
        self._log = os.memfd_create("skerry-log", os.MFD_CLOEXEC)
        task_read, self._task = task_pipe()
        self._answer, answer_write = os.pipe2(os.O_CLOEXEC)
        try:
            self.pid = spawn(argv, env, {0: task_read, 1: answer_write, 2: self._log, **descriptors})
        except BaseException:
            self._close()
            raise
        finally:
            os.close(task_read)
            os.close(answer_write)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()
        if not self._is_over:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def join(self) -> None:
        """Wait for the end of our child, which has its own deadline once it has answered. Raises CreateFailed."""
        _, status = os.waitpid(self.pid, 0)
        self._is_over = True
        if status:
            raise CreateFailed("the machine's network cannot be made", log=self._words())

    def _close(self) -> None:
        for fd in (self._task, self._answer, self._log):
            if fd >= 0:
                os.close(fd)
        self._task = self._answer = self._log = -1

    def tell(self, task: bytes) -> None:
        """Write the task and end its stdin, on which it begins."""
        with contextlib.suppress(BrokenPipeError):  # its end is seen, with the reason, when it does not answer
            os.write(self._task, task)
        os.close(self._task)
        self._task = -1

    def answer(self, deadline: float) -> dict[str, Any]:
        """Read its one answer. Raises CreateFailed if there is none in time."""
        text = b""
        poll = select.poll()
        poll.register(self._answer, select.POLLIN)
        while not text.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise CreateFailed("the machine's warden did not start in time", log=self._words())
            piece = os.read(self._answer, 4096)
            if not piece:
                raise CreateFailed("the machine's warden ended as it started", log=self._words())
            text += piece
        return msgspec.json.decode(text, type=dict[str, Any])

    def _words(self) -> str:
        size = os.fstat(self._log).st_size
        return os.pread(self._log, _MAX_LOG, max(0, size - _MAX_LOG)).decode(errors="replace").strip()
