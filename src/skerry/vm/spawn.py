"""A process in a session of its own that is told once what to do, answers once, and outlives us."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from skerry.errors import CreateFailed

_HIGH_FD = 64
_PIPE_BYTES = 1 << 20
_MAX_LOG = 4096


class Child:
    """It gets its task on stdin, answers on stdout, and has the given descriptors and no others. It forks once it has
    read its task: what is our child has ended when this context does, and what goes on is nobody's."""

    def __init__(self, argv: list[str], env: Mapping[str, str], descriptors: Mapping[int, int]) -> None:
        self._is_over = False
        self._log = os.memfd_create("skerry-log", os.MFD_CLOEXEC)
        task_read, self._task = os.pipe2(os.O_CLOEXEC)
        self._answer, answer_write = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self._task, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # above every number that the child gets, so that one dup2 never overwrites the source of the next
        sources = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for number, fd in descriptors.items()}
        try:
            given = {0: task_read, 1: answer_write, 2: self._log, **sources}
            actions: list[tuple[int, int] | tuple[int, int, int]] = [
                (os.POSIX_SPAWN_CLOSE, fd) for fd in _inheritable() if fd > 2 and fd not in given
            ]
            actions += [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in given.items()]
            # a manager in the background ignores SIGINT, and a machine would inherit that
            defaults = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
            self.pid = os.posix_spawn(
                argv[0], argv, env, file_actions=actions, setsid=True, setsigmask=[], setsigdef=defaults
            )
        except BaseException:
            self._close()
            raise
        finally:
            for fd in (task_read, answer_write, *sources.values()):
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if not self._is_over:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def join(self) -> None:
        """Wait for the end of what is our child: it has its own deadline once it has answered."""
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
        """It begins when its stdin ends: if we die before that it reads nothing, and ends too."""
        with contextlib.suppress(BrokenPipeError):  # its end is seen, with the reason, when it does not answer
            os.write(self._task, task)
        os.close(self._task)
        self._task = -1

    def answer(self, deadline: float) -> dict[str, Any]:
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


def _inheritable() -> list[int]:
    """Descriptors that others left open for children; Python's own never are."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return found
