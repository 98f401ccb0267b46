"""A root file system, from a folder or a tar, as an image of one layer, without what no image may have."""

from __future__ import annotations

import copy
import hashlib
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from skerry.errors import InvalidSpec
from skerry.sources import archives, packing, stores
from skerry.sources.stores import TarStore

_CAPABILITY = "security.capability"
LeftOut = Callable[[str], None]
"""Told of each path that does not go along: devices, sockets, and other file systems mounted there."""


class Entry(NamedTuple):
    """Something of the root: its header, and its content if it has any."""

    info: tarfile.TarInfo
    open: Callable[[], BinaryIO] | None


def in_folder(folder: Path, left_out: LeftOut) -> list[Entry]:
    """Owners, modes and hard links as they are."""
    first: dict[tuple[int, int], str] = {}
    entries: list[Entry] = []
    for name, path, found in _walk(folder, left_out):
        info = packing.describe(name, found, path)
        info.pax_headers = _capabilities(path) if info.isreg() else {}
        same = first.setdefault((found.st_dev, found.st_ino), name)
        if info.isreg() and same != name:
            info.type, info.linkname, info.size = tarfile.LNKTYPE, same, 0
        entries.append(Entry(info, partial(packing.open_regular, path) if info.isreg() else None))
        if len(entries) > stores.MAX_ENTRIES:
            raise InvalidSpec(f"{folder} has more files than any image has; is it the right folder?")
    return entries


def _capabilities(path: str) -> dict[str, str]:
    """What a program may do beyond its user, in the words of tars; nothing where the system keeps no such thing."""
    try:
        value = os.getxattr(path, _CAPABILITY, follow_symlinks=False)
    except (OSError, AttributeError):
        return {}
    return {f"SCHILY.xattr.{_CAPABILITY}": value.decode("utf-8", "surrogateescape")}


def _walk(folder: Path, left_out: LeftOut) -> Iterator[tuple[str, str, os.stat_result]]:
    device = os.stat(folder).st_dev
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        with os.scandir(os.path.join(folder, prefix)) as entries:
            found = sorted((each.name, each.stat(follow_symlinks=False)) for each in entries)
        for base, status in found:
            name = prefix + base
            kind = stat.S_IFMT(status.st_mode)
            if kind in (stat.S_IFBLK, stat.S_IFCHR, stat.S_IFSOCK):
                left_out(name)
                continue
            yield name, os.path.join(folder, name), status
            if kind == stat.S_IFDIR and status.st_dev != device:
                left_out(name)
            elif kind == stat.S_IFDIR:
                waiting.append(name + "/")


def in_tar(store: TarStore, left_out: LeftOut) -> list[Entry]:
    """Its entries in their order."""
    entries = []
    for member in store.members:
        if member.isdev() and not member.isfifo():
            left_out(member.name)
        else:
            entries.append(Entry(_clean(member), partial(store.content, member) if member.isreg() else None))
    return entries


def _clean(member: tarfile.TarInfo) -> tarfile.TarInfo:
    info = copy.copy(member)
    info.name = _inside(member.name)
    if member.islnk():
        info.linkname = _inside(member.linkname)
    # Of the extended headers only these say what the plain ones cannot; the others would overrule what we changed.
    info.pax_headers = {k: v for k, v in member.pax_headers.items() if k.startswith("SCHILY.xattr.")}
    if member.isreg():
        info.type = tarfile.REGTYPE
    else:
        info.size = 0
    return info


def _inside(name: str) -> str:
    clean = posixpath.normpath(name).lstrip("/") or "."
    if clean == ".." or clean.startswith("../"):
        raise InvalidSpec(f"the tar has an entry {name[:100]!r}, which lies outside of it; it was not imported")
    return clean


def pack(entries: Sequence[Entry], name: str, architecture: str) -> Iterator[bytes]:
    """The image as an archive: engines load one without leaving anything of it behind, as not all do with a root."""
    layer = tarfile.TarInfo("layer.tar")
    layer.size = sum(packing.length(entry.info) for entry in entries) + len(packing.END)
    yield from packing.entry(layer)
    digest = hashlib.sha256()
    for piece in tar(entries):
        digest.update(piece)
        yield piece
    config = {
        "created": datetime.now(UTC).isoformat(),
        "architecture": architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest.hexdigest()}"]},
    }
    yield from packing.text_entry("config.json", msgspec.json.encode(config))
    yield from archives.manifest("config.json", [layer.name], name)


def tar(entries: Sequence[Entry]) -> Iterator[bytes]:
    """The entries as a tar."""
    for info, open_content in entries:
        if open_content is None:
            yield from packing.entry(info)
        else:
            with open_content() as content:
                yield from packing.entry(info, content)
    yield packing.END
