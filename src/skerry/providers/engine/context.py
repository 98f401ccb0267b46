"""What an engine builds from: a Dockerfile and the files of its context, as one tar."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from skerry.errors import InvalidSpec
from skerry.providers.engine import ignore
from skerry.providers.engine.ignore import Ignore
from skerry.sources import packing

DOCKERFILE = ".skerry.Dockerfile"
"""The name of the Dockerfile in the tar, which hides no file of the context."""


def pack(dockerfile: str, context: Path | None) -> Iterator[bytes]:
    """The tar, piece by piece: the same for the same files, everything root's, links as they are."""
    patterns = ""
    if context is not None:
        with packing.reading(context):
            patterns = _patterns(context)
            yield from _files(context, Ignore(patterns))
    # The engine takes what its own reading of the patterns leaves out away from COPY: our two files too.
    own = f"{patterns}\n{DOCKERFILE}\n" if patterns else f"{ignore.FILE}\n{DOCKERFILE}\n"
    yield from packing.text_entry(ignore.FILE, own.encode())
    yield from packing.text_entry(DOCKERFILE, dockerfile.encode())
    yield packing.END


def _patterns(context: Path) -> str:
    if not context.is_dir():
        raise InvalidSpec(f"the context {context} is not a folder", field="context")
    try:
        return (context / ignore.FILE).read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _files(context: Path, ignored: Ignore) -> Iterator[bytes]:
    for name in wanted(context, ignored):
        path = os.path.join(context, name)
        found = os.lstat(path)
        if name == ignore.FILE or stat.S_ISSOCK(found.st_mode):
            continue
        if stat.S_ISCHR(found.st_mode) or stat.S_ISBLK(found.st_mode):
            raise InvalidSpec(f"{path} is a device, which no image can have; name it in {ignore.FILE}", field="context")
        yield from packing_of(name, path, found)


def packing_of(name: str, path: str, found: os.stat_result) -> Iterator[bytes]:
    """One file of the context; an image is the same whoever builds it."""
    info = packing.describe(name, found, path)
    info.uid = info.gid = 0
    if info.type != tarfile.REGTYPE:
        yield from packing.entry(info)
        return
    with packing.open_regular(path) as content:
        info.size = os.fstat(content.fileno()).st_size
        yield from packing.entry(info, content)


def wanted(context: Path, ignored: Ignore) -> list[str]:
    """The paths that go along, with the folders that lead to them, a folder before what is in it."""
    kept: set[str] = set()
    _collect(str(context), "", ignored, kept)
    return sorted(kept)


def _collect(folder: str, prefix: str, ignored: Ignore, kept: set[str]) -> None:
    with os.scandir(folder) as entries:
        for each in entries:
            name = prefix + each.name
            out = ignored.leaves_out(name)
            if not out:
                kept.add(name)
                kept.update(_parents(name))
            if each.is_dir(follow_symlinks=False) and (not out or ignored.keeps_some):
                _collect(each.path, name + "/", ignored, kept)


def _parents(name: str) -> Iterator[str]:
    while name := os.path.dirname(name):
        yield name
