"""A virtual machine without us in between: QEMU with the very command line of one of ours, started by a bare script."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from skerry.agent.guest.vm.multiplexer import HELLO, MAGIC, MAX_FRAME, NONCE_BYTES, frame
from skerry.vm.folder import VmFolder
from skerry.vm.launch import CHANNEL_FD, LISTEN_FD

_FILE = re.compile(rb"/proc/self/fd/(\d+)")
_NAME = re.compile(rb'"filename":"([^/"]+)"')
_HIGH_FD = 1000
_TIMEOUT_S = 120


class RawMachine:
    """Takes from a machine that runs what its QEMU was told and given; it may end then."""

    def __init__(self, folder: VmFolder, kept: Path) -> None:
        vm = folder.read()
        assert vm is not None
        assert vm.vmm is not None
        process = Path(f"/proc/{vm.vmm.pid}")
        self._argv = process.joinpath("cmdline").read_bytes().split(b"\0")[:-1]
        told = b"\n".join(self._argv)
        # open from now on, as some of them go with the machine
        self._files = {
            int(number): os.open(process / "fd" / number.decode(), os.O_RDONLY) for number in set(_FILE.findall(told))
        }
        self._kept = kept
        for name in _NAME.findall(told):
            shutil.copyfile(folder.path / name.decode(), kept / name.decode())

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)

    def boot(self) -> float:
        """Seconds from the start of the process to the guest's first words."""
        with TemporaryDirectory(prefix="skerry-bench-") as place:
            for drive in self._kept.iterdir():
                shutil.copyfile(drive, Path(place, drive.name))
            ours, theirs = socket.socketpair()
            monitor = socket.socket(socket.AF_UNIX)
            monitor.bind(f"{place}/qmp.sock")
            monitor.listen()
            given = {CHANNEL_FD: theirs.fileno(), LISTEN_FD: monitor.fileno()}
            given |= self._files
            with ours, theirs, monitor:
                start = time.perf_counter()
                pid = self._spawn(place, given)
                try:
                    _greet(ours)
                    return time.perf_counter() - start
                finally:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _spawn(self, place: str, given: dict[int, int]) -> int:
        high = {number: os.dup2(fd, _HIGH_FD + number, inheritable=False) for number, fd in given.items()}
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in high.items()]
        quiet = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
        argv = [b"/usr/bin/env", b"-C", place.encode(), *self._argv]
        try:
            return os.posix_spawn(argv[0], argv, {}, file_actions=[*quiet, *actions])
        finally:
            for fd in high.values():
                os.close(fd)


def _greet(channel: socket.socket) -> None:
    channel.settimeout(_TIMEOUT_S)
    greeting = frame(HELLO, 0, MAGIC + os.urandom(NONCE_BYTES))
    channel.sendall(bytes(MAX_FRAME) + greeting)
    heard = b""
    while greeting not in heard:
        piece = channel.recv(1 << 16)
        if not piece:
            raise RuntimeError("the raw machine ended before it said anything")
        heard += piece
