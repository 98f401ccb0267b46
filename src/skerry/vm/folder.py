"""The folder of a machine: what was intended, what runs, and how it ended; any process can go on from it.

Where a machine has a uid of its own the folder stays root's, with the sticky bit and the machine's group: the machine
may make files in it and cannot replace ours. What it made is never followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from skerry.agent import dial
from skerry.agent.stream import Stream
from skerry.errors import AgentUnreachable
from skerry.host import folders, locks
from skerry.host.processes import Process, boot_id
from skerry.vm.base import CHANNEL, CONSOLE, READY_PORT

OLDER_CONSOLE = f"{CONSOLE}.1"
_VM = "vm.json"
_PROCESSES = "processes.json"
_ENDED = "ended.json"
_LOCK = "lock"
_MAX_NOTE = 64 * 1024
_HARDLY_ANY_ROOM = 1 << 20
_Note = TypeVar("_Note")


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine was meant to be, noted before anything of it runs, and then who runs it."""

    boot_id: str
    uid: int | None
    """The host uid that is only this machine's; None if it shares ours."""
    groups: list[str] = []
    cid: int | None = None
    warden: Process | None = None
    vmm: Process | None = None


class End(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine's process ended, in the words of its warden."""

    code: int | None
    signal: int | None
    at: float


class VmFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"VmFolder({str(self.path)!r})"

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def channel(self) -> Path:
        return self.path / CHANNEL

    @property
    def ready(self) -> Path:
        return self.path / f"{CHANNEL}_{READY_PORT}"

    @property
    def console(self) -> Path:
        return self.path / CONSOLE

    def make(self) -> None:
        folders.make_new(self.path, f"a machine in {self.path}")
        (self.path / _LOCK).touch(mode=0o600)

    @contextlib.contextmanager
    def locked(self, timeout_s: float) -> Iterator[bool]:
        """Hold the machine against every other process; False if there is none (any more)."""
        # a file of ours, not the folder itself: the machine may open that, and could lock us out
        try:
            fd = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            yield False
            return
        try:
            locks.wait(fd, timeout_s, f"the machine in {self.path} is held by another process")
            yield self._is_lock_file(fd)
        finally:
            os.close(fd)

    def _is_lock_file(self, fd: int) -> bool:
        """Whether the file that was locked is still that of this folder."""
        try:
            return os.path.samestat(os.fstat(fd), os.lstat(self.path / _LOCK))
        except FileNotFoundError:
            return False

    def write(self, vm: Vm) -> None:
        """Note what is about to be started; what was noted of an earlier start is gone."""
        for name in (_ENDED, f"{_ENDED}.new", _PROCESSES, _VM):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)
        self.write_file(_VM, msgspec.json.encode(vm))

    def write_processes(self, warden: Process, vmm: Process) -> None:
        """Note who runs it."""
        self.write_file(_PROCESSES, msgspec.json.encode([warden, vmm]))

    def read(self) -> Vm | None:
        """None if nothing was ever started here; without processes if its start was not seen through."""
        vm = _decode(self.read_file(_VM), Vm)
        running = _decode(self.read_file(_PROCESSES), tuple[Process, Process])
        return vm if vm is None or running is None else msgspec.structs.replace(vm, warden=running[0], vmm=running[1])

    def read_end(self) -> End | None:
        """None while it runs, and if its warden did not live to tell."""
        return _decode(self.read_file(_ENDED), End)

    def write_file(self, name: str, data: bytes) -> None:
        """Whole or not at all, and nobody else's: the machine cannot change it."""
        draft = self.path / f"{name}.new"
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:
            file.write(data)
        draft.rename(self.path / name)

    def read_file(self, name: str, limit: int = _MAX_NOTE) -> bytes:
        """The tail of a file that the machine may have made: no link is followed, and nothing but a file is read."""
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return b""
        with open(fd, "rb", buffering=0) as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return b""
            return os.pread(file.fileno(), limit, max(0, status.st_size - limit))

    def is_running(self) -> bool:
        vm = self.read()
        if vm is None or vm.warden is None or vm.vmm is None or vm.boot_id != boot_id():
            return False
        return vm.vmm.is_alive() and vm.warden.is_alive()

    def how_it_ended(self) -> str:
        """For people; nothing while it runs."""
        if self.is_running():
            return ""
        end = self.read_end()
        if end is None:
            how = "the machine is not running"
        elif end.signal is not None:
            how = f"the machine was killed by signal {end.signal}"
        else:
            how = f"the machine ended with code {end.code}"
        return how if self._has_room() else f"{how}; there is no room left on the disk of {self.path}"

    def _has_room(self) -> bool:
        """A machine whose memory is a file is killed where there is none, and nobody can note how."""
        try:
            disk = os.statvfs(self.path)
        except OSError:
            return True
        return disk.f_bavail * disk.f_frsize >= _HARDLY_ANY_ROOM

    def read_console(self, limit: int = _MAX_NOTE) -> str:
        """The last bytes of what the guest's kernel and the hypervisor said."""
        newest = self.read_file(CONSOLE, limit)
        older = self.read_file(OLDER_CONSOLE, limit - len(newest)) if len(newest) < limit else b""
        return (older + newest).decode(errors="replace").replace("\r\n", "\n")

    async def dial(self, port: int, timeout_s: float) -> Stream:
        """A stream to a port of the guest; a machine that has ended says so."""
        try:
            return await dial.firecracker(self._socket(), port, timeout_s=timeout_s)
        except AgentUnreachable as error:
            how = self.how_it_ended()
            if not how:
                raise
            raise AgentUnreachable(f"nothing answers in {self.path}: {how}") from error

    def _socket(self) -> Path:
        """The channel's. A link of ours may lead to it; one of the machine's own is not followed."""
        with contextlib.suppress(OSError):
            if os.lstat(self.channel).st_uid == os.geteuid():
                return self.path / os.readlink(self.channel)
        return self.channel

    async def wait(self, timeout_s: float) -> bool:
        """Wait until the machine has ended and its warden has told how; False if it has not by then."""
        vm = self.read()
        if vm is None or vm.warden is None:
            return True
        try:
            pidfd = os.pidfd_open(vm.warden.pid)
        except ProcessLookupError:
            return True
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        try:
            if vm.warden.is_alive():
                loop.add_reader(pidfd, ended.set)
                async with asyncio.timeout(timeout_s):
                    await ended.wait()
            return True
        except TimeoutError:
            return False
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def ready_listener(self) -> socket.socket:
        """What a guest connects to when it has come up."""
        name = self.ready.name
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with self.short() as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{folder}/{name}")
            listener.bind(f"{folder}/{name}")
            os.chmod(f"{folder}/{name}", 0o666)  # whose uid will connect is not known yet; the folder keeps others out
        listener.listen()
        return listener

    @contextlib.contextmanager
    def short(self) -> Iterator[str]:
        """A short name of the folder: the address of a unix socket ends at 107 bytes."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def remove_sockets(self, *, but: Path | None = None) -> None:
        with os.scandir(self.path) as entries:
            sockets = [entry.path for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        for path in sockets:
            if path != str(but):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)

    def remove(self) -> None:
        folders.remove(self.path)


def _decode(data: bytes, kind: type[_Note]) -> _Note | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError:
        return None
