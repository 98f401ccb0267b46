"""Folder of a vfkit's machine. Nothing in it needs what only Linux has: processes are told apart by `ps`."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path

from skerry.aio import backoff
from skerry.errors import AgentUnreachable
from skerry.net import dial
from skerry.net.stream import Stream
from skerry.vm.folder import VmFolder
from skerry.vm.vfkit.command import API, PID_FILE, port_socket

_LOOK_AGAIN_S, _LONGEST_S = 0.02, 0.5


class VfkitFolder(VmFolder):
    """Its ports have a socket each, which vfkit listens on, and its process has no warden."""

    def is_running(self) -> bool:
        return find(self.path) is not None

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the machine has ended; False if it has not by then."""
        for delay_s in backoff(_LOOK_AGAIN_S, _LONGEST_S, timeout_s):
            if await asyncio.to_thread(find, self.path) is None:
                return True
            await asyncio.sleep(delay_s)
        return False

    async def dial(self, port: int, timeout_s: float) -> Stream:
        """Open a stream to a port of the guest. Raises AgentUnreachable, which tells of a machine that has ended."""
        try:
            return await dial.unix(self.path / port_socket(port), timeout_s=timeout_s)
        except AgentUnreachable as error:
            how = await asyncio.to_thread(self.how_it_ended)
            if not how:
                raise
            raise AgentUnreachable(f"nothing answers in {self.path}: {how}") from error

    def ready_listener(self) -> socket.socket:
        """Listen for a guest that has come up."""
        self.ready.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        listener.bind(str(self.ready))
        listener.listen()
        return listener


def find(folder: Path) -> int | None:
    """Pid of this machine's vfkit, or None: a pid alone may be another's by now, so its command line must fit."""
    try:
        pid = int((folder / PID_FILE).read_text())
    except (OSError, ValueError):
        return None
    if has_ended(pid):
        return None
    told = subprocess.run(["ps", "-ww", "-p", str(pid), "-o", "command="], capture_output=True, text=True)
    return pid if f"unix://{folder / API}" in told.stdout.split() else None


def find_all(folder: Path) -> list[int]:
    """Pids of all vfkits of this machine, also of one that has not noted its own yet."""
    told = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, text=True)
    words = (line.split() for line in told.stdout.splitlines())
    return [int(pid) for pid, *command in words if f"unix://{folder / API}" in command and not has_ended(int(pid))]


def has_ended(pid: int) -> bool:
    """Whether a child of ours has ended; False for other processes."""
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return False
