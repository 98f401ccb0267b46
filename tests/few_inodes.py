"""File systems on which no more file can be made, however small."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def few_inodes(folder: Path, *, size: str = "1g") -> Iterator[None]:
    """A file system of its own in that folder, with room for some files; for root only."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes=64,mode=755", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def use_up_inodes(folder: Path) -> None:
    with suppress(OSError):
        for number in range(1000):
            (folder / f"waste-{number}").touch()
