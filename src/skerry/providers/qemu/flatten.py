"""One disk of an overlay and what is below it. A hypervisor that a guest has taken over may have written the overlay:
nothing that it says leads anywhere but into its own file."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from skerry.errors import ProviderError
from skerry.vm import sparse

_HEADER = struct.Struct(">4sIQIIQIIQ")
_FEATURES = struct.Struct(">Q")
_FEATURES_AT = 72
_HARMLESS = 0b11
"""Features that change nothing of what is read here: the marks of a file that was not closed."""
_MAGIC, _VERSION = b"QFI\xfb", 3
_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_ENTRIES = _CLUSTER // 8
_OFFSET = 0x00FFFFFFFFFFFE00
_COMPRESSED = 1 << 62
_ZERO = 1
_MAX_SIZE = 1 << 44


def flatten(overlay: Path, base: Path, target: Path) -> None:
    """Write to `target`, which must not be there yet, what a guest sees on the overlay; `base` is below it."""
    sparse.copy(base, target)
    source = os.open(overlay, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with open(target, "r+b", buffering=0) as file:
            _apply(source, file.fileno())
    finally:
        os.close(source)


def _apply(source: int, target: int) -> None:
    size, tables = _read_header(source)
    os.truncate(target, size)
    for number, table in enumerate(tables):
        for index, (entry,) in enumerate(struct.iter_unpack(">Q", _read(source, table, _CLUSTER) if table else b"")):
            at = (number * _ENTRIES + index) << _CLUSTER_BITS
            count = min(_CLUSTER, size - at)
            if entry and count > 0:
                _write(target, at, _cluster(source, entry, count))


def _read_header(source: int) -> tuple[int, Iterator[int]]:
    """The size of the disk, and where its tables are."""
    magic, version, _, _, bits, size, encrypted, entries, l1_at = _HEADER.unpack(_read(source, 0, _HEADER.size))
    (features,) = _FEATURES.unpack(_read(source, _FEATURES_AT, _FEATURES.size))
    is_ours = (magic, version, bits, encrypted) == (_MAGIC, _VERSION, _CLUSTER_BITS, 0) and not features & ~_HARMLESS
    if not is_ours or size > _MAX_SIZE or entries > -(-size // (_ENTRIES * _CLUSTER)):
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
    """What the file ends before reads as nothing, as a hole would."""
    return os.pread(source, count, at).ljust(count, b"\0")


def _write(target: int, at: int, data: bytes) -> None:
    """Nothing is written where nothing is, on either side."""
    if data.count(0) != len(data) or os.pread(target, len(data), at).count(0) != len(data):
        os.pwrite(target, data, at)
