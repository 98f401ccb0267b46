"""Snapshot note: facts of a machine beside Firecracker's own two files, so that only what can be restored is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path

import msgspec

from skerry.errors import Conflict, ProviderError
from skerry.host import sparse
from skerry.vm.base import Machine
from skerry.vm.folder import VmFolder, take_file
from skerry.vm.templates import processor

MEMORY = "memory"
STATE = "state"
NEW_MEMORY, NEW_STATE = f"new-{MEMORY}", f"new-{STATE}"
"""Files that a machine writes. A clone has its template's under the other names, and must not write to them."""
_NOTE = "firecracker.json"
_MIB = 1 << 20
_MAX_STATE = 64 * _MIB


class MachineNote(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a machine, in its folder; with a saved one also those that it needs to go on."""

    version: str
    memory_mib: int
    vcpus: int
    drives: dict[str, int]
    """Size of each, in order."""
    home: str
    """Folder of its process, in that of the machine. It is noted here, for the process could lead us astray."""
    processor: str = ""
    state: str = ""
    """Checksum of the state's file."""

    @classmethod
    def of(cls, machine: Machine, folder: Path, version: str, home: str) -> MachineNote:
        sizes = {drive.name: os.stat(folder / drive.path).st_size for drive in machine.drives}
        return cls(version=version, memory_mib=machine.memory_mib, vcpus=machine.vcpus, drives=sizes, home=home)

    def write(self, folder: Path) -> None:
        VmFolder(folder).write_file(_NOTE, msgspec.json.encode(self))

    @classmethod
    def read(cls, folder: Path) -> MachineNote:
        try:
            return msgspec.json.decode((folder / _NOTE).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise Conflict(f"{folder} holds no machine of Firecracker's that can be used: {error}") from error


def keep(note: MachineNote, source: Path, into: Path, *, copied: bool = False) -> None:
    """Move Firecracker's files from `source`, once its process has ended; those of one that goes on are copied. Raises
    ProviderError."""
    _take(source / NEW_STATE, into / STATE, _MAX_STATE)
    _take(source / NEW_MEMORY, into / MEMORY, note.memory_mib * _MIB)
    if copied:
        for path in (into / STATE, into / MEMORY):
            _copy_in_place(path)
    (into / MEMORY).chmod(0o600)
    sparse.punch(into / MEMORY)  # Firecracker has written all of it
    (into / MEMORY).chmod(0o444)
    msgspec.structs.replace(note, processor=_host(), state=_checksum(into / STATE)).write(into)


def check(saved: Path, machine: Machine, version: str) -> MachineNote:
    """Note of a saved machine. Raises Conflict if it cannot be restored as `machine`: a try would end the process."""
    note = MachineNote.read(saved)
    if note.version != version:
        raise Conflict(f"{saved} was saved by Firecracker {note.version}, and this is {version}; make it anew")
    if note.processor != _host():
        raise Conflict(f"{saved} was saved on another processor or host kernel; make it anew")
    drives = [drive.name for drive in machine.drives]
    if (note.memory_mib, note.vcpus, [*note.drives]) != (machine.memory_mib, machine.vcpus, drives):
        raise Conflict(f"{saved} holds a machine of another size or with other drives")
    with contextlib.suppress(OSError):
        if _checksum(saved / STATE) == note.state and (saved / MEMORY).stat().st_size == note.memory_mib * _MIB:
            return note
    raise Conflict(f"{saved} is damaged; make it anew")


def _take(source: Path, target: Path, most: int) -> None:
    """Move a file after a look at it: the process that made it is not trusted. Raises ProviderError."""
    if (size := source.lstat().st_size) > most:
        raise ProviderError(f"Firecracker left {size} bytes at {source}, more than a machine has")
    take_file(source, target, 0o444, f"Firecracker left no file of its own at {source}")


def _copy_in_place(path: Path) -> None:
    """Put a copy of a file of ours in its own place, as somebody may have the file open."""
    before = path.rename(path.with_name(f".{path.name}"))
    sparse.copy(before, path)
    path.chmod(0o444)
    before.unlink()


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _host() -> str:
    """Digest of the host as a guest saw it, and must find it again."""
    return hashlib.sha256(f"{platform.release()}\n{processor()}".encode()).hexdigest()
