"""What an engine is sent to import an image: told by the look of the source, whatever it is called."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Event

from skerry.sources import archives, parcels, roots, stores
from skerry.sources.parcels import Parcel
from skerry.sources.stores import FolderStore, TarStore


@asynccontextmanager
async def parcel(source: Path, name: str, architecture: str) -> AsyncIterator[Parcel]:
    """An image archive to send for a source."""
    async with parcels.looked_through(lambda stop: _held(source, name, architecture, stop)) as found:
        yield found


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
        left_out: list[str] = []
        entries = parcels.root_of(source, store, left_out)
        pieces = parcels.told(source, roots.pack(entries, name, architecture))
        return Parcel(pieces, parcels.check_size(source, entries), left_out)
    pieces = parcels.told(source, archives.pack(store, parts, name))
    return Parcel(pieces, archives.total(store, parts), [])
