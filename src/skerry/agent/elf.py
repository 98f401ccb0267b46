"""What is to be known of an ELF file to carry a program into a box: its loader, and the bytes that get loaded."""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
_PT_INTERP = 3


class Elf:
    """A 64-bit little-endian ELF file; raises ValueError for anything else."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        if self.data[:6] != b"\x7fELF\x02\x01" or len(self.data) < _HEADER.size:
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        self._header = list(_HEADER.unpack_from(self.data))
        start, size, count = self._header[5], self._header[9], self._header[10]
        self._segments = [_PROGRAM_HEADER.unpack_from(self.data, start + i * size) for i in range(count)]

    @property
    def loader(self) -> str | None:
        """The program that loads this one's libraries; none in a static program or a library."""
        for kind, _, offset, _, _, size, _, _ in self._segments:
            if kind == _PT_INTERP:
                return self.data[offset : offset + size].rstrip(b"\0").decode()
        return None

    def stripped(self) -> bytes:
        """The file without what no loader reads: debug information, symbols for linkers, section headers."""
        header = list(self._header)
        header[6] = header[12] = header[13] = 0  # where the section headers are, how many, and which names them
        end = max(offset + size for _, _, offset, _, _, size, _, _ in self._segments)
        return _HEADER.pack(*header) + self.data[_HEADER.size : end]
