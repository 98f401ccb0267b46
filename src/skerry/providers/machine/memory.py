"""Memory of a box in files, while it sleeps and in snapshots: kept whole, and used only as it was kept."""

from __future__ import annotations

import asyncio
import os
import time
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import Conflict, InvalidSpec
from skerry.host import folders, sparse
from skerry.model.spec import SandboxId
from skerry.vm.base import Drive, Hypervisor, Machine, MachineLimits
from skerry.vm.folder import VmFolder, write_note
from skerry.vm.guest import Preparation

_ABOUT = "kept.json"
_CHUNK = 1 << 16
_ZEROS = bytes(_CHUNK)
_MACHINE = ("memory_mib", "vcpus", "network")
_FREE = frozenset({"lifetime_s", "idle_s", "mount_data", "token_digest"})
"""Facts of a preparation that can be changed later, or are no wish of the box's."""


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a machine as it was started, without which its memory is of no use."""

    machine: Machine
    limits: MachineLimits
    prepared: Preparation
    disk: int
    """Size of its own disk that was asked for."""

    def refuse_others(self, asked: Started) -> None:
        """Raise InvalidSpec for a box that asks for something else than what runs in this machine was given."""
        then, now = (
            {**_told(each.machine, _MACHINE), **_told(each.prepared), "disk": each.disk} for each in (self, asked)
        )
        for field in then:
            if field not in _FREE and then[field] != now[field]:
                name = {"memory_mib": "memory", "vcpus": "cpus"}.get(field, field)
                reason = "what runs in the snapshot goes on with what it was given; ask for the same"
                raise InvalidSpec(f"{name}: {reason}", field=name)

    def with_drives(self, *own: Drive) -> Machine:
        """The machine, with other drives of its own: those that it only reads lie where they lay, as it has parts of
        them in its memory."""
        shared = tuple(drive for drive in self.machine.drives if drive.read_only)
        return msgspec.structs.replace(self.machine, drives=(*shared, *own), cid=None)


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """Note of a memory, beside its files."""

    box: SandboxId
    at: float
    started: Started
    files: dict[str, tuple[int, int]]
    """Size and checksum of each: it finds damage, and keeps nobody out who can write here."""


def _told(value: object, fields: Collection[str] | None = None) -> dict[str, Any]:
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(value, enc_hook=str))
    return told if fields is None else {field: told[field] for field in fields}


async def keep(
    hypervisor: Hypervisor, vm: VmFolder, into: Path, box: SandboxId, started: Started, *, lasting: bool = False
) -> None:
    """Keep the memory of a machine, which is frozen then, in an empty folder; the note comes last. One that is to be
    `lasting` outlives the host's end from then on."""
    await hypervisor.copy_memory(vm, into)
    files = await asyncio.to_thread(_files, into)
    write(into / _ABOUT, Kept(box=box, at=time.time(), started=started, files=files))
    for path in [*into.iterdir(), into] if lasting else []:
        await asyncio.to_thread(folders.sync, path)


def read(folder: Path, box: SandboxId | None = None) -> Kept:
    """Note of a memory. Raises Conflict if there is none, or it is another's."""
    try:
        kept: Kept = _decode((folder / _ABOUT).read_bytes(), Kept)
    except (OSError, msgspec.MsgspecError) as error:
        raise Conflict(f"there is no whole memory in {folder}: {error}") from error
    if box not in (None, kept.box):
        raise Conflict(f"the memory in {folder} is that of another box, {kept.box}")
    gone = [drive.path for drive in kept.started.machine.drives if drive.read_only and not os.path.exists(drive.path)]
    if gone:
        raise Conflict(f"the memory in {folder} is of a machine with the drive {gone[0]}, which is gone")
    return kept


async def bring_back(
    hypervisor: Hypervisor, vm: VmFolder, machine: Machine, limits: MachineLimits, folder: Path
) -> None:
    """Start a machine with a memory, frozen, once that was found to be what was kept. Raises Conflict if it cannot be
    used; the caller kills what was begun."""
    kept = read(folder)
    checking = asyncio.ensure_future(_check(folder, kept))
    try:
        await hypervisor.restore(vm, machine, folder, limits, frozen=True)
    finally:
        await asyncio.wait([checking])
        damage = checking.exception()
    if damage is not None:
        raise damage


async def _check(folder: Path, kept: Kept) -> None:
    try:
        found = await asyncio.to_thread(_files, folder)
    except OSError as error:
        raise Conflict(f"the memory in {folder} cannot be read: {error}") from error
    if wrong := sorted(name for name in found.keys() | kept.files.keys() if found.get(name) != kept.files.get(name)):
        raise Conflict(f"the memory in {folder} is damaged: {', '.join(wrong)} is not what was put there")


def link(folder: Path, into: Path) -> None:
    """Give a memory, of which nothing ever changes, a second place."""
    for path in sorted(folder.iterdir(), key=lambda path: path.name == _ABOUT):
        os.link(path, into / path.name)


def write(path: Path, value: object) -> None:
    """Write a note that has paths in it."""
    write_note(path, msgspec.to_builtins(value, enc_hook=str))


def read_started(path: Path) -> Started | None:
    try:
        started: Started = _decode(path.read_bytes(), Started)
    except (OSError, msgspec.MsgspecError):
        return None
    return started


def _decode(data: bytes, kind: type) -> Any:
    return msgspec.json.decode(data, type=kind, dec_hook=lambda kind, value: kind(value))


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    return {path.name: _sum(path) for path in sorted(folder.iterdir()) if path.name != _ABOUT}


def _sum(path: Path) -> tuple[int, int]:
    """Size and checksum of a file; what is all zeros is passed over, be it a hole or not."""
    found, last = 0, -1
    with open(path, "rb", buffering=0) as file:
        for start, end in sparse.extents(file.fileno()):
            for at in range(start - start % _CHUNK, end, _CHUNK):
                if at <= last:
                    continue
                last = at
                data = os.pread(file.fileno(), _CHUNK, at)
                if data != _ZEROS[: len(data)]:
                    found = zlib.crc32(data, zlib.crc32(at.to_bytes(8, "little"), found))
        return os.fstat(file.fileno()).st_size, found
