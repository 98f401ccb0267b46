"""Folder of a machine: its intent, its processes, and how it ended; any process can go on from it.

Where a machine has a uid of its own the folder stays root's, with the sticky bit and the machine's group: the machine
may make files in it and cannot replace ours. What it made is never followed.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from skerry.clock import boot_id
from skerry.errors import AgentUnreachable, ProviderError
from skerry.host import folders, locks, sparse, uids
from skerry.host.processes import Process
from skerry.net import dial
from skerry.net.stream import Stream
from skerry.vm.base import CHANNEL, CONSOLE, READY_PORT

_log = logging.getLogger("skerry.vm")

OLDER_CONSOLE = f"{CONSOLE}.1"
_VM = "vm.json"
_PROCESSES = "processes.json"
_ENDED = "ended.json"
_LOCK = "lock"
_TOKEN = "token"
_MAX_NOTE = 64 * 1024
_HARDLY_ANY_ROOM = 1 << 20
_Note = TypeVar("_Note")


class Vm(msgspec.Struct, frozen=True, kw_only=True):
    """Intent of a machine, noted before anything of it runs, and then its processes."""

    boot_id: str
    uid: int | None
    """Host uid of this machine alone; None if it shares ours."""
    groups: list[str] = []
    cid: int | None = None
    warden: Process | None = None
    vmm: Process | None = None


class MachineEnd(msgspec.Struct, frozen=True, kw_only=True):
    """End of a machine's process, as its warden tells it."""

    code: int | None
    signal: int | None
    at: float


class VmFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.channel = path / CHANNEL
        self.ready = path / f"{CHANNEL}_{READY_PORT}"
        self.console = path / CONSOLE

    def file(self, name: str) -> Path:
        return self.path / name

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
        with open(fd, "rb"):
            locks.wait(fd, timeout_s, f"the machine in {self.path} is held by another process")
            yield locks.is_in_place(fd, self.path / _LOCK)

    def write(self, vm: Vm) -> None:
        """Note the start of a machine; notes of an earlier start are removed."""
        for name in (_ENDED, f"{_ENDED}.new", _PROCESSES, _VM):
            (self.path / name).unlink(missing_ok=True)
        self.write_file(_VM, msgspec.json.encode(vm))

    def write_killed(self, vm: Vm) -> None:
        """Note that nothing runs of a start whose processes nobody lived to note: who looks need not search again."""
        self.write_file(_VM, msgspec.json.encode(msgspec.structs.replace(vm, boot_id="")))

    def write_processes(self, warden: Process, vmm: Process) -> None:
        self.write_file(_PROCESSES, msgspec.json.encode([warden, vmm]))

    def read(self) -> Vm | None:
        """Note of its start; None if there was none, and without processes if it was cut short."""
        vm = _decode(self.read_note(_VM), Vm)
        running = _decode(self.read_note(_PROCESSES), tuple[Process, Process])
        return vm if vm is None or running is None else msgspec.structs.replace(vm, warden=running[0], vmm=running[1])

    def read_end(self) -> MachineEnd | None:
        """Its end; None while it runs, and if its warden did not live to tell."""
        return _decode(self.read_file(_ENDED), MachineEnd)

    def write_file(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all, which the machine cannot change."""
        draft = self.path / f"{name}.new"
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb", buffering=0) as file:
            file.write(data)
        draft.rename(self.path / name)

    def read_file(self, name: str, limit: int = _MAX_NOTE) -> bytes:
        """Tail of a file that the machine may have made; empty if there is none."""
        fd = self.open_file(name)
        if fd is None:
            return b""
        with open(fd, "rb", buffering=0):
            return os.pread(fd, limit, max(0, os.fstat(fd).st_size - limit))

    def read_note(self, name: str) -> bytes:
        """Read a note of ours; empty if there is none, or the machine has made it in our place."""
        fd = self.open_file(name)
        if fd is None:
            return b""
        with open(fd, "rb", buffering=0):
            return os.pread(fd, _MAX_NOTE, 0) if os.fstat(fd).st_uid == os.geteuid() else b""

    def open_file(self, name: str) -> int | None:
        """Open a file that the machine may have made: no link is followed; None unless it is a file of its own or of
        ours."""
        try:
            fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        if is_its_own(os.fstat(fd)):
            return fd
        os.close(fd)
        return None

    def is_running(self) -> bool:
        """Whether it runs, or has just ended and its warden is about to tell how."""
        warden, vmm = self._processes() or (None, None)
        return bool(warden and vmm and warden.is_alive() and (vmm.is_alive() or self.read_end() is None))

    def is_left_alone(self) -> bool:
        """Whether its hypervisor lives and its warden does not."""
        warden, vmm = self._processes() or (None, None)
        return bool(warden and vmm and vmm.is_alive() and not warden.is_alive())

    def may_run(self) -> bool:
        """Whether something of it may run: its processes, or those of a start that nobody lived to note."""
        vm = self.read()
        if vm is None or vm.boot_id != boot_id():
            return False
        return vm.warden is None or vm.vmm is None or vm.warden.is_alive() or vm.vmm.is_alive()

    def _processes(self) -> tuple[Process, Process] | None:
        """Warden and hypervisor of a start in this boot of the host, alive or not."""
        vm = self.read()
        if vm is None or vm.warden is None or vm.vmm is None or vm.boot_id != boot_id():
            return None
        return vm.warden, vm.vmm

    def how_it_ended(self) -> str:
        """Its end in words for people; empty while it runs."""
        if self.is_running():
            return ""
        end = self.read_end()
        if end is None:
            how = "the machine is not running"
        elif end.signal is not None:
            how = f"the machine was killed by signal {end.signal}"
        else:
            how = f"the machine ended with code {end.code}"
        with contextlib.suppress(OSError):
            disk = os.statvfs(self.path)
            if disk.f_bavail * disk.f_frsize < _HARDLY_ANY_ROOM:  # a machine whose memory is a file is killed then
                how += f"; there is no room left on the disk of {self.path}"
        return how

    def read_console(self, limit: int = _MAX_NOTE) -> str:
        """Last bytes of the console of the guest's kernel and the hypervisor."""
        newest = self.read_file(CONSOLE, limit)
        older = self.read_file(OLDER_CONSOLE, limit - len(newest)) if len(newest) < limit else b""
        return (older + newest).decode(errors="replace").replace("\r\n", "\n")

    async def dial(self, port: int, timeout_s: float) -> Stream:
        """Open a stream to a port of the guest. Raises AgentUnreachable, which tells how a machine ended."""
        try:
            stream = await dial.firecracker(self._socket(), port, timeout_s=timeout_s)
            stream.token = self.read_token()
            return stream
        except AgentUnreachable as error:
            how = self.how_it_ended()
            if not how:
                raise
            raise AgentUnreachable(f"nothing answers in {self.path}: {how}") from error

    def write_token(self, token: str) -> None:
        """Keep the secret that the guest demands, where its channel is open to other users of the host."""
        self.write_file(_TOKEN, token.encode())

    def read_token(self) -> str | None:
        return self.read_file(_TOKEN).decode(errors="replace") or None

    def _socket(self) -> Path:
        """Socket of the channel. A link of ours may lead to it; one of the machine's own is not followed."""
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
            if not vm.warden.is_alive():
                return True
            loop.add_reader(pidfd, ended.set)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), timeout_s)
            return ended.is_set()
        finally:
            loop.remove_reader(pidfd)
            os.close(pidfd)

    def ready_listener(self) -> socket.socket:
        """Listen for a guest that has come up."""
        name = self.ready.name
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with self.short() as folder:
            Path(folder, name).unlink(missing_ok=True)
            listener.bind(f"{folder}/{name}")
            os.chmod(f"{folder}/{name}", 0o666)  # whose uid will connect is not known yet; the folder keeps others out
        listener.listen()
        return listener

    @contextlib.contextmanager
    def short(self) -> Iterator[str]:
        """Short name of the folder: the address of a unix socket ends at 107 bytes."""
        fd = os.open(self.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{fd}"
        finally:
            os.close(fd)

    def remove_sockets(self, *, but: Path | None = None) -> None:
        with os.scandir(self.path) as entries:
            found = [entry for entry in entries if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)]
        for entry in found:
            if entry.path != str(but):
                Path(entry.path).unlink(missing_ok=True)

    def remove(self) -> None:
        folders.remove(self.path)


