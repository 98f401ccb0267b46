"""Fork server: a process that has the command line in its memory, and forks it for each `skerry exec`; `start.py` asks.

It does nothing for anybody who could not do it alone: it serves its own user, and of that user's processes only those
which the kernel holds to be as free as itself. It ends when nobody has asked for a while, or the code has changed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import marshal
import os
import select
import signal
import socket
import struct
import sys
import threading
from typing import NamedTuple

from skerry import providers
from skerry.cli.options import load_config
from skerry.errors import SkerryError
from skerry.start import ENDING, address, interpreter

_IDLE_S = 30.0
_ANSWER_S = 3.0
_MAX_REQUEST = 1 << 20
_CREDENTIALS = struct.Struct("3i")
_FREEDOM = frozenset({
    "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp",
    "Seccomp_filters",
})  # fmt: skip
_WARM = (
    "skerry.cli.exec", "skerry.cli.job", "skerry.cli.registry", "skerry.cli.errors", "skerry.store.sqlite",
    "skerry.manager.manager",
)  # fmt: skip


_Freedom = tuple[str, ...]


class _Request(NamedTuple):
    argv: list[str]
    env: dict[bytes, bytes]
    umask: int
    ignored: list[int]


def serve() -> None:
    """Fork for whoever asks, until nobody has for a while."""
    os.chdir("/")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address())
        except OSError:
            return  # there is one
        _warm_up()
        code, own = _code(), _freedom(os.getpid())
        if own is None:
            return  # nobody can be told from somebody who is less free
        listener.listen(128)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is nobody's to wait for
        while select.select([listener], [], [], _IDLE_S)[0]:
            connection = listener.accept()[0]
            if _code() != code:
                return  # it is not ours any more; who asked does it alone
            try:
                forked = os.fork() == 0
            except OSError:
                forked = False
            if forked:
                listener.close()
                _become(connection, own)
            connection.close()


def _warm_up() -> None:
    """Import what `exec` needs, and let no collection of garbage touch it, so that its pages stay shared."""
    for name in _WARM:
        importlib.import_module(name)
    with contextlib.suppress(SkerryError):
        providers.provider_class(load_config().provider)
    gc.collect()
    gc.freeze()


def _code() -> list[tuple[str, int, int]]:
    """The files of the code in our memory, as they are now."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = []
    for file in files - {None}:
        try:
            status = os.stat(str(file))
        except OSError:
            found.append((str(file), 0, 0))
        else:
            found.append((str(file), status.st_mtime_ns, status.st_size))
    return sorted(found)


def _become(connection: socket.socket, own: _Freedom) -> None:
    """In a fork: take the place of whoever asked, run its command line, tell the exit code, and end."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        connection.settimeout(_ANSWER_S)
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid == os.geteuid() and _freedom(pid) == own:
            connection.send(interpreter())
            request = _request(connection)
            connection.settimeout(None)
            threading.Thread(target=_follow, args=(connection,), daemon=True).start()
            code = _run(request)
            connection.send(bytes([code]))
    except (OSError, EOFError):
        pass  # who asked has gone
    finally:
        os._exit(code)


def _request(connection: socket.socket) -> _Request:
    """What is asked, once the asker's folder and streams are ours. Raises EOFError if it asks nothing."""
    text, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST, 4)
    if len(fds) != 4:
        raise EOFError
    for number, fd in enumerate(fds[:3]):
        os.dup2(fd, number)
    os.fchdir(fds[3])
    for fd in fds:
        os.close(fd)
    return _Request(*marshal.loads(text))  # of the same user, and as free as we


def _freedom(pid: int) -> _Freedom | None:
    """What the kernel lets a process do and see; None if it does not tell."""
    folder = f"/proc/{pid}"
    try:
        with open(f"{folder}/status") as file:
            lines = [line for line in file if line.partition(":")[0] in _FREEDOM]
        links = [os.readlink(f"{folder}/ns/{name}") for name in sorted(os.listdir(f"{folder}/ns"))]
        root = os.readlink(f"{folder}/root")
    except OSError:
        return None
    try:
        with open(f"{folder}/attr/current") as file:
            label = file.read()
    except OSError:
        label = ""  # no such module in this kernel
    return (*lines, *links, root, label)


def _run(request: _Request) -> int:
    os.umask(request.umask)
    os.environb.clear()
    os.environb.update(request.env)
    sys.argv = ["skerry", *request.argv]
    for number in ENDING:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in request.ignored else usual)
    _open_streams()
    from skerry.cli import main

    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code & 0xFF


def _open_streams() -> None:
    """Make Python's standard streams anew: how they buffer depends on what they lead to."""
    before = sys.stdin, sys.stdout, sys.stderr
    for number, old in enumerate(before):
        assert isinstance(old, io.TextIOWrapper)
        raw = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
        buffer = io.BufferedReader(raw) if number == 0 else io.BufferedWriter(raw)
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(
            buffer, old.encoding, old.errors, newline="\n" if number else None, line_buffering=lines
        )
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)


def _follow(connection: socket.socket) -> None:
    """Take the signals of whoever asked; its end is one too."""
    try:
        while number := connection.recv(1):
            os.kill(os.getpid(), number[0])
    except OSError:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    serve()
