"""The little of the qcow2 format that is needed: an empty overlay is a header and three tables, which is written faster
than a tool is started."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from skerry.errors import ProviderError

_MAGIC = b"QFI\xfb"
_HEADER = struct.Struct(">4sIQIIQIIQQIIQQQQII")
_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_L1_COVERS = _CLUSTER * _CLUSTER // 8
_BACKING_FORMAT = 0xE2792ACA
_REFCOUNT_ORDER = 4
_MAX_DEPTH = 16
_MAX_NAME = 1023
SUFFIX = ".qcow2"


class Layer(NamedTuple):
    """One of the files that a disk consists of. Its format is told by its name, never by its content: that is a
    guest's, and a header there could name any file of the host."""

    path: Path

    @property
    def is_overlay(self) -> bool:
        return self.path.suffix == SUFFIX


def create(path: Path, base: Layer, size: int) -> None:
    """An overlay that begins as `base`."""
    name = os.fsencode(base.path.absolute())
    kind = b"qcow2" if base.is_overlay else b"raw"
    extension = struct.pack(">II8s", _BACKING_FORMAT, len(kind), kind)
    end_of_extensions = bytes(8)
    name_offset = _HEADER.size + len(extension) + len(end_of_extensions)
    l1_entries = -(-size // _L1_COVERS)
    clusters = 3 + max(1, -(-l1_entries * 8 // _CLUSTER))
    header = _HEADER.pack(
        _MAGIC, 3, name_offset, len(name), _CLUSTER_BITS, size, 0, l1_entries, 3 * _CLUSTER, _CLUSTER, 1, 0, 0,
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
    """Its size as a guest sees it, and what is below it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or header[:4] != _MAGIC:
            raise ProviderError(f"{path} is not a qcow2 disk")
        _, _, offset, length, _, size = _HEADER.unpack(header)[:6]
        file.seek(offset)
        return size, path.parent / os.fsdecode(file.read(min(length, _MAX_NAME)))


def layers(disk: Layer) -> tuple[Layer, ...]:
    """A disk and all that is below it."""
    found = [disk]
    while found[-1].is_overlay:
        if len(found) > _MAX_DEPTH:
            raise ProviderError(f"the disk {disk.path} has more than {_MAX_DEPTH} layers")
        found.append(Layer(read(found[-1].path)[1]))
    return tuple(found)


def size_of(disk: Layer) -> int:
    return read(disk.path)[0] if disk.is_overlay else os.stat(disk.path).st_size
