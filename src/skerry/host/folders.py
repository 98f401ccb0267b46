"""Folders of the host: made, swept and removed; and files that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry.agent.guest import trees
from skerry.errors import Conflict, CreateFailed, InvalidSpec
from skerry.host import locks
from skerry.model.spec import SandboxId, parse_id

_log = logging.getLogger("skerry.host")


def make(path: Path, mode: int = 0o700) -> None:
    """Make a folder that may be there already, and its parents with mode 0755 whatever the umask."""
    try:
        path.mkdir(mode, exist_ok=True)
    except FileNotFoundError:
        make(path.parent, 0o755)
        path.mkdir(mode, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None


def make_new(path: Path, what: str) -> None:
    """Make a folder for `what`. Raises Conflict if it is there already, CreateFailed if it cannot be made."""
    try:
        make(path.parent)
        path.mkdir(mode=0o700)
    except FileExistsError:
        raise Conflict(f"there is already {what}") from None
    except OSError as error:
        raise CreateFailed(f"the folder for {what} cannot be made: {error}") from error


def remove(path: Path) -> None:
    """Remove a tree, however deep a box or a machine has made it; quiet if there is none."""
    for _ in trees.remove_tree(os.fsencode(path)):
        pass


def sync(path: Path) -> None:
    """Have a file, or what was put into a folder, outlive the host's end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a folder for work that is held meanwhile, so that `sweep` spares it, and removed at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            fd = locks.open_folder(folder)
        except FileNotFoundError:
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        if locks.is_in_place(fd, folder):
            break
        os.close(fd)  # a sweep came between the two steps
    try:
        yield folder
    finally:
        remove(folder)
        os.close(fd)


def sweep(parent: Path, prefix: str, spared_s: float = 0.0) -> None:
    """Remove folders of programs that died. Who works in one locks it, then looks whether it is still in place, as
    `scratch` does; for those who do not look `spared_s` spares what was changed a moment ago and is not locked yet."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            if folder.is_symlink() or (spared_s and time.time() - folder.lstat().st_mtime <= spared_s):
                continue
            with locks.holding(folder):
                remove(folder)
            _log.info("removed the abandoned folder %s", folder)
        except BlockingIOError:
            continue
        except OSError as error:  # it is gone, or another user's
            _log.debug("the folder %s is not swept: %s", folder, error)


@contextmanager
def whole_or_not_at_all(path: Path, mode: int) -> Iterator[Callable[[memoryview], None]]:
    """Write a file beside its place, and put it there only if all went well."""
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


def ids_in(parent: Path) -> list[SandboxId]:
    """Ids of the boxes that have a folder there; none if `parent` does not exist."""
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        try:
            found.append(parse_id(name))
        except InvalidSpec:
            _log.debug("%s in %s is no box", name, parent)
    return found
