"""The drives that every machine has beside its root: the agent with an interpreter, and empty ones to write to."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from threading import Lock

from skerry.agent import runtime
from skerry.errors import InvalidSpec
from skerry.sources import roots
from skerry.vm.images import ext4, programs, tree
from skerry.vm.images.shelf import Shelf

_WAIT_S = 300.0
_MAKE_S = 120.0
_LEAST_BYTES = 1 << 20
_one_thread = Lock()
"""Python 3.11 cannot parse sources in several threads at once, as is done to make those folders."""
_JOURNAL_MIB = 16


async def runtime_disk(cache: Path) -> tuple[str, Path]:
    """The drive with /agent and /python that every machine mounts at /.skerry, and a key that changes with it."""
    shelf = Shelf(cache / "runtimes")
    python, agent = await asyncio.to_thread(_folders, cache)
    name = f"{python.name}+{agent.name}"
    key = hashlib.sha256(name.encode()).hexdigest()[:32]
    place = shelf.folder / f"{key}.ext4"
    if not place.exists():
        async with shelf.locked(key, _WAIT_S):
            if not place.exists():
                with shelf.aside() as scratch:
                    made = scratch / "disk"
                    await asyncio.to_thread(_write_runtime, agent, python, made)
                    made.chmod(0o444)
                    shelf.put(made, place.name)
    return key, place


def _folders(cache: Path) -> tuple[Path, Path]:
    with _one_thread:
        portable = runtime.portable(cache)
        return portable.folder, runtime.agent_folder(cache, portable.python)


def _write_runtime(agent: Path, python: Path, made: Path) -> None:
    entries = []
    for name, folder in (("agent", agent), ("python", python)):
        for entry in roots.in_folder(folder, lambda _: None):
            info = entry.info
            info.name = f"{name}/{info.name}"
            if info.islnk():
                info.linkname = f"{name}/{info.linkname}"
            info.uid = info.gid = info.mtime = 0
            entries.append(entry)
    ext4.write(tree.of(entries, folders=()), made)


async def blank_disk(cache: Path, size: int, *, journal: bool = False) -> Path:
    """An empty file system of that many bytes, which takes no room until it is written to. To be copied or put a layer
    on, never written to itself. With a `journal` it is for what outlives its machine, however that ends."""
    if size < _LEAST_BYTES:
        raise InvalidSpec(f"a disk has {_LEAST_BYTES} bytes at least, not {size}")
    size = -(-size // ext4.BLOCK) * ext4.BLOCK
    shelf = Shelf(cache / "blanks")
    place = shelf.folder / f"{size}{'-journal' if journal else ''}.ext4"
    if not place.exists():
        async with shelf.locked(place.name, _WAIT_S):
            if not place.exists():
                with shelf.aside() as scratch:
                    made = scratch / "disk"
                    with open(made, "xb") as file:
                        file.truncate(size)
                    options = "root_owner=0:0,lazy_itable_init=1,lazy_journal_init=1,nodiscard"
                    kind = ("-J", f"size={_JOURNAL_MIB}") if journal else ("-O", "^has_journal")
                    arguments = ("-q", "-F", "-t", "ext4", "-m", "0", *kind, "-E", options)
                    await programs.run("mke2fs", *arguments, made, timeout_s=_MAKE_S)
                    made.chmod(0o444)
                    shelf.put(made, place.name)
    return place
