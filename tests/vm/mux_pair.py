"""Both ends of a multiplexer in this process, joined by a pair of sockets in the place of a machine's channel."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from skerry.agent.guest.loop import READ, Loop
from skerry.agent.guest.vm.ports import GuestMux
from skerry.vm.warden.mux import HostMux


class Running:
    """A loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = Loop()
        self._wake_read, self._wake_write = os.pipe()
        self._jobs: list[Callable[[], object]] = []
        self.loop.watch(self._wake_read, READ, self._work)
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()

    def do(self, job: Callable[[], object]) -> None:
        """Run it in the loop's thread, and wait for it."""
        done = threading.Event()
        self._jobs.append(lambda: (job(), done.set()))
        os.write(self._wake_write, b".")
        assert done.wait(10)

    def _work(self, _events: int) -> None:
        os.read(self._wake_read, 1)
        self._jobs.pop(0)()

    def stop(self) -> None:
        self.do(self.loop.stop)
        self._thread.join(10)
        os.close(self._wake_read)
        os.close(self._wake_write)


class Pair:
    """A host and a guest. The host's end can be replaced as a restore replaces it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "v.sock"
        self.ready = folder / "v.sock_1024"
        self.told: list[str] = []
        self._folder = folder
        self._runner = Running()
        self._channel, self._guest_end = socket.socketpair()
        self.guest: GuestMux | None = None
        self.host: HostMux | None = None
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(self.path))
        self.listener.listen(400)

    def __enter__(self) -> Self:
        return self

    def start_host(self) -> None:
        def start() -> None:
            channel = os.dup(self._channel.fileno())
            listener = self.listener.dup()
            self.host = HostMux(self._runner.loop, channel, listener, str(self.ready), self.told.append)

        self._runner.do(start)

    def start_guest(self, **ports: str) -> None:
        def start() -> None:
            self.guest = GuestMux(self._runner.loop, self._guest_end.fileno())
            self.guest.ports.update({int(name[1:]): path for name, path in ports.items()})

        self._runner.do(start)

    def replace_host(self) -> None:
        """The machine's memory is as it was, and the process beside it is a new one."""
        self._runner.do(lambda: self.host and self.host.close())
        self.start_host()

    def from_host(self, data: bytes) -> None:
        self._channel.sendall(data)

    def from_guest(self, data: bytes) -> None:
        self._guest_end.sendall(data)

    def do(self, job: Callable[[], object]) -> None:
        self._runner.do(job)

    def __exit__(self, *_: object) -> None:
        def close() -> None:
            if self.host is not None:
                self.host.close()
            if self.guest is not None:
                self.guest.drop_all()
                self.guest.on_hang_up()

        self._runner.do(close)
        self._runner.stop()
        for each in (self._channel, self._guest_end, self.listener):
            each.close()
        for path in (self.path, self.ready):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
