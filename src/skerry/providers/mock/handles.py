"""Open files of mock processes: pipes, files, devices."""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

from skerry.providers.mock.filesystem import FileSystem, Node, error

if TYPE_CHECKING:
    from skerry.providers.mock.kernel import Process

CHUNK = 1 << 16
_PIPE_BYTES = 1 << 16


class BrokenPipe(Exception):
    """Nobody reads what was written."""


class OpenFile:
    """Something that a file descriptor points to; it closes when the last descriptor does."""

    is_terminal = False
    size = (0, 0)
    """Rows and columns, of a terminal."""

    def __init__(self) -> None:
        self._references = 0

    def retain(self) -> OpenFile:
        self._references += 1
        return self

    def release(self) -> None:
        self._references -= 1
        if self._references <= 0:
            self.closed()

    def closed(self) -> None:
        """The last descriptor is gone."""

    async def read(self, process: Process | None, count: int) -> bytes:
        """At least one byte, or none at the end."""
        raise OSError(9, "Bad file descriptor")

    async def write(self, process: Process | None, data: bytes) -> None:
        raise OSError(9, "Bad file descriptor")


class Pipe:
    """Bytes from one process to another, a few at a time."""

    def __init__(self) -> None:
        from skerry.providers.mock.kernel import Bell

        self.buffer = bytearray()
        self.bell = Bell()
        self.has_reader = self.has_writer = True
        self.reader: OpenFile = _PipeReader(self)
        self.writer: OpenFile = _PipeWriter(self)


class _PipeReader(OpenFile):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    async def read(self, process: Process | None, count: int) -> bytes:
        pipe = self._pipe
        while not pipe.buffer and pipe.has_writer:
            await pipe.bell.wait(process)
        data = bytes(pipe.buffer[:count])
        del pipe.buffer[:count]
        pipe.bell.ring()
        return data

    def closed(self) -> None:
        self._pipe.has_reader = False
        self._pipe.bell.ring()


class _PipeWriter(OpenFile):
    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    async def write(self, process: Process | None, data: bytes) -> None:
        pipe = self._pipe
        while data:
            while pipe.has_reader and len(pipe.buffer) >= _PIPE_BYTES:
                await pipe.bell.wait(process)
            if not pipe.has_reader:
                raise BrokenPipe
            room = _PIPE_BYTES - len(pipe.buffer)
            pipe.buffer += data[:room]
            data = data[room:]
            pipe.bell.ring()

    def closed(self) -> None:
        self._pipe.has_writer = False
        self._pipe.bell.ring()


class RegularFile(OpenFile):
    def __init__(self, files: FileSystem, node: Node, path: bytes, *, append: bool = False) -> None:
        super().__init__()
        self._files = files
        self._node = node
        self._path = path
        self._append = append
        self._offset = 0

    async def read(self, process: Process | None, count: int) -> bytes:
        data = bytes(self._node.data[self._offset : self._offset + count])
        self._offset += len(data)
        return data

    async def write(self, process: Process | None, data: bytes) -> None:
        if self._append:
            self._offset = len(self._node.data)
        self._files.write(self._node, self._offset, data, self._path)
        self._offset += len(data)


class Null(OpenFile):
    async def read(self, process: Process | None, count: int) -> bytes:
        return b""

    async def write(self, process: Process | None, data: bytes) -> None:
        return None


class Zero(Null):
    async def read(self, process: Process | None, count: int) -> bytes:
        return bytes(min(count, CHUNK))


class Random(Null):
    """The same bytes in every run: tests must not depend on chance."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = itertools.count()

    async def read(self, process: Process | None, count: int) -> bytes:
        blocks = -(-min(count, CHUNK) // 64)
        data = b"".join(hashlib.sha512(b"%d" % next(self._blocks)).digest() for _ in range(blocks))
        return data[:count]


class Full(Zero):
    async def write(self, process: Process | None, data: bytes) -> None:
        raise error(28, b"/dev/full")


DEVICES: dict[bytes, type[OpenFile]] = {
    b"null": Null, b"zero": Zero, b"urandom": Random, b"random": Random, b"full": Full,
}  # fmt: skip


def open_file(process: Process, path: str, how: str) -> OpenFile:
    """Open as a shell does: `r` reads, `w` writes anew, `a` appends."""
    files, where = process.machine.files, process.path(path)
    node = files.open(where, "r" if how == "r" else "w", process.uid, create=how != "r")
    if node.is_device:
        if node.target in (b"stdin", b"stdout", b"stderr", b"tty"):
            return process.fds[{b"stdin": 0, b"stdout": 1, b"stderr": 2, b"tty": 0}[node.target]]
        return DEVICES[node.target]()
    if how == "w":
        files.truncate(node)
        files.changed(where)
    return RegularFile(files, node, where, append=how == "a")
