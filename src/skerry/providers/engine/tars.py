"""Small tars, as the engine takes files."""

from __future__ import annotations

import io
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_PIECE = 1 << 20


def tar(fill: Callable[[tarfile.TarFile], None]) -> bytes:
    """What was filled in, up to the mark of its end. Of what fills it up to a round size after that Podman reads only
    as much as is there in time, and fails if that is not all."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        fill(archive)
        end = content.tell() + 2 * tarfile.BLOCKSIZE
    return content.getvalue()[:end]


def folder(name: str, *, mode: int = 0o755, uid: int = 0, gid: int = 0) -> bytes:
    """A tar of one empty folder; unpacked over one that exists, it changes its owner and mode."""
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.uid, entry.gid = tarfile.DIRTYPE, mode, uid, gid
    return tar(lambda archive: archive.addfile(entry))


async def pieces(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            yield piece
