"""Console of a machine, where its kernel and its first process write: read, follow, and quote it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator

from skerry.host import locks
from skerry.vm.base import CONSOLE
from skerry.vm.folder import OLDER_CONSOLE, VmFolder

_LOOK_S = 0.1
_CHUNK = 1 << 16
_LINES = 40
_TAIL = 4096
_CONTROLS = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|.)|[^\n\t -~\u00a0-\uffff]")
"""Control sequences, which a guest could send to a reader's terminal."""


async def read(folder: VmFolder, *, follow: bool, tail: int | None) -> AsyncIterator[bytes]:
    """Yield all that is kept of it, or its last lines; followed, until the machine ends."""
    older, console = folder.open_file(OLDER_CONSOLE), folder.open_file(CONSOLE)
    try:
        said = _rest(older) + _rest(console)
        if first := said if tail is None else last_lines(said, tail):
            yield first
        while follow:
            is_over = not folder.is_running()
            if more := _rest(console):
                yield more
            if _is_replaced(folder, console):  # it was put aside as the older half
                _close(console)
                console = folder.open_file(CONSOLE)
            elif is_over:
                return
            else:
                await asyncio.sleep(_LOOK_S)
    finally:
        _close(older)
        _close(console)


def last_words(folder: VmFolder) -> str:
    """Reason why a machine did not come up: its last lines, and how it ended."""
    console = _CONTROLS.sub("", folder.read_console())
    said = last_lines(console.encode(), _LINES).decode(errors="replace")[-_TAIL:]
    return "\n".join(part for part in (said.rstrip(), folder.how_it_ended()) if part)


def last_lines(text: bytes, count: int) -> bytes:
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else b""


def _rest(fd: int | None) -> bytes:
    """What was not read of a file yet."""
    said = b""
    with contextlib.suppress(OSError):
        while fd is not None and (chunk := os.read(fd, _CHUNK)):
            said += chunk
    return said


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _is_replaced(folder: VmFolder, fd: int | None) -> bool:
    return os.path.lexists(folder.console) and (fd is None or not locks.is_in_place(fd, folder.console))
