"""What is kept of a machine beside Firecracker's own two files, so that nobody restores what cannot be restored."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
from pathlib import Path

import msgspec

from skerry.errors import Conflict, ProviderError
from skerry.vm import sparse
from skerry.vm.base import Machine

MEMORY = "memory"
STATE = "state"
NEW_MEMORY, NEW_STATE = f"new-{MEMORY}", f"new-{STATE}"
"""What a machine writes. A clone has what it was made of under the other names, and must not write to that."""
_NOTE = "firecracker.json"
_MIB = 1 << 20
_MAX_STATE = 64 * _MIB


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """In the folder of a machine: what it was made of. With what was saved: the same, and what it needs to go on."""

    version: str
    memory_mib: int
    vcpus: int
    drives: dict[str, int]
    """The size of each, in order."""
    home: str
    """The folder of its process, in that of the machine. It is noted here, for the process could lead us astray."""
    processor: str = ""
    state: str = ""
    """The checksum of the state's file."""

    @classmethod
    def of(cls, machine: Machine, folder: Path, version: str, home: str) -> Note:
        sizes = {drive.name: os.stat(folder / drive.path).st_size for drive in machine.drives}
        return cls(version=version, memory_mib=machine.memory_mib, vcpus=machine.vcpus, drives=sizes, home=home)

    def write(self, folder: Path) -> None:
        draft = folder / f"{_NOTE}.new"
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(msgspec.json.encode(self))
        draft.rename(folder / _NOTE)

    @classmethod
    def read(cls, folder: Path) -> Note:
        try:
            return msgspec.json.decode((folder / _NOTE).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise Conflict(f"{folder} holds no machine of Firecracker's that can be used: {error}") from error


def keep(note: Note, source: Path, into: Path) -> None:
    """Take what Firecracker wrote in `source`, once the process that wrote it has ended."""
    _take(source / NEW_STATE, into / STATE, _MAX_STATE)
    _take(source / NEW_MEMORY, into / MEMORY, note.memory_mib * _MIB)
    kept = msgspec.structs.replace(note, processor=_processor(), state=_checksum(into / STATE))
    kept.write(into)


def check(saved: Path, machine: Machine, version: str) -> Note:
    """Raises Conflict for what cannot be restored here as such a machine; a wrong guess would end the process."""
    note = Note.read(saved)
    if note.version != version:
        raise Conflict(f"{saved} was saved by Firecracker {note.version}, and this is {version}; make it anew")
    if note.processor != _processor():
        raise Conflict(f"{saved} was saved on another processor or host kernel; make it anew")
    if (note.memory_mib, note.vcpus, [*note.drives]) != (
        *(machine.memory_mib, machine.vcpus),
        [drive.name for drive in machine.drives],
    ):
        raise Conflict(f"{saved} holds a machine of another size or with other drives")
    try:
        is_whole = _checksum(saved / STATE) == note.state
        is_whole = is_whole and (saved / MEMORY).stat().st_size == note.memory_mib * _MIB
    except OSError:
        is_whole = False
    if not is_whole:
        raise Conflict(f"{saved} is damaged; make it anew")
    return note


def _take(source: Path, target: Path, most: int) -> None:
    """What it was is looked at first: the process that made it is not trusted. It may be another's file, too."""
    found = source.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        raise ProviderError(f"Firecracker left no file of its own at {source}")
    if found.st_size > most:
        raise ProviderError(f"Firecracker left {found.st_size} bytes at {source}, more than a machine has")
    try:
        source.rename(target)
    except OSError:
        sparse.copy(source, target)
        source.unlink()
    if os.geteuid() == 0:
        os.chown(target, 0, 0, follow_symlinks=False)
    target.chmod(0o444)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _processor() -> str:
    """What a guest saw of the host, and must find again."""
    lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    seen = [line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))]
    return hashlib.sha256("\n".join([platform.release(), *seen]).encode()).hexdigest()
