"""Snapshot of a machine: its memory, the state of its devices, and a note by which both are checked."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from skerry.errors import Conflict
from skerry.host import sparse
from skerry.vm.folder import take_file, write_note

STATE = "state"
MEMORY = "memory"
_NOTE = "saved.json"
_END_BYTES = 1 << 20


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that must be the same for a machine to be restored."""

    version: str
    """Version of QEMU: no other restores it for certain."""
    cpu: str
    shape: list[str]


class SnapshotNote(msgspec.Struct, frozen=True, kw_only=True):
    """Note of a saved machine, in `saved.json`."""

    about: About
    sizes: Mapping[str, int]
    """Sizes of the drives, in bytes."""
    state_sha256: str
    memory_size: int
    memory_mtime_ns: int
    memory_ends_sha256: str
    """Digest of its first and last MiB, as all of it takes longer than the restore; the time tells of the rest."""


def write(
    folder: Path,
    *,
    state: bytes,
    memory: Path,
    mode: int,
    about: About,
    sizes: Mapping[str, int],
    lasting: bool = True,
) -> None:
    """Keep state, memory, which is moved, and then the note: without it nothing was saved. Unless it is to be `lasting`
    the caller sees to what outlives the host's end. Raises ProviderError."""
    folder.chmod(0o700)  # clones get descriptors; nobody else comes near the memory, whatever its mode
    (folder / STATE).write_bytes(state)
    kept = folder / MEMORY
    take_file(memory, kept, 0o600, f"{memory} is not the memory of a machine")
    if lasting:
        sparse.punch(kept)  # pages that were used once and given back
    kept.chmod(mode)
    if lasting:
        _sync(kept)
    status = kept.stat()
    note = SnapshotNote(
        about=about,
        sizes=sizes,
        state_sha256=hashlib.sha256(state).hexdigest(),
        memory_size=status.st_size,
        memory_mtime_ns=status.st_mtime_ns,
        memory_ends_sha256=_ends(kept),
    )
    if lasting:
        _sync(folder / STATE)
    write_note(folder / _NOTE, note)


def read(folder: Path, now: About) -> tuple[SnapshotNote, bytes]:
    """Note and state of a saved machine. Raises Conflict if it cannot be restored here, and says why."""
    try:
        saved = msgspec.json.decode((folder / _NOTE).read_bytes(), type=SnapshotNote)
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


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _ends(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(-min(_END_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
