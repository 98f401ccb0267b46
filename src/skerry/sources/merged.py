"""The root file system that the layers of an image make: the upper ones hide what they replace or remove below."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from threading import Event

from skerry.sources import archives, roots, stores
from skerry.sources.archives import Parts
from skerry.sources.roots import Entry, LeftOut
from skerry.sources.stores import Store, TarStore

_GONE = ".wh."
_EMPTIED = ".wh..wh..opq"


@contextmanager
def in_layers(store: Store, parts: Parts, stop: Event, left_out: LeftOut) -> Iterator[Sequence[Entry]]:
    """The entries, from the lowest layer up, so that each is read but forward."""
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
    """What the layers above have, have removed, or have emptied."""

    def __init__(self) -> None:
        self._there: dict[str, bool] = {}
        """Paths, and whether each is a folder, which hides only itself."""
        self._gone: set[str] = set()
        self._emptied: set[str] = set()

    def hides(self, path: str) -> bool:
        if path in self._there or path in self._gone:
            return True
        at = posixpath.dirname(path)
        while at:
            if at in self._gone or at in self._emptied or self._there.get(at, True) is False:
                return True
            at = posixpath.dirname(at)
        return False

    def take(self, layer: TarStore) -> None:
        for member in layer.members:
            folder, name = posixpath.split(_path(member))
            if name == _EMPTIED:
                self._emptied.add(folder)
            elif name.startswith(_GONE):
                self._gone.add(posixpath.join(folder, name.removeprefix(_GONE)))
            else:
                path = _path(member)
                self._there[path] = self._there.get(path, member.isdir())


def _visible(layer: TarStore, hiding: _Hiding, left_out: LeftOut) -> list[Entry]:
    entries = []
    shown: set[str] = set()
    files = {_path(each): each for each in reversed(layer.members) if each.isreg()}
    for entry in roots.in_tar(layer, left_out):
        name = posixpath.basename(entry.info.name)
        if name.startswith(_GONE) or entry.info.name == "." or hiding.hides(entry.info.name):
            continue
        if entry.info.islnk() and entry.info.linkname not in shown:
            entry = _unlinked(layer, entry, files.get(entry.info.linkname))
        shown.add(entry.info.name)
        entries.append(entry)
    return entries


def _unlinked(layer: TarStore, entry: Entry, target: tarfile.TarInfo | None) -> Entry:
    """A hard link to what is hidden: it has to be a file itself then."""
    if target is None:
        return entry
    entry.info.type, entry.info.linkname, entry.info.size = tarfile.REGTYPE, "", target.size
    return Entry(entry.info, partial(layer.content, target))


def _path(member: tarfile.TarInfo) -> str:
    return posixpath.normpath(member.name).lstrip("/")
