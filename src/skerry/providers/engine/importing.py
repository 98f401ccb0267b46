"""What an engine is sent to import an image: told by the look of the source, whatever it is called."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event
from typing import NamedTuple

from skerry.errors import InvalidSpec
from skerry.providers.engine import archives, roots, stores
from skerry.providers.engine.stores import FolderStore, TarStore


class Parcel(NamedTuple):
    """An image archive to send."""

    pieces: Iterator[bytes]
    total: int
    """Bytes of content; the tar has some more."""
    left_out: list[str]
    """Paths that do not go along."""


@asynccontextmanager
async def parcel(source: Path, name: str, architecture: str) -> AsyncIterator[Parcel]:
    """What to send for a source, which is looked through once here, in a thread."""
    stop = Event()
    holding = _held(source, name, architecture, stop)
    looking = asyncio.get_running_loop().run_in_executor(None, holding.__enter__)
    try:
        found = await asyncio.shield(looking)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([looking])
        if looking.exception() is None:
            holding.__exit__(None, None, None)
        raise
    try:
        yield found
    finally:
        holding.__exit__(None, None, None)


@contextmanager
def _held(source: Path, name: str, architecture: str, stop: Event) -> Iterator[Parcel]:
    with stores.reading(source), stores.opened(source, stop) as store:
        yield _parcel(source, store, name, architecture)


def _parcel(source: Path, store: FolderStore | TarStore, name: str, architecture: str) -> Parcel:
    if store.size(archives.MANIFEST) >= 0:
        parts = archives.in_archive(store)
    elif store.size(archives.INDEX) >= 0:
        parts = archives.in_layout(store, architecture)
    else:
        return _root(source, store, name, architecture)
    pieces = _told(source, archives.pack(store, parts, name))
    return Parcel(pieces, archives.total(store, parts), [])


def _root(source: Path, store: FolderStore | TarStore, name: str, architecture: str) -> Parcel:
    left_out: list[str] = []
    note = left_out.append
    entries = roots.in_tar(store, note) if isinstance(store, TarStore) else roots.in_folder(source, note)
    if not entries:
        raise InvalidSpec(f"{source} is empty: there is nothing to import")
    total = sum(entry.info.size for entry in entries)
    if total > stores.MAX_BYTES:
        raise InvalidSpec(f"{source} is larger than any image is; is it the right folder?")
    return Parcel(_told(source, roots.pack(entries, name, architecture)), total, left_out)


def _told(source: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    with stores.reading(source):
        yield from pieces
