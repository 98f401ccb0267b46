"""Sparse files: copies without the holes, and holes in place of zeros."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger("skerry.host")

_FICLONE = 0x40049409
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_CHUNK = 1 << 20
_BLOCK = 4096
_ZEROS = bytes(_CHUNK)


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


def punch(path: Path) -> None:
    """Make holes of a file's blocks that are all zeros; it stays as it is where the file system has none."""
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC), "r+b", buffering=0) as file:
        for start, end in [*extents(file.fileno())]:
            for at, length in _zeros(file.fileno(), start - start % _BLOCK, end):
                if _fallocate(file.fileno(), _KEEP_SIZE | _PUNCH_HOLE, at, length):
                    _log.debug("no hole in %s: %s", path, os.strerror(ctypes.get_errno()))
                    return


def _zeros(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield runs of whole blocks that are zeros, as place and length; a run ends with each chunk."""
    for at in range(start, end, _CHUNK):
        data = os.pread(fd, min(_CHUNK, end - at), at)
        if data == _ZEROS[: len(data)]:
            yield at, len(data)
            continue
        begun = None
        for offset in range(0, len(data), _BLOCK):
            is_zero = data[offset : offset + _BLOCK] == _ZEROS[:_BLOCK]
            if is_zero and begun is None:
                begun = offset
            elif not is_zero and begun is not None:
                yield at + begun, offset - begun
                begun = None
        if begun is not None:
            yield at + begun, len(data) - begun


def _fallocate(fd: int, mode: int, at: int, length: int) -> int:
    call = ctypes.CDLL(None, use_errno=True).fallocate
    return int(call(fd, mode, ctypes.c_longlong(at), ctypes.c_longlong(length)))


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
