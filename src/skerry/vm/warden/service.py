"""The life of a warden, once the hypervisor's process runs, to the end of it."""

from __future__ import annotations

import os
import socket
import sys
import time

from skerry.agent.guest import wire

from .console import Console
from .loop import READ, Loop
from .mux import HostMux
from .published import Published
from .warden import CHANNEL

_READY = "v.sock_1024"
_CONSOLE = "console.log"
_ENDED = "ended.json"


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
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for number in (0, 1, 2):
            os.dup2(null, number)
        sys.stderr = self._console
        self._loop.watch(console, READ, self._on_console)
        self._loop.watch(os.pidfd_open(vmm), READ, self._on_end)
        if channel is not None:
            HostMux(self._loop, channel[0], socket.socket(fileno=channel[1]), _READY, self._complain)
        if vsock is not None:
            from .vsock import VsockBridge

            VsockBridge(self._loop, vsock[0], socket.socket(fileno=vsock[1]), _READY)
        for fd, port in published:
            Published(self._loop, socket.socket(fileno=fd), CHANNEL, port)

    def run(self) -> None:
        self._loop.run()

    def _complain(self, text: str) -> None:
        self._console.write(f"skerry: {text}\n")

    def _on_console(self, _events: int) -> None:
        self._console.read_some()
        if self._console.is_over:
            self._loop.forget(self._console_pipe)

    def _on_end(self, _events: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(self._vmm, 0)[1])
        while self._console.read_some():
            pass
        end = {"code": code if code >= 0 else None, "signal": -code if code < 0 else None, "at": time.time()}
        _write_file(_ENDED, wire.dumps(end))
        os._exit(0)


def _write_file(name: str, text: str) -> None:
    """Whole or not at all; not at all if the disk is full."""
    try:
        fd = os.open(f"{name}.new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        os.write(fd, text.encode())
        os.rename(f"{name}.new", name)
    except OSError:
        pass
