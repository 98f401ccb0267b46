"""A root file system from anything that images are made of, in a thread that ends with whoever waits for it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TypeVar

from skerry.errors import ProviderError
from skerry.progress import OnProgress, Progress
from skerry.sources import archives, configs, merged, packing, parcels, stores
from skerry.sources.configs import Asked
from skerry.sources.roots import Entry
from skerry.vm.images import ext4, tree

T = TypeVar("T")

Change = Callable[[Sequence[Entry]], Sequence[Entry]]
"""What is done to the entries of a source."""
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_TELL_EVERY = 1 << 24


async def in_thread(work: Callable[[Event], T]) -> T:
    """Its event says that nobody wants it any more; it is waited for all the same, as it still writes."""
    stop = Event()
    working = asyncio.get_running_loop().run_in_executor(None, work, stop)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([working])
        working.exception()
        raise


def told_from_thread(on_progress: OnProgress) -> OnProgress:
    """The same, to be called in a thread."""
    loop = asyncio.get_running_loop()

    def tell(progress: Progress) -> None:
        loop.call_soon_threadsafe(on_progress, progress)

    return tell


def from_source(source: Path, made: Path, change: Change, on_progress: OnProgress, stop: Event) -> Asked:
    """Of an image archive, an OCI layout or a root; a folder or a tar."""
    left_out: list[str] = []
    with _opened(source, stop, left_out.append) as (entries, asked):
        from_entries(change(entries), made, f"writing {source.name}", on_progress, stop)
    if left_out:
        on_progress(Progress(f"left out {len(left_out)} devices, sockets or mounts, such as {left_out[0]}"))
    return asked


def from_entries(entries: Sequence[Entry], made: Path, message: str, on_progress: OnProgress, stop: Event) -> None:
    """Writes the file system, and tells how far it is."""
    root = tree.of(entries)
    total = sum(entry.info.size for entry in entries)
    done = said = 0

    def took(count: int) -> None:
        nonlocal done, said
        if stop.is_set():
            raise InterruptedError(errno.EINTR, "interrupted")
        done += count
        if done - said >= _TELL_EVERY:
            said = done
            on_progress(Progress(message, min(done, total), total))

    try:
        ext4.write(root, made, took)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ProviderError(f"there is no room for the image in {made.parent.parent}: {error.strerror}") from error
    on_progress(Progress(message, total, total))


@contextmanager
def _opened(source: Path, stop: Event, left_out: Callable[[str], None]) -> Iterator[tuple[Sequence[Entry], Asked]]:
    with stores.reading(source), stores.opened(source, stop) as store:
        is_archive = store.size(archives.MANIFEST) >= 0
        if is_archive or store.size(archives.INDEX) >= 0:
            machine = os.uname().machine
            architecture = ARCHITECTURES.get(machine, machine)
            parts = archives.in_archive(store) if is_archive else archives.in_layout(store, architecture)
            asked = configs.read(stores.text(store, parts.config.name))
            with merged.in_layers(store, parts, stop, left_out) as entries:
                parcels.check_size(source, entries)
                yield entries, asked
        else:
            noted: list[str] = []
            yield parcels.root_of(source, store, noted), Asked()
            for name in noted:
                left_out(name)


def digest(path: Path, stop: Event | None = None) -> str:
    """Of a whole file."""
    found = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(packing.PIECE):
            if stop is not None and stop.is_set():
                raise InterruptedError(errno.EINTR, "interrupted")
            found.update(piece)
    return found.hexdigest()
