"""What is sent to import an image: looked through once and made piece by piece, both in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, asynccontextmanager
from pathlib import Path
from threading import Event
from typing import NamedTuple

from skerry.errors import InvalidSpec
from skerry.progress import OnProgress, Progress
from skerry.sources import packing, roots, stores
from skerry.sources.roots import Entry
from skerry.sources.stores import FolderStore, TarStore


class Parcel(NamedTuple):
    """A tar to send."""

    pieces: Iterator[bytes]
    total: int
    """Bytes of content; the tar has some more."""
    left_out: list[str]
    """Paths that do not go along."""


@asynccontextmanager
async def looked_through(look: Callable[[Event], AbstractContextManager[Parcel]]) -> AsyncIterator[Parcel]:
    """What `look` finds, in a thread; its event says that nobody wants it any more."""
    stop = Event()
    holding = look(stop)
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


@asynccontextmanager
async def sending(parcel: Parcel, source: Path, on_progress: OnProgress) -> AsyncIterator[AsyncIterator[bytes]]:
    """Its pieces, counted; at the end it is told what did not go along."""
    async with aclosing(packing.from_thread(parcel.pieces)) as pieces:
        yield counted(pieces, f"importing {source.name}", parcel.total, on_progress)
    if parcel.left_out:
        count = len(parcel.left_out)
        on_progress(Progress(f"left out {count} devices, sockets or mounts, such as {parcel.left_out[0]}"))


async def counted(
    pieces: AsyncIterator[bytes], message: str, total: int | None, on_progress: OnProgress
) -> AsyncIterator[bytes]:
    done = 0
    async for piece in pieces:
        yield piece
        done += len(piece)
        on_progress(Progress(message, done if total is None else min(done, total), total))


def root_of(source: Path, store: FolderStore | TarStore, left_out: list[str]) -> Sequence[Entry]:
    """The entries of a root file system."""
    note = left_out.append
    entries = roots.in_tar(store, note) if isinstance(store, TarStore) else roots.in_folder(source, note)
    if not entries:
        raise InvalidSpec(f"{source} is empty: there is nothing to import")
    check_size(source, entries)
    return entries


def check_size(source: Path, entries: Sequence[Entry]) -> int:
    total = sum(entry.info.size for entry in entries)
    if total > stores.MAX_BYTES:
        raise InvalidSpec(f"{source} is larger than any image is; is it the right folder?")
    return total


def told(source: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    with stores.reading(source):
        yield from pieces
