"""Memory of a machine in the stream of its migration: its pages go to a sparse file, all else is the state of its
devices, as it is of a machine whose memory is a file already."""

from __future__ import annotations

import os
import re
from struct import Struct

from skerry.errors import ProviderError

BLOCK = b"ram"
"""Name of the guest's memory, as the command line has it."""
_PAGE = 4096
_RAM_BEGINS = re.compile(rb"\x01(.{4})\x03ram\x00{4}\x00\x00\x00.", re.DOTALL)
"""Begin of the section of all memory, with its number; before it come a few words of the machine's configuration."""
_SECTION, _END = 2, 3
_FOOTER = 0x7E
_ZERO, _SIZES, _DATA, _OVER, _SAME_BLOCK = 0x02, 0x04, 0x08, 0x10, 0x20
_FLAGS = _PAGE - 1
_LONG = Struct(">Q")
_FOOTER_BYTES = 5
_MAX_NAME = 256
_MAX_RUN = 256
_BEFORE_RAM = 1 << 16
_MAX_STATE = 256 << 20


class _Short(Exception):
    """There is more to come."""


class MemoryReader:
    """Takes a stream apart as it comes. QEMU is not trusted: it writes within the memory's size, or is refused."""

    def __init__(self, fd: int, size: int) -> None:
        """`fd` is of an empty file, which gets the size of the memory."""
        os.ftruncate(fd, size)
        self.state = bytearray()
        self._fd = fd
        self._size = size
        self._in = b""
        self._section: bytes | None = None
        self._in_section = False
        self._is_over = False
        self._is_memory = False
        self._written = bytearray(size // _PAGE)
        self._run: list[memoryview] = []
        self._run_at = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes. Raises ProviderError for what no QEMU sends, and OSError."""
        self._in += data
        at = 0
        try:
            while not self._is_over and at < len(self._in):
                at = self._record(at) if self._in_section else self._between(at)
        except _Short:
            pass
        if self._is_over:
            self.state += self._in[at:]
            at = len(self._in)
        self._flush()
        self._in = self._in[at:]
        if len(self.state) > _MAX_STATE or len(self._in) > _BEFORE_RAM + len(data):
            raise ProviderError("the state of the machine has no end")

    def finish(self) -> bytes:
        """State of the devices, once all has come. Raises ProviderError if there was no memory in it."""
        if not self._is_over:
            raise ProviderError("the machine's memory did not come to its end")
        return bytes(self.state)

    def _between(self, at: int) -> int:
        """Read the begin of a section of memory."""
        if self._section is None:
            found = _RAM_BEGINS.search(self._in, at)
            if found is None:
                raise _Short
            self._section = found[1]
            end = found.end()
        else:
            end = at + _FOOTER_BYTES
            kind, number = self._in[at], self._take(at + 1, end)
            if kind not in (_SECTION, _END) or number != self._section:
                raise ProviderError("the machine's memory is not as QEMU sends it")
            self._is_last = kind == _END
        self.state += self._in[at:end]
        self._in_section = True
        return end

    _is_last = False

    def _record(self, start: int) -> int:
        """Read what is told of one page, or of all; returns where the next begins."""
        at = start + _LONG.size
        if at > len(self._in):
            raise _Short
        (word,) = _LONG.unpack_from(self._in, start)
        flags, address = word & _FLAGS, word & ~_FLAGS
        if flags & (_ZERO | _DATA):
            return self._page(start, at, flags, address)
        if flags == _SIZES:
            at = self._sizes(at, address)
        elif flags == _OVER:
            if self._take(at, at + _FOOTER_BYTES) != bytes([_FOOTER]) + (self._section or b""):
                raise ProviderError("the machine's memory is not as QEMU sends it")
            at += _FOOTER_BYTES
            self._in_section, self._is_over = False, self._is_last
        else:
            raise ProviderError(f"the machine's memory has a record of no known kind, {flags:#x}")
        self.state += self._in[start:at]
        return at

    def _page(self, start: int, at: int, flags: int, address: int) -> int:
        if not flags & _SAME_BLOCK:
            length = self._take(at, at + 1)[0]
            self._is_memory = self._take(at + 1, at + 1 + length) == BLOCK
            at += 1 + length
        end = at + (_PAGE if flags & _DATA else 1)
        if end > len(self._in):
            raise _Short
        if not self._is_memory:
            self.state += self._in[start:end]
            return end
        if address >= self._size:
            raise ProviderError("the machine has sent more memory than it has")
        if flags & _DATA:
            self._keep(address, memoryview(self._in)[at:end])
        elif self._in[at] or self._written[address // _PAGE]:
            self._keep(address, memoryview(self._in[at:end] * _PAGE))
        return end

    def _sizes(self, at: int, total: int) -> int:
        """Read the list of all blocks of memory, each with its size and its place."""
        while total > 0:
            length = self._take(at, at + 1)[0]
            name = self._take(at + 1, at + 1 + length)
            at += 1 + length
            (size,) = _LONG.unpack(self._take(at, at + _LONG.size))
            if not 0 < size <= total or (name == BLOCK and size != self._size):
                raise ProviderError("the machine has sent another memory than it has")
            total -= size
            at += 2 * _LONG.size
        self._take(at, at)
        return at

    def _take(self, start: int, end: int) -> bytes:
        if end > len(self._in):
            raise _Short
        return self._in[start:end]

    def _keep(self, address: int, page: memoryview) -> None:
        if len(self._run) >= _MAX_RUN or address != self._run_at + len(self._run) * _PAGE:
            self._flush()
        if not self._run:
            self._run_at = address
        self._run.append(page)
        self._written[address // _PAGE] = 1

    def _flush(self) -> None:
        if self._run:
            wanted = len(self._run) * _PAGE
            if os.pwritev(self._fd, self._run, self._run_at) != wanted:
                raise ProviderError("there is no room for the machine's memory")
            self._run = []
