"""Guest numbers for the kernel's vsock: each is one machine's on the whole host."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from skerry.errors import LimitReached
from skerry.vm.base import FIRST_CID

_FOLDER = Path("/run/skerry/cids")
"""For the whole host, not for an installation: the kernel knows a number once."""
_COUNT = 65536
_LOCK = ".lock"


def take(owner: Path, folder: Path = _FOLDER) -> int:
    """A number that nobody has. One whose owner's folder is gone is free again: nobody lived to give it back."""
    with _locked(folder):
        for cid in range(FIRST_CID, FIRST_CID + _COUNT):
            entry = folder / str(cid)
            if not _has_owner(entry):
                entry.unlink(missing_ok=True)
                entry.symlink_to(owner)
                return cid
    raise LimitReached("all guest numbers for vsock are taken: end machines that are not used")


def free(cid: int, owner: Path, folder: Path = _FOLDER) -> None:
    """Quiet if it is another's by now."""
    with _locked(folder), contextlib.suppress(FileNotFoundError):
        if os.readlink(folder / str(cid)) == str(owner):
            os.unlink(folder / str(cid))


def _has_owner(entry: Path) -> bool:
    try:
        return os.path.isdir(os.readlink(entry))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    # a file of ours, not the folder itself: anybody may open that, and could lock us out
    fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
