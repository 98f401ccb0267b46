"""Sparse files: copies without the holes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

_FICLONE = 0x40049409
_CHUNK = 1 << 20


def copy(source: Path, target: Path) -> None:
    """Copy a file: its blocks are shared where that can be, else its holes are kept. Raises FileExistsError."""
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(source, "rb", buffering=0) as old, open(fd, "wb", buffering=0) as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError:
            new.truncate(os.fstat(old.fileno()).st_size)
            for start, end in extents(old.fileno()):
                # a file that became shorter meanwhile has nothing to read
                while start < end and (data := os.pread(old.fileno(), min(end - start, _CHUNK), start)):
                    start += os.pwrite(new.fileno(), data, start)


def extents(fd: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that are no holes, as start and end."""
    at = 0
    while True:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # nothing but a hole is left
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at
