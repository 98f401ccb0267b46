"""Drives that every machine has beside its root: the agent with an interpreter, and empty ones to write to."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from pathlib import Path

from skerry.agent import bundle
from skerry.errors import InvalidSpec
from skerry.oci import roots
from skerry.vm.images import ext4, programs, tree
from skerry.vm.images.artifact_cache import ArtifactCache

_WAIT_S = 300.0
_LEAST_BYTES = 1 << 20
_JOURNAL_MIB = 16


async def runtime_disk(cache_dir: Path, *, has_python: bool = True) -> tuple[str, Path]:
    """The drive with /agent and /python that every machine mounts at /.skerry, and a key that changes with it. Without
    an interpreter, which is a copy of this host's, the image has to bring one: /python is a mount point then."""
    if has_python:
        portable = await asyncio.to_thread(bundle.portable, cache_dir)
        folders = {
            "agent": await asyncio.to_thread(bundle.agent_folder, cache_dir, portable.python),
            "python": portable.folder,
        }
    else:
        folders = {"agent": await asyncio.to_thread(bundle.agent_folder, cache_dir, sys.executable)}
    names = "+".join(folder.name for folder in reversed(folders.values()))
    key = hashlib.sha256(names.encode()).hexdigest()[:32]

    def write(made: Path) -> None:
        entries = [] if has_python else [tree.folder_entry("python"), tree.folder_entry("run", 0o1777)]
        for name, folder in folders.items():
            for entry in roots.in_folder(folder, lambda _: None):
                info = entry.info
                info.name = f"{name}/{info.name}"
                if info.islnk():
                    info.linkname = f"{name}/{info.linkname}"
                info.uid = info.gid = info.mtime = 0
                entries.append(entry)
        ext4.write(tree.of(entries, folders=()), made)

    cache = ArtifactCache(cache_dir / "runtimes")
    return key, await cache.get_or_make(f"{key}.ext4", lambda made: asyncio.to_thread(write, made), _WAIT_S)


async def blank_disk(cache: Path, size: int, *, journal: bool = False) -> Path:
    """An empty file system of that many bytes, which takes no room until it is written to. To be copied or put a layer
    on, never written to itself. With a `journal` it is for what outlives its machine, however that ends."""
    if size < _LEAST_BYTES:
        raise InvalidSpec(f"a disk has {_LEAST_BYTES} bytes at least, not {size}")
    size = -(-size // ext4.BLOCK) * ext4.BLOCK

    async def make(made: Path) -> None:
        with open(made, "xb") as file:
            file.truncate(size)
        # with `discard` the tables of inodes are known to be zeros; else a kernel that mounts it writes them all
        options = "root_owner=0:0,lazy_itable_init=1,lazy_journal_init=1,discard"
        kind = ("-J", f"size={_JOURNAL_MIB}") if journal else ("-O", "^has_journal")
        arguments = ("-q", "-F", "-t", "ext4", "-m", "0", *kind, "-E", options)
        await programs.run("mke2fs", *arguments, made, timeout_s=120.0)

    name = f"{size}{'-journal' if journal else ''}-zeroed.ext4"
    return await ArtifactCache(cache / "blanks").get_or_make(name, make, _WAIT_S)
