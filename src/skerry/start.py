"""Start of the `skerry` program. `skerry exec` is run by a fork of a process that has the command line in its memory
(`cli/forkserver.py`), where there is one: an interpreter and its imports take longer than all that the command does."""

from __future__ import annotations

import _signal
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _socket import socket

_QUICK = "exec"
_SWITCH = b"SKERRY_FORKSERVER"
_ANSWER_S = 3.0
_SHAPES = (b"LANG", b"LC_", b"LD_", b"PYTHON", b"TZ")
"""Beginnings of variables that an interpreter heeds as it starts, and never again."""
_KILLED = 137
ENDING = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT)
"""Signals that are the command line's to handle, and may be ignored where it is started."""
_MAX_MESSAGE = 1 << 16


def main() -> None:
    """Entry point of the `skerry` program."""
    if sys.argv[1:2] != [_QUICK] or sys.platform != "linux" or os.environb.get(_SWITCH) == b"off":
        _here()
        return
    code = _by_fork()
    if code is not None:
        sys.exit(code)
    try:
        _here()
    finally:
        _start_server()


def address() -> bytes:
    """Name of the socket of this user and this installation, which is in no file system and ends with its process."""
    return b"\0skerry-%d-%s" % (os.geteuid(), os.fsencode(sys.prefix)[-80:])


def interpreter() -> bytes:
    """All by which this interpreter differs from one that was started elsewhere, as a text to compare."""
    return marshal.dumps((sys.prefix, sys.hexversion, sorted(_shape().items())))


def _shape() -> dict[bytes, bytes]:
    return {name: value for name, value in os.environb.items() if name.startswith(_SHAPES)}


def _here() -> None:
    from skerry.cli import main as run

    run()


def _by_fork() -> int | None:
    """Have a fork run our command line, and give its exit code; None where nobody has begun to."""
    import _socket

    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET | _socket.SOCK_CLOEXEC)
    try:
        return _code_of_fork(server)
    finally:
        server.close()


def _code_of_fork(server: socket) -> int | None:
    try:
        if not _is_like_us(server):
            return None
        _ask(server)  # from here on the command is the fork's, and is run once
    except OSError:
        return None
    _pass_signals(server)
    try:
        code = server.recv(1)
    except OSError:
        code = b""
    return code[0] if code else _KILLED


def _is_like_us(server: socket) -> bool:
    """Whether there is a server, of our user, whose interpreter is as ours. Raises OSError."""
    import _socket

    server.settimeout(_ANSWER_S)
    server.connect(address())
    credentials = server.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    if int.from_bytes(credentials[4:8], sys.byteorder) != os.geteuid():
        return False  # somebody else has taken the name
    said = server.recv(_MAX_MESSAGE)
    server.settimeout(None)
    return said == interpreter()


def _ask(server: socket) -> None:
    """Send our arguments and surroundings. Raises OSError, also where they are larger than a message, if none is sent.
    Whoever does not read takes nothing of ours: our streams would stay open in there."""
    import _socket

    ignored = [int(number) for number in ENDING if _signal.getsignal(number) == _signal.SIG_IGN]
    umask = os.umask(0o77)
    os.umask(umask)
    text = marshal.dumps((sys.argv[1:], dict(os.environb), umask, ignored))
    folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in (0, 1, 2, folder))
        server.sendmsg([text], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
    finally:
        os.close(folder)


def _pass_signals(server: socket) -> None:
    """Hand the signals that we get to the fork."""

    def hand_on(number: int, _: object) -> None:
        try:
            server.send(bytes([number]))
        except OSError:
            pass  # it has ended

    for number in (*ENDING, _signal.SIGWINCH):
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, hand_on)


def _start_server() -> None:
    """Start the process that forks for the next ones; it has nothing of ours but variables for its interpreter."""
    files = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    try:
        others = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
        closed = [(os.POSIX_SPAWN_CLOSE, fd) for fd in others if os.path.exists(f"/proc/self/fd/{fd}")]
        argv = [sys.executable, "-P", "-m", "skerry.cli.forkserver"]
        os.posix_spawn(sys.executable, argv, _shape(), file_actions=[*files, *closed], setsid=True)
    except OSError:
        pass  # the next one starts as we did
