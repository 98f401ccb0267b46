"""A folder of things that are made once: each is written aside and put in place whole, whoever else makes it too."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from skerry.host import locks

_ASIDE = ".new-"
_LOCKS = ".locks"


class Shelf:
    """Nothing on it ever changes; what a crash left aside is removed when something else is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @asynccontextmanager
    async def locked(self, name: str, timeout_s: float) -> AsyncIterator[None]:
        """For one at a time, also of those in other processes; a process that ends lets go."""
        fd = self._open_lock(name)
        try:
            await locks.wait_async(fd, timeout_s, f"another process has been making {name} for too long")
            yield
        finally:
            os.close(fd)

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """An empty folder to make something in; what is left in it at the end goes away."""
        self.sweep()
        with ExitStack() as held:
            with self._alone():
                folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix=_ASIDE, dir=self.folder)))
                held.enter_context(locks.holding(folder))
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

    def sweep(self) -> None:
        """Remove what nobody is making any more."""
        with ExitStack() as held:
            abandoned = []
            with self._alone():
                for folder in self.folder.glob(f"{_ASIDE}*"):
                    with suppress(OSError):
                        held.enter_context(locks.holding(folder))
                        abandoned.append(folder)
            for folder in abandoned:
                shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While nobody else begins anything here, for a moment: a folder that is new is not held yet."""
        fd = self._open_lock("what is aside")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _open_lock(self, name: str) -> int:
        place = self.folder / _LOCKS
        place.mkdir(parents=True, exist_ok=True)
        file = place / hashlib.sha256(name.encode()).hexdigest()[:32]
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
