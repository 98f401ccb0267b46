"""A network that leads out of the warden's namespace: slirp4netns beside it, until the warden is gone."""

from __future__ import annotations

import _signal
import posix

_DEADLINE_S = 10
_EXIT_FD, _READY_FD = 3, 4
_HIGH_FD = 64
_CANNOT_RUN = 127


class Outside:
    """Made before the warden is forked: it holds one end of each pipe, and we, outside its namespace, the other."""

    def __init__(self) -> None:
        self._made_read, self._made_write = posix.pipe2(posix.O_CLOEXEC)
        self._alive_read, self._alive_write = posix.pipe2(posix.O_CLOEXEC)

    def namespace_is_made(self) -> None:
        """Said by the warden."""
        posix.close(self._made_read)
        posix.close(self._alive_read)
        posix.write(self._made_write, b"1")
        posix.close(self._made_write)

    def attach(self, argv: list[str], warden: int) -> int:
        """What we exit with: 0 once the network is there."""
        _signal.alarm(_DEADLINE_S)
        posix.close(self._made_write)
        posix.close(self._alive_write)
        if not posix.read(self._made_read, 1):
            return 0  # the warden has told why
        ready_read, ready_write = posix.pipe2(posix.O_CLOEXEC)
        if posix.fork() == 0:
            own = [f"--exit-fd={_EXIT_FD}", f"--ready-fd={_READY_FD}", str(warden), "tap0"]
            _exec(argv + own, self._alive_read, ready_write)
        posix.close(ready_write)
        return 0 if posix.read(ready_read, 1) else 1


def _exec(argv: list[str], exit_fd: int, ready_fd: int) -> None:
    import fcntl

    try:
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for fd in (exit_fd, ready_fd)]
        null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
        for fd, number in ((null, 0), (null, 1), (high[0], _EXIT_FD), (high[1], _READY_FD)):
            posix.dup2(fd, number)
        posix.execve(argv[0], argv, {})
    except BaseException as error:
        posix.write(2, f"{argv[0]} cannot be run: {error}\n".encode())
    posix._exit(_CANNOT_RUN)
