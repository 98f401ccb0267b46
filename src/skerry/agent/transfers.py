"""Copies between host and sandbox. What comes out is hostile: bounded, named by us, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skerry.agent.client import AgentClient
from skerry.agent.guest import trees
from skerry.errors import FileError, PathInvalid, TooLarge

PATIENCE_S = 60.0  # seconds that a transfer may stand still
_MAX_ENTRIES = 1_000_000


def own_name(remote: str) -> str:
    """The name of a copy: as the caller called the original. Raises PathInvalid if that has none."""
    name = os.path.basename(remote.rstrip("/"))
    if name in ("", ".", ".."):
        raise PathInvalid(f"{remote!r} has no name of its own: say what the copy is to be called")
    return name


async def upload_tree(client: AgentClient, local: Path, remote: dict[str, Any]) -> int:
    """Copy a folder's content into the sandbox; how many bytes were sent."""
    call = client.open("tree_upload", remote).patiently(PATIENCE_S)
    loop = asyncio.get_running_loop()
    count = 0

    def write(data: bytes) -> None:
        nonlocal count
        count += len(data)
        asyncio.run_coroutine_threadsafe(call.send(data), loop).result()
        if call.done:
            raise BrokenPipeError

    try:
        with suppress(BrokenPipeError):  # the answer says why
            await asyncio.to_thread(trees.pack, os.fsencode(local), write)
        call.end()
        await call.result(dict[str, Any])
    finally:
        call.abandon()
    return count


async def download_tree(client: AgentClient, remote: dict[str, Any], local: Path, max_bytes: int, too_much: str) -> int:
    """Copy a folder's content into `local`, whole or not at all; what is there already stays, but for files of the same
    names. How many bytes came. Raises TooLarge, with `too_much`, if the sandbox sends more than that."""
    call = client.open("tree_download", remote).patiently(PATIENCE_S)
    chunks = call.chunks()
    loop = asyncio.get_running_loop()
    kept = bytearray()
    count = 0

    async def next_chunk() -> bytes:
        async for _, data in chunks:
            return data
        return b""

    def read(size: int) -> bytes:
        nonlocal count
        while len(kept) < size:
            data = asyncio.run_coroutine_threadsafe(next_chunk(), loop).result()
            if not data:
                break
            kept.extend(data)
            count += len(data)
        piece = bytes(kept[:size])
        del kept[:size]
        return piece

    def fill() -> None:
        with _new_content(local) as aside:
            trees.unpack(read, aside, max_bytes=max_bytes, max_entries=_MAX_ENTRIES)
            asyncio.run_coroutine_threadsafe(call.result(dict[str, Any]), loop).result()

    filling = asyncio.ensure_future(asyncio.to_thread(fill))
    try:
        await asyncio.wait([filling])
        filling.result()
    except trees.TooMuch as error:
        raise TooLarge(f"{too_much} ({error})") from None
    except trees.UnsafeTar as error:
        raise PathInvalid(f"the sandbox's folder was not copied: {error}") from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{local}: {error.strerror or error}") from error
    finally:
        call.abandon()
        await asyncio.gather(filling, return_exceptions=True)  # it removes what it made
    return count


@contextmanager
def _new_content(folder: Path) -> Iterator[bytes]:
    """A place whose content is moved into a folder if all goes well; else all that was made goes, the folder too."""
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        aside = os.fsencode(tempfile.mkdtemp(prefix=".skerry-", dir=folder))
        try:
            yield aside
            _move_content(aside, os.fsencode(folder), only_look=True)
            _move_content(aside, os.fsencode(folder))
        finally:
            deque(trees.remove_tree(aside), maxlen=0)
    except BaseException:
        if missing:
            deque(trees.remove_tree(os.fsencode(missing[-1])), maxlen=0)
        raise


def _move_content(source: bytes, target: bytes, *, only_look: bool = False) -> None:
    """Folders become one, files take the place of others. No link in the target is followed."""
    tops = [os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) for path in (source, target)]
    on_both_sides = [b""]
    try:
        while on_both_sides:
            folder = on_both_sides.pop()
            fds = [trees.descend(top, folder) for top in tops]
            try:
                for name in map(os.fsencode, os.listdir(fds[0])):
                    if not _moves_whole(name, *fds):
                        on_both_sides.append(folder + b"/" + name if folder else name)
                    elif not only_look:
                        os.rename(name, name, src_dir_fd=fds[0], dst_dir_fd=fds[1])
            finally:
                for fd in fds:
                    os.close(fd)
    finally:
        for fd in tops:
            os.close(fd)


def _moves_whole(name: bytes, source: int, target: int) -> bool:
    """False for a folder on both sides. Raises UnsafeTar for one on one side and something else on the other."""
    try:
        kinds = {stat.S_ISDIR(os.lstat(name, dir_fd=fd).st_mode) for fd in (source, target)}
    except FileNotFoundError:
        return True
    if len(kinds) > 1:
        raise trees.UnsafeTar(f"{os.fsdecode(name)!r} is a folder on one side, and a link or a file on the other")
    return kinds == {False}
