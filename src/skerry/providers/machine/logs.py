"""What a box itself said: its machine's console, with the last words of its kernel and of its first process."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import AsyncIterator, Iterator

from skerry.errors import NotFound
from skerry.providers.machine.boxes import Box
from skerry.vm.base import CONSOLE
from skerry.vm.folder import OLDER_CONSOLE, VmFolder

_LOOK_S = 0.1
_CHUNK = 1 << 16
_LINES = 40
_TAIL = 4096
_CONTROLS = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|.)|[^\n\t -~\u00a0-\uffff]")
"""What a guest could do to the terminal of whoever reads its words."""


async def of_box(box: Box, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
    """Raises NotFound; the end of a box that is followed is the end of what it says."""
    if not box.path.is_dir():
        raise NotFound(f"there is no box {box.id}")
    async for chunk in read(box.vm, follow=follow, tail=tail):
        yield chunk


async def read(folder: VmFolder, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
    """All that is kept of it, or its last lines; followed, until the machine ends. The older half of the console is in
    a file of its own, so a file that is another by now was put aside."""
    said = b"".join(_all(_open(folder, OLDER_CONSOLE)))
    console = _open(folder, CONSOLE)
    try:
        said += b"".join(_all(console, keep=True))
        if first := said if tail is None else last_lines(said, tail):
            yield first
        while follow:
            is_over = not folder.is_running()
            for chunk in _all(console, keep=True):
                yield chunk
            if _is_replaced(folder, console):
                _close(console)
                console = _open(folder, CONSOLE)
            elif is_over:
                return
            else:
                await asyncio.sleep(_LOOK_S)
    finally:
        _close(console)


def last_words(folder: VmFolder) -> str:
    """Why a machine did not come up: how it ended, and what it said."""
    console = _CONTROLS.sub("", folder.read_console())
    said = last_lines(console.encode(), _LINES).decode(errors="replace")[-_TAIL:]
    return "\n".join(part for part in (said.rstrip(), folder.how_it_ended()) if part)


def last_lines(text: bytes, count: int) -> bytes:
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else b""


def _open(folder: VmFolder, name: str) -> int | None:
    """The file is partly the machine's: it may be anything."""
    try:
        fd = os.open(folder.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _all(fd: int | None, *, keep: bool = False) -> Iterator[bytes]:
    if fd is None:
        return
    try:
        while chunk := os.read(fd, _CHUNK):
            yield chunk
    except OSError:
        return
    finally:
        if not keep:
            os.close(fd)


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _is_replaced(folder: VmFolder, fd: int | None) -> bool:
    try:
        seen = os.lstat(folder.path / CONSOLE)
    except OSError:
        return False
    return fd is None or not os.path.samestat(seen, os.fstat(fd))
