"""Small tars, as the engine takes files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

_PIECE = 1 << 20


def folder(name: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> bytes:
    """A tar of one empty folder; unpacked over one that exists, it changes its owner and mode."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, uid, gid
        archive.addfile(entry)
    return content.getvalue()


async def pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
