"""Cache of artifacts that are made once: each is written aside and put in place whole, whoever else makes it too."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from skerry.errors import InvalidSpec
from skerry.host import folders, locks

_log = logging.getLogger("skerry.vm")

T = TypeVar("T")

_ASIDE = ".new-"


def read_note(path: Path, type: type[T]) -> T | None:
    """Read what was noted of an artifact; None if that is missing or damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        _log.warning("%s is damaged and not counted: %s", path, error)
        return None


def stamp_of(path: Path, field: str) -> str:
    """Text that tells a file of a user's from what it was before: its path, and what the kernel says of it. No link is
    followed. Raises InvalidSpec unless it is a file that we may read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ELOOP:
            reason = f"it is a link: give the path of the file itself, {os.path.realpath(path)}"
        raise InvalidSpec(f"{field}: {path} cannot be used: {reason}", field=field) from None
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(status.st_mode):
        raise InvalidSpec(f"{field}: {path} cannot be used: it is no file", field=field)
    numbers = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return f"{path} {'-'.join(map(str, numbers))}"


class ArtifactCache:
    """A folder of artifacts. None ever changes; what a crash left aside is removed when another is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def locked(self, name: str, timeout_s: float) -> AsyncIterator[None]:
        """Let one at a time make `name`, also of those in other processes. Raises ProviderError after the timeout."""
        place = self.folder / ".locks"
        place.mkdir(parents=True, exist_ok=True)
        file = place / hashlib.sha256(name.encode()).hexdigest()[:32]
        fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await locks.wait_async(fd, timeout_s, f"another process has been making {name} for too long")
            yield
        finally:
            os.close(fd)

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """Make an empty folder to work in; what is left in it at the end goes away."""
        self.folder.mkdir(parents=True, exist_ok=True)
        folders.sweep(self.folder, _ASIDE)
        with folders.scratch(self.folder, _ASIDE) as folder:
            yield folder

    def put(self, made: Path, name: str) -> Path:
        """Give what was made aside its place; one that is there already is as good."""
        place = self.folder / name
        try:
            made.rename(place)
        except OSError:
            if not place.exists():
                raise
        return place

    async def get_or_make(self, name: str, make: Callable[[Path], Awaitable[object]], timeout_s: float) -> Path:
        """Return the file of this name; `make` writes it, read-only, if it is not there."""
        place = self.folder / name
        if not place.exists():
            async with self.locked(name, timeout_s):
                if not place.exists():
                    with self.aside() as scratch:
                        await make(scratch / "made")
                        (scratch / "made").chmod(0o444)
                        self.put(scratch / "made", name)
        return place
