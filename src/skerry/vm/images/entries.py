"""Entries of a root file system that are ours, not out of a source."""

from __future__ import annotations

import io
import tarfile

from skerry.sources.roots import Entry


def folder(name: str, mode: int = 0o755) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    return Entry(info, None)


def file(name: str, content: bytes, mode: int = 0o644) -> Entry:
    info = tarfile.TarInfo(name)
    info.mode, info.size = mode, len(content)
    return Entry(info, lambda: io.BytesIO(content))


def link(name: str, target: str) -> Entry:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    return Entry(info, None)
