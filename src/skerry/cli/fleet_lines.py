"""What several members say at once, line by line, each behind the name of who said it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import click

from skerry.cli.output import printable
from skerry.cli.pipes import write_all
from skerry.config import variable

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")
_LONGEST = 1 << 16
"""A line that is longer is written in pieces, each behind the name, so that nobody fills our memory."""
_RESET = b"\x1b[0m"


class Lines:
    """Our two outputs, shared by all members: a line is written whole before the next begins."""

    def __init__(self, names: Sequence[str]) -> None:
        self._lock = asyncio.Lock()
        self._names = list(names)
        self._width = max((len(name) for name in names), default=0)
        self._coloured = {fd: os.isatty(fd) and not variable("NO_COLOR") for fd in (1, 2)}

    def of(self, name: str) -> MemberLines:
        colour = _COLOURS[self._names.index(name) % len(_COLOURS)]
        plain = f"{printable(name).ljust(self._width)} | "
        styled = click.style(plain, fg=colour)
        prefixes = {fd: (styled if coloured else plain).encode() for fd, coloured in self._coloured.items()}
        return MemberLines(self, prefixes)

    async def write(self, fd: int, prefix: bytes, lines: Sequence[bytes]) -> None:
        if self._coloured[fd]:
            lines = [line + _RESET if b"\x1b" in line else line for line in lines]
        async with self._lock:
            await write_all(fd, b"".join(prefix + line + b"\n" for line in lines))


class MemberLines:
    """The lines of one member; what is not ended yet is kept until it is."""

    def __init__(self, lines: Lines, prefixes: dict[int, bytes]) -> None:
        self._lines = lines
        self._prefixes = prefixes
        self._rest = {1: b"", 2: b""}

    async def write(self, fd: int, chunk: bytes) -> None:
        *lines, rest = (self._rest[fd] + chunk).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._rest[fd] = rest
        if lines:
            await self._lines.write(fd, self._prefixes[fd], lines)

    async def end(self) -> None:
        for fd, rest in self._rest.items():
            if rest:
                await self._lines.write(fd, self._prefixes[fd], [rest])
                self._rest[fd] = b""
