"""What is kept of a saved machine: its memory, the state of its devices, and a note by which both are checked."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec

from skerry.errors import Conflict, ProviderError

STATE = "state"
MEMORY = "memory"
_NOTE = "saved.json"
_END_BYTES = 1 << 20
_COPY_TIMEOUT_S = 300


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What must be the same for a machine to be restored."""

    version: str
    """Of QEMU: no other restores it for certain."""
    cpu: str
    shape: list[str]


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    about: About
    sizes: Mapping[str, int]
    """Of the drives, in bytes."""
    state_sha256: str
    memory_size: int
    memory_mtime_ns: int
    memory_ends_sha256: str
    """Of its first and last MiB: all of it would take longer than the restoring. Whoever changes the rest also changes
    the time, which only the file's owner can set back."""


def write(folder: Path, *, state: bytes, memory: Path, mode: int, about: About, sizes: Mapping[str, int]) -> None:
    """Take the memory's file over and note it all; without the note, which comes last, nothing was saved."""
    folder.chmod(0o700)  # clones get descriptors; nobody else comes near the memory, whatever its mode
    (folder / STATE).write_bytes(state)
    kept = folder / MEMORY
    _move(memory, kept)
    os.chown(kept, os.geteuid(), os.getegid())
    kept.chmod(mode)
    _sync(kept)
    status = kept.stat()
    note = Saved(
        about=about,
        sizes=sizes,
        state_sha256=hashlib.sha256(state).hexdigest(),
        memory_size=status.st_size,
        memory_mtime_ns=status.st_mtime_ns,
        memory_ends_sha256=_ends(kept),
    )
    draft = folder / f"{_NOTE}.new"
    draft.write_bytes(msgspec.json.encode(note))
    _sync(folder / STATE)
    draft.rename(folder / _NOTE)


def read(folder: Path, now: About) -> tuple[Saved, bytes]:
    """The note and the state. Conflict if this cannot be restored here, and why."""
    try:
        saved = msgspec.json.decode((folder / _NOTE).read_bytes(), type=Saved)
        state = (folder / STATE).read_bytes()
        memory = (folder / MEMORY).stat()
        ends = _ends(folder / MEMORY)
    except (OSError, msgspec.MsgspecError) as error:
        raise Conflict(f"there is no whole machine saved in {folder}: {error}") from error
    then = saved.about
    wrong = {
        f"it was saved by QEMU {then.version}, and this is {now.version}": then.version != now.version,
        f"it was saved on {then.cpu}, and this is {now.cpu}": then.cpu != now.cpu,
        f"it was another machine: {_difference(then.shape, now.shape)}": then.shape != now.shape,
        "its state is damaged": hashlib.sha256(state).hexdigest() != saved.state_sha256,
        "its memory has another size": memory.st_size != saved.memory_size,
        "its memory was changed": memory.st_mtime_ns != saved.memory_mtime_ns,
        "its memory is damaged": ends != saved.memory_ends_sha256,
    }
    for reason, applies in wrong.items():
        if applies:
            raise Conflict(f"the machine saved in {folder} cannot be restored: {reason}; save it anew")
    return saved, state


def _difference(then: list[str], now: list[str]) -> str:
    only_then, only_now = ([word for word in a if word not in b] for a, b in ((then, now), (now, then)))
    return f"then {' '.join(only_then) or 'in another order'}, now {' '.join(only_now) or 'in another order'}"


def _move(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_file():
        raise ProviderError(f"{source} is not the memory of a machine")
    try:
        source.rename(target)
    except OSError:  # another filesystem
        cp = shutil.which("cp") or "cp"
        subprocess.run([cp, "--sparse=always", "--", source, target], check=True, timeout=_COPY_TIMEOUT_S)
        source.unlink()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _ends(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(-min(_END_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