def is_its_own(file: os.stat_result) -> bool:
    """Whether what lies in a machine's folder may have been made there. A hypervisor that was taken over can put
    another name of a file of ours in the place of its own, where the kernel lets everybody make such names."""
    is_ours = file.st_uid == os.geteuid() and file.st_nlink == 1
    return stat.S_ISREG(file.st_mode) and (is_ours or uids.is_one(file.st_uid))


def _decode(data: bytes, kind: type[_Note]) -> _Note | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError):  # the machine may have made it
        return None


def take_file(source: Path, target: Path, mode: int, not_a_file: str) -> None:
    """Move a file that a machine has made, and keep it as ours. Raises ProviderError for anything but a file."""
    found = source.lstat() if os.path.lexists(source) else None
    if found is None or not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ProviderError(not_a_file)
    try:
        source.rename(target)
    except OSError:  # another filesystem
        sparse.copy(source, target)
        source.unlink()
    os.chown(target, os.geteuid(), os.getegid(), follow_symlinks=False)
    target.chmod(mode)


def write_note(path: Path, value: object) -> None:
    """Write a value as JSON into a folder of ours, whole or not at all."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(msgspec.json.encode(value))
    draft.replace(path)


def read_note(path: Path, kind: type[_Note]) -> _Note | None:
    """Value of a note; None if there is none, or half of one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        _log.warning("the note %s cannot be read: %s", path, error)
        return None


@contextlib.contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold a lock file of ours, which is made if there is none, for a few file operations."""
    fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "rb"):
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
