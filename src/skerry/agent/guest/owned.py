"""Folders of a box, and whose they are."""

from __future__ import annotations

import posix

_READ_ONLY = 30
_NOT_A_FOLDER = 20


def make(path: str) -> None:
    """A folder, with all that leads to it, unless it is there."""
    at = ""
    for part in path.strip("/").split("/"):
        at += "/" + part
        try:
            posix.mkdir(at, 0o755)
        except OSError:
            pass


def own(path: str, mode: int, uid: int, gid: int) -> None:
    """A folder that is the user's; one that may only be read stays as it is, and so does what a link leads to."""
    make(path)
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC)
    except OSError as error:
        raise NotADirectoryError(_NOT_A_FOLDER, f"of the image is no folder: {error.strerror}", path) from None
    try:
        posix.chown(fd, uid, gid)
        posix.chmod(fd, mode)
    except OSError as error:
        if error.errno != _READ_ONLY:
            raise
    finally:
        posix.close(fd)
