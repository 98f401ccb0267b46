"""Overlays in the qcow2 format: make an empty one, faster than by a tool, read its header, flatten it."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from skerry.errors import ProviderError
from skerry.host import sparse

_MAGIC, _VERSION = b"QFI\xfb", 3
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_L1_COVERS = _CLUSTER * _CLUSTER // 8
_BACKING_FORMAT = 0xE2792ACA
_REFCOUNT_ORDER = 4
_MAX_DEPTH = 16
_MAX_NAME = 1023
_FEATURES = struct.Struct(">Q")
_FEATURES_AT = 72
_HARMLESS = 0b11
"""Features that change nothing of what is read here: the marks of a file that was not closed."""
_ENTRIES = _CLUSTER // 8
_OFFSET = 0x00FFFFFFFFFFFE00
_COMPRESSED = 1 << 62
_ZERO = 1
SUFFIX = ".qcow2"


def is_overlay(layer: Path) -> bool:
    """Whether a file of a disk is one by its name, not by its content: that is a guest's, and could name any file."""
    return layer.suffix == SUFFIX


def create(path: Path, base: Path, size: int) -> None:
    """Make an overlay that begins as `base`."""
    name = os.fsencode(base.absolute())
    kind = b"qcow2" if is_overlay(base) else b"raw"
    extension = struct.pack(">II8s", _BACKING_FORMAT, len(kind), kind)
    end_of_extensions = bytes(8)
    name_offset = _HEADER.size + len(extension) + len(end_of_extensions)
    l1_entries = -(-size // _L1_COVERS)
    clusters = 3 + max(1, -(-l1_entries * 8 // _CLUSTER))
    header = _HEADER.pack(
        _MAGIC, _VERSION, name_offset, len(name), _CLUSTER_BITS, size, 0, l1_entries, 3 * _CLUSTER, _CLUSTER, 1, 0, 0,
        0, 0, 0, _REFCOUNT_ORDER, _HEADER.size,
    )  # fmt: skip
    with open(path, "xb") as file:
        file.write(header + extension + end_of_extensions + name)
        file.seek(_CLUSTER)
        file.write(struct.pack(">Q", 2 * _CLUSTER))
        file.seek(2 * _CLUSTER)
        file.write(struct.pack(f">{clusters}H", *[1] * clusters))
        file.truncate(clusters * _CLUSTER)


def read(path: Path) -> tuple[int, Path]:
    """Size of an overlay as a guest sees it, and the path below it. Raises ProviderError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or header[:4] != _MAGIC:
            raise ProviderError(f"{path} is not a qcow2 disk")
        _, _, offset, length, _, size = _HEADER.unpack(header)[:6]
        file.seek(offset)
        return size, path.parent / os.fsdecode(file.read(min(length, _MAX_NAME)))


def layers(disk: Path) -> list[Path]:
    """Files of a disk, from the uppermost down. Raises ProviderError if there are too many."""
    found = [disk]
    while is_overlay(found[-1]):
        if len(found) > _MAX_DEPTH:
            raise ProviderError(f"the disk {disk} has more than {_MAX_DEPTH} layers")
        found.append(read(found[-1])[1])
    return found


def size_of(disk: Path) -> int:
    return read(disk)[0] if is_overlay(disk) else os.stat(disk).st_size


def flatten(overlay: Path, base: Path, target: Path, max_size: int) -> None:
    """Write the overlay as a guest sees it, with `base` below, to `target`, which must not be there yet. A hypervisor
    that a guest has taken over may have written the overlay: nothing in it leads anywhere but into its own file. Raises
    ProviderError unless it is as it was made, and no larger than `max_size` or the base."""
    sparse.copy(base, target)
    source = os.open(overlay, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with open(target, "r+b", buffering=0) as file:
            _apply(source, file.fileno(), max(max_size, os.stat(base).st_size))
    finally:
        os.close(source)


def _apply(source: int, target: int, max_size: int) -> None:
    size, tables = _read_tables(source, max_size)
    os.truncate(target, size)
    for number, table in enumerate(tables):
        for index, (entry,) in enumerate(struct.iter_unpack(">Q", _read(source, table, _CLUSTER) if table else b"")):
            at = (number * _ENTRIES + index) << _CLUSTER_BITS
            count = min(_CLUSTER, size - at)
            if entry and count > 0:
                _write(target, at, _cluster(source, entry, count))


def _read_tables(source: int, max_size: int) -> tuple[int, Iterator[int]]:
    """Size of the disk, and the places of its tables. Raises ProviderError."""
    magic, version, _, _, bits, size, encrypted, entries, l1_at = _HEADER.unpack(_read(source, 0, _HEADER.size))[:9]
    (features,) = _FEATURES.unpack(_read(source, _FEATURES_AT, _FEATURES.size))
    is_ours = (magic, version, bits, encrypted) == (_MAGIC, _VERSION, _CLUSTER_BITS, 0) and not features & ~_HARMLESS
    if not is_ours or size > max_size or entries > -(-size // (_L1_COVERS)):
        raise ProviderError("the box's disk is not as it was made: it cannot be read")
    table = _read(source, l1_at, 8 * entries)
    return size, (entry & _OFFSET for (entry,) in struct.iter_unpack(">Q", table))


def _cluster(source: int, entry: int, count: int) -> bytes:
    if entry & _COMPRESSED:
        raise ProviderError("the box's disk is not as it was made: it is compressed")
    if entry & _ZERO:
        return bytes(count)
    return _read(source, entry & _OFFSET, count)


def _read(source: int, at: int, count: int) -> bytes:
    """Read bytes; those beyond the end of the file are zero, as in a hole."""
    return os.pread(source, count, at).ljust(count, b"\0")


def _write(target: int, at: int, data: bytes) -> None:
    """Write data, but no zeros where there are zeros."""
    if data.count(0) != len(data) or os.pread(target, len(data), at).count(0) != len(data):
        os.pwrite(target, data, at)
