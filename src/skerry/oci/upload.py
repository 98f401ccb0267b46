"""Uploads of images: each source is looked through once and packed piece by piece, both in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, aclosing, asynccontextmanager, closing
from pathlib import Path
from threading import Event
from typing import NamedTuple

from skerry.model.results import OnProgress, Progress
from skerry.oci import packing, stores


class Upload(NamedTuple):
    """A tar to send."""

    pieces: Iterator[bytes]
    total: int
    """Bytes of content; the tar has some more."""
    left_out: list[str]
    """Paths that do not go along."""


@asynccontextmanager
async def prepared(look: Callable[[Event], AbstractContextManager[Upload]]) -> AsyncIterator[Upload]:
    """Run `look` in a thread; its event says that nobody wants the upload any more."""
    with closing(ExitStack()) as held:  # closed without an error of the caller's, which is none of the source
        yield await packing.in_thread(lambda stop: held.enter_context(look(stop)))


@asynccontextmanager
async def sending(upload: Upload, source: Path, on_progress: OnProgress) -> AsyncIterator[AsyncIterator[bytes]]:
    """Send the pieces, with progress; at the end it says what was left out."""
    async with aclosing(packing.from_thread(upload.pieces)) as pieces:
        yield counted(pieces, f"importing {source.name}", upload.total, on_progress)
    if upload.left_out:
        count = len(upload.left_out)
        on_progress(Progress(f"left out {count} devices, sockets or mounts, such as {upload.left_out[0]}"))


async def counted(
    pieces: AsyncIterator[bytes], message: str, total: int | None, on_progress: OnProgress
) -> AsyncIterator[bytes]:
    done = 0
    async for piece in pieces:
        yield piece
        done += len(piece)
        on_progress(Progress(message, done if total is None else min(done, total), total))


def readable(source: Path, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the pieces. Raises InvalidSpec where the source cannot be read."""
    with stores.reading(source):
        yield from pieces
