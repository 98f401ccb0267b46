"""The files of a mock box: a temporary folder, in which no path and no link leads out."""

from __future__ import annotations

import errno
import os
import re
import stat

from skerry.agent.guest import trees

ROOT = "/skerry-mock-root"
"""The last name of every box's root, by which a real path is told from the box's own."""
_MAX_LINKS = 40
_DEFAULT_CAPACITY = 1 << 30
_DEVICES = {b"/dev/null", b"/dev/zero"}


def box_path(path: bytes) -> bytes:
    """A real path as the box knows it."""
    return path.partition(ROOT.encode())[2] or path


def box_text(text: str) -> str:
    """A message with the paths that the box knows."""
    return re.sub(rf"/\S*?{ROOT}", "", text)


class Files:
    def __init__(self, root: str, *, uid: int, capacity: int | None) -> None:
        self.root = os.fsencode(root)
        self.uid = uid
        self.capacity = capacity or _DEFAULT_CAPACITY
        self._room = 0
        """Bytes that may be written before the folder is measured again."""
        self._mounts: set[bytes] = set()
        self._read_only: set[bytes] = set()
        self._own: set[bytes] = {b"/tmp"}
        """Folders that a user other than root may change."""

    def give(self, path: str) -> None:
        """Make a folder that belongs to the box's user."""
        self._own.add(os.fsencode(path))
        os.makedirs(self.locate(path), exist_ok=True)

    def mount(self, path: str, folder: str, *, read_only: bool) -> None:
        """Show a folder that others may see too."""
        place = os.fsencode(path)
        os.makedirs(self.locate(os.path.dirname(place)), exist_ok=True)
        if place not in self._mounts and not os.path.lexists(self.root + place):
            os.symlink(folder, self.root + place)
        self._mounts.add(place)
        (self._read_only if read_only else self._own).add(place)

    def locate(self, path: str | bytes, *, follow: bool = True, change: bool = False) -> bytes:
        """The real path of an absolute path of the box. Raises OSError where it may not be changed."""
        names, links, here = _names(os.fsencode(path)), 0, b""
        while names:
            name = names.pop()
            if name == b"..":
                here = here.rpartition(b"/")[0]
                continue
            inner = here + b"/" + name
            is_link = inner not in self._mounts and os.path.islink(self.root + inner)
            if is_link and (names or follow):
                links += 1
                if links > _MAX_LINKS:
                    raise error(errno.ELOOP, path)
                target = os.readlink(self.root + inner)
                here = b"" if target.startswith(b"/") else here
                names += _names(target)
            else:
                here = inner
        if change and _is_below(here, self._read_only):
            raise error(errno.EROFS, path)
        if here in _DEVICES:
            return here
        if change and self.uid != 0 and not _is_below(here, self._own):
            raise error(errno.EACCES, path)
        return self.root + (here or b"/")

    def check_writable(self, place: bytes) -> None:
        """Raises OSError for a real path whose mode forbids to write, which a host's root would not notice."""
        if self.uid != 0 and os.path.isfile(place) and not os.stat(place).st_mode & 0o222:
            raise error(errno.EACCES, place)

    def exists(self, path: str | bytes) -> bool:
        return os.path.lexists(self.locate(path, follow=False))

    def open(self, path: str, flags: int) -> int:
        return os.open(self.locate(path, change=flags != os.O_RDONLY), flags, 0o666)

    def read(self, path: str) -> bytes:
        with open(self.open(path, os.O_RDONLY), "rb") as file:
            return file.read()

    def replace(self, path: str, data: bytes) -> None:
        fd = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.write(fd, data)
        finally:
            os.close(fd)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """`os.write`, counted against the box's disk."""
        if stat.S_ISREG(os.fstat(fd).st_mode):
            self.take_room(len(data))
        return os.write(fd, data)

    def take_room(self, count: int) -> None:
        """Raises OSError where so many bytes more do not fit."""
        if count > self._room:
            self._room = self.capacity - self.used()
        if count > self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._room -= count

    def used(self) -> int:
        return size_of(self.root)

    def fill(self) -> None:
        """Let no byte more fit."""
        self.capacity = self._room = 0

    def mounted(self, folder: str, names: list[str]) -> list[str]:
        """The names in a real folder that are of others."""
        return [name for name in names if box_path(os.fsencode(f"{folder}/{name}")) in self._mounts]


def size_of(folder: str | bytes) -> int:
    return sum(info.st_size for _, info in trees.walk(os.fsencode(folder), 1 << 30) if stat.S_ISREG(info.st_mode))


def _names(path: bytes) -> list[bytes]:
    """The names of a path, the last one first."""
    return [name for name in path.split(b"/") if name not in (b"", b".")][::-1]


def _is_below(place: bytes, folders: set[bytes]) -> bool:
    return any(place == each or place.startswith(each + b"/") for each in folders)


def error(code: int, path: str | bytes) -> OSError:
    return OSError(code, os.strerror(code), os.fsdecode(path))
