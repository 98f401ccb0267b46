"""Copies between host and sandbox. What comes out is hostile: bounded, named by us, whole or not at all."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from skerry.agent.client import AgentClient
from skerry.agent.guest import trees
from skerry.errors import FileError, PathInvalid

PATIENCE_S = 60.0
"""How long a transfer may stand still."""
_MAX_ENTRIES = 1_000_000


@contextmanager
def whole_or_not_at_all(path: Path, mode: int) -> Iterator[Callable[[memoryview], None]]:
    """Write a file beside its place; it gets there only if all went well."""
    fd, temporary = tempfile.mkstemp(prefix=".skerry-", dir=path.parent)

    def write(data: memoryview) -> None:
        while data:
            data = data[os.write(fd, data) :]

    try:
        yield write
        os.fchmod(fd, mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)


def own_name(remote: str) -> str:
    """What a copy is called: as the caller called the original."""
    name = os.path.basename(remote.rstrip("/"))
    if name in ("", ".", ".."):
        raise PathInvalid(f"{remote!r} has no name of its own: say what the copy is to be called")
    return name


async def upload_tree(client: AgentClient, local: Path, remote: dict[str, Any]) -> None:
    call = client.open("tree_upload", remote).patiently(PATIENCE_S)
    loop = asyncio.get_running_loop()

    def write(data: bytes) -> None:
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


async def download_tree(client: AgentClient, remote: dict[str, Any], local: Path, max_bytes: int) -> None:
    call = client.open("tree_download", remote).patiently(PATIENCE_S)
    chunks = call.chunks()
    loop = asyncio.get_running_loop()
    kept = bytearray()

    async def next_chunk() -> bytes:
        async for _, data in chunks:
            return data
        return b""

    def read(size: int) -> bytes:
        while len(kept) < size:
            data = asyncio.run_coroutine_threadsafe(next_chunk(), loop).result()
            if not data:
                break
            kept.extend(data)
        piece = bytes(kept[:size])
        del kept[:size]
        return piece

    try:
        await asyncio.to_thread(trees.unpack, read, os.fsencode(local), max_bytes=max_bytes, max_entries=_MAX_ENTRIES)
        await call.result(dict[str, Any])
    except trees.UnsafeTar as error:
        raise PathInvalid(f"the sandbox's folder was not copied whole: {error}") from None
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{local}: {error.strerror or error}") from error
    finally:
        call.abandon()
