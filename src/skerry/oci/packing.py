"""Tars as streams: made piece by piece in a thread, from files that may change meanwhile."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import contextmanager
from threading import Event
from typing import BinaryIO, TypeVar

from skerry.errors import InvalidSpec

T = TypeVar("T")

PIECE = 1 << 20
END = bytes(2 * tarfile.BLOCKSIZE)
"""End of a tar."""


def length(info: tarfile.TarInfo) -> int:
    """Bytes of an entry, with its header."""
    return len(_header(info)) + (-(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE if info.isreg() else 0)


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def entry(info: tarfile.TarInfo, content: BinaryIO | None = None) -> Iterator[bytes]:
    """Pack an entry, or its header alone. Raises InvalidSpec for a content that is shorter than its header says."""
    yield _header(info)
    if content is None or not info.isreg():
        return
    left = info.size
    while left:
        piece = content.read(min(left, PIECE))
        if not piece:
            raise InvalidSpec(f"{info.name} became shorter while it was read; try again when nothing writes to it")
        left -= len(piece)
        yield piece
    yield bytes(-info.size % tarfile.BLOCKSIZE)


def text_entry(name: str, text: bytes) -> Iterator[bytes]:
    """Pack a small file of ours."""
    info = tarfile.TarInfo(name)
    info.size = len(text)
    yield from entry(info, io.BytesIO(text))


def describe(name: str, found: os.stat_result, path: str) -> tarfile.TarInfo:
    """Make the header of a file, folder, link or FIFO."""
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(found.st_mode)
    info.mtime = int(found.st_mtime)
    info.uid, info.gid = found.st_uid, found.st_gid
    if stat.S_ISDIR(found.st_mode):
        info.type = tarfile.DIRTYPE
    elif stat.S_ISLNK(found.st_mode):
        info.type = tarfile.SYMTYPE
        info.linkname = os.readlink(path)
    elif stat.S_ISFIFO(found.st_mode):
        info.type = tarfile.FIFOTYPE
    else:
        info.size = found.st_size
    return info


def open_regular(path: str) -> BinaryIO:
    """Open a file to read: no link is followed, and a FIFO put in its place does not hold us up. Raises InvalidSpec."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise InvalidSpec(f"{path} is not a file any more; try again when nothing writes to it")
    return os.fdopen(fd, "rb", buffering=0)


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Raise InvalidSpec for what cannot be read: it is the caller's to mend, not the engine's."""
    try:
        yield
    except (OSError, EOFError, tarfile.TarError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        name = error.filename if isinstance(error, OSError) and error.filename else path
        raise InvalidSpec(f"{os.fsdecode(name) if isinstance(name, bytes) else name}: {reason}") from error


async def in_thread(work: Callable[[Event], T]) -> T:
    """Run work in a thread and wait for its end even if cancelled; its event tells it to stop."""
    stop = Event()
    working = asyncio.get_running_loop().run_in_executor(None, work, stop)
    try:
        await asyncio.wait([working])
        return working.result()
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([working])
        working.exception()
        raise


async def from_thread(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Make the pieces in a thread, since disks are slow; many small ones come as one."""
    loop = asyncio.get_running_loop()
    joined = _joined(pieces)
    making: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            making = loop.run_in_executor(None, next, joined, None)
            await asyncio.wait([making])
            piece = making.result()
            if piece is None:
                return
            yield piece
    finally:
        if making is not None and not making.done():
            await asyncio.wait([making])
            making.exception()
        joined.close()


def _joined(pieces: Iterator[bytes]) -> Generator[bytes, None, None]:
    kept: list[bytes] = []
    size = 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size >= PIECE:
            yield b"".join(kept)
            kept, size = [], 0
    yield b"".join(kept)
