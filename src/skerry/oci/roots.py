"""Root file systems of a folder, a tar or the layers of an image, without what no image may have."""

from __future__ import annotations

import copy
import hashlib
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Event
from typing import BinaryIO, NamedTuple

import msgspec

from skerry.errors import InvalidSpec
from skerry.oci import archives, packing, stores
from skerry.oci.archives import ImageSettings, Parts
from skerry.oci.stores import FolderStore, ImageFiles, TarStore

_CAPABILITY = "security.capability"
_GONE = ".wh."
_EMPTIED = ".wh..wh..opq"
LeftOut = Callable[[str], None]
"""Told of each path that does not go along: devices, sockets, and other file systems mounted there."""


class Entry(NamedTuple):
    """One file, folder or link of a root: its header, and its content if it has any."""

    info: tarfile.TarInfo
    open: Callable[[], BinaryIO] | None


def in_folder(folder: Path, left_out: LeftOut) -> list[Entry]:
    """The entries of a folder; owners, modes and hard links as they are. Raises InvalidSpec if there are too many."""
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
    """Capabilities of a program, in the words of tars; none where the system keeps no such thing."""
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
    """The entries of a tar, in their order."""
    entries = []
    for member in store.members:
        if member.isdev() and not member.isfifo():
            left_out(member.name)
            continue
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
        entries.append(Entry(info, partial(store.content, member) if member.isreg() else None))
    return entries


def _inside(name: str) -> str:
    clean = posixpath.normpath(name).lstrip("/") or "."
    if clean == ".." or clean.startswith("../"):
        raise InvalidSpec(f"the tar has an entry {name[:100]!r}, which lies outside of it; it was not imported")
    return clean


def root_of(source: Path, store: FolderStore | TarStore, left_out: list[str]) -> Sequence[Entry]:
    """The entries of a root file system. Raises InvalidSpec if it is empty or too large."""
    note = left_out.append
    entries = in_tar(store, note) if isinstance(store, TarStore) else in_folder(source, note)
    if not entries:
        raise InvalidSpec(f"{source} is empty: there is nothing to import")
    check_size(source, entries)
    return entries


def check_size(source: Path, entries: Sequence[Entry]) -> int:
    """Count the bytes of all files. Raises InvalidSpec if no image is as large."""
    total = sum(entry.info.size for entry in entries)
    if total > stores.MAX_BYTES:
        raise InvalidSpec(f"{source} is larger than any image is; is it the right folder?")
    return total


def pack(entries: Sequence[Entry], name: str, architecture: str) -> Iterator[bytes]:
    """Pack an image of one layer: engines load one without leaving anything behind, as not all do with a root."""
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
    """Pack the entries as a tar."""
    for info, open_content in entries:
        if open_content is None:
            yield from packing.entry(info)
        else:
            with open_content() as content:
                yield from packing.entry(info, content)
    yield packing.END


@contextmanager
def opened(
    source: Path, store: FolderStore | TarStore, stop: Event, left_out: list[str]
) -> Iterator[tuple[Sequence[Entry], ImageSettings]]:
    """The root of an image archive, an OCI layout or a root file system, and the image's settings."""
    machine = os.uname().machine
    parts = archives.find(store, archives.ARCHITECTURES.get(machine, machine))
    if parts is None:
        yield root_of(source, store, left_out), ImageSettings()
        return
    settings = archives.read_settings(stores.text(store, parts.config.name))
    with in_layers(store, parts, stop, left_out.append) as entries:
        check_size(source, entries)
        yield entries, settings


@contextmanager
def in_layers(store: ImageFiles, parts: Parts, stop: Event, left_out: LeftOut) -> Iterator[Sequence[Entry]]:
    """The entries of an image, from the lowest layer up, so that each is read but forward. The upper layers hide what
    they replace or remove below."""
    for part in parts.layers:
        archives.verify(store, part)
    with ExitStack() as opened:
        layers = [opened.enter_context(stores.layer(store, part.name, stop)) for part in parts.layers]
        yield merge(layers, left_out)


def merge(layers: Sequence[TarStore], left_out: LeftOut) -> list[Entry]:
    hiding = _Hiding()
    chosen: list[list[Entry]] = []
    for layer in reversed(layers):
        chosen.append(_visible(layer, hiding, left_out))
        hiding.take(layer)
    return [entry for entries in reversed(chosen) for entry in entries]


class _Hiding:
    """Paths that the layers above have, have removed, or have emptied."""

    def __init__(self) -> None:
        self._there: dict[str, bool] = {}
        """Paths, and whether each is a folder, which hides only itself."""
        self._gone: set[str] = set()
        self._emptied: set[str] = set()

    def hides(self, path: str) -> bool:
        if path in self._there or path in self._gone:
            return True
        while path := posixpath.dirname(path):
            if path in self._gone or path in self._emptied or not self._there.get(path, True):
                return True
        return False

    def take(self, layer: TarStore) -> None:
        for member in layer.members:
            path = _clean_path(member)
            folder, name = posixpath.split(path)
            if name == _EMPTIED:
                self._emptied.add(folder)
            elif name.startswith(_GONE):
                self._gone.add(posixpath.join(folder, name.removeprefix(_GONE)))
            else:
                self._there.setdefault(path, member.isdir())


def _visible(layer: TarStore, hiding: _Hiding, left_out: LeftOut) -> list[Entry]:
    entries = []
    shown: set[str] = set()
    files = {_clean_path(each): each for each in reversed(layer.members) if each.isreg()}
    for entry in in_tar(layer, left_out):
        name = posixpath.basename(entry.info.name)
        if name.startswith(_GONE) or entry.info.name == "." or hiding.hides(entry.info.name):
            continue
        hidden = files.get(entry.info.linkname) if entry.info.islnk() and entry.info.linkname not in shown else None
        if hidden is not None:  # a hard link to it becomes a file
            entry.info.type, entry.info.linkname, entry.info.size = tarfile.REGTYPE, "", hidden.size
            entry = Entry(entry.info, partial(layer.content, hidden))
        shown.add(entry.info.name)
        entries.append(entry)
    return entries


def _clean_path(member: tarfile.TarInfo) -> str:
    return posixpath.normpath(member.name).lstrip("/")
