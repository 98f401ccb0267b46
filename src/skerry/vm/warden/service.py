"""Service of a warden from the start of the hypervisor's process to its end: console, sockets, exit status."""

from __future__ import annotations

import _socket
import io
import posix
import sys
import time

from skerry.agent.guest import wire
from skerry.agent.guest.loop import READ, Loop

from .mux import HostMux
from .sockets import Published, VsockBridge
from .warden import CHANNEL

_READY = "v.sock_1024"
_CONSOLE = "console.log"
_ENDED = "ended.json"
_CHUNK = 64 * 1024


class Console(io.TextIOBase):
    """Log of guest, hypervisor and warden: reads a pipe into `path`; a full file takes the place of `path`.1."""

    def __init__(self, pipe: int, path: str, limit: int) -> None:
        self._pipe = pipe
        self._path = path
        self._limit = limit
        self.is_over = False
        posix.set_blocking(pipe, False)
        self._fd = self._open()
        self._size = posix.fstat(self._fd).st_size

    def _open(self) -> int:
        return posix.open(
            self._path, posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT | posix.O_NOFOLLOW | posix.O_CLOEXEC, 0o600
        )

    def read_some(self) -> bool:
        """Read a chunk; False if there is nothing now, and `is_over` if there never will be."""
        try:
            data = posix.read(self._pipe, _CHUNK)
        except BlockingIOError:
            return False
        self._keep(data)
        self.is_over = not data
        return bool(data)

    def write(self, text: str) -> int:
        self._keep(text.encode(errors="replace"))
        return len(text)

    def _keep(self, data: bytes) -> None:
        if self._size + len(data) > self._limit:
            self._begin_anew()
        try:
            posix.write(self._fd, data)
            self._size += len(data)
        except OSError:
            pass  # the disk is full: a machine goes on without a console

    def _begin_anew(self) -> None:
        full = self._fd
        try:
            posix.replace(self._path, f"{self._path}.1")
            self._fd = self._open()
            posix.close(full)
        except OSError:  # no other file can be made: it goes on in this one, as its machine would end with it
            posix.ftruncate(full, 0)
        self._size = 0


class Service:
    def __init__(
        self,
        vmm: int,
        console: int,
        console_bytes: int,
        channel: tuple[int, int] | None,
        vsock: tuple[int, int] | None,
        published: list[tuple[int, int]],
    ) -> None:
        self._vmm = vmm
        self._loop = Loop()
        self._console_pipe = console
        self._console = Console(console, _CONSOLE, console_bytes)
        null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
        for number in (0, 1, 2):
            posix.dup2(null, number)
        sys.stderr = self._console
        self._loop.watch(console, READ, self._on_console)
        self._loop.watch(posix.pidfd_open(vmm), READ, self._on_end)
        if channel is not None:
            listener = _socket.socket(fileno=channel[1])
            HostMux(self._loop, channel[0], listener, _READY, lambda text: self._console.write(f"skerry: {text}\n"))
        if vsock is not None:
            VsockBridge(self._loop, vsock[0], _socket.socket(fileno=vsock[1]), _READY)
        for fd, port in published:
            Published(self._loop, _socket.socket(fileno=fd), CHANNEL, port)

    def run(self) -> None:
        self._loop.run()

    def _on_console(self, _events: int) -> None:
        self._console.read_some()
        if self._console.is_over:
            self._loop.forget(self._console_pipe)

    def _on_end(self, _events: int) -> None:
        code = posix.waitstatus_to_exitcode(posix.waitpid(self._vmm, 0)[1])
        while self._console.read_some():
            pass
        end = {"code": code if code >= 0 else None, "signal": -code if code < 0 else None, "at": time.time()}
        _write_file(_ENDED, wire.dumps(end))
        posix._exit(0)


def _write_file(name: str, text: str) -> None:
    """Write a file whole or not at all; not at all if the disk is full."""
    try:
        fd = posix.open(
            f"{name}.new", posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_NOFOLLOW | posix.O_CLOEXEC, 0o600
        )
        posix.write(fd, text.encode())
        posix.rename(f"{name}.new", name)
    except OSError:
        pass
