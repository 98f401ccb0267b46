"""Files of the ledger: the newest, which is locked to write to it, and those that were rotated, by their numbers."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from skerry.aio import backoff
from skerry.errors import LedgerError
from skerry.host import folders, locks
from skerry.ledger.line import MAX_LINE, read_number

CURRENT = "ledger.jsonl"
_NUMBERED = re.compile(r"ledger\.([1-9]\d{0,17})\.jsonl")
_LOCK_S = 10.0
_LOCK_WAIT_S = (0.0001, 0.01)
TO_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class Part(NamedTuple):
    """One file, open, up to where it reached."""

    number: int
    name: str
    file: BinaryIO
    size: int


def numbered(folder: Path) -> dict[int, Path]:
    """The files that were rotated, by their numbers, the oldest first; none if there is no folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    found = {int(match[1]): folder / name for name in names if (match := _NUMBERED.fullmatch(name))}
    return dict(sorted(found.items()))


def name_of(number: int) -> str:
    return f"ledger.{number}.jsonl"


class Newest:
    """The newest file, which is kept open between two writes, and locked for each against all other programs, threads
    and objects."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: list[int] = []
        self._inode = 0
        self.opened = 0
        """Count of the files that it has been."""
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        weakref.finalize(self, _close, self._held)

    @property
    def fd(self) -> int:
        return self._held[0]

    def lock(self) -> int:
        """Lock it, make it if it is missing, and give its size. Raises OSError."""
        if self._pid != os.getpid():
            self._part_from_parent()
        if not self._mutex.acquire(blocking=False) and not self._mutex.acquire(timeout=_LOCK_S):
            raise _timeout(self._path)
        try:
            while True:
                if not self._held:
                    self._open()
                _take(self._held[0], self._path)
                try:
                    status = os.lstat(self._path)
                    if status.st_ino == self._inode:
                        return status.st_size
                except FileNotFoundError:
                    pass
                _close(self._held)  # it was rotated meanwhile
        except BaseException:
            _close(self._held)
            self._mutex.release()
            raise

    def _part_from_parent(self) -> None:
        """Begin anew in a child of a fork, which would share the lock of its parent and must not let that go."""
        while self._held:
            os.close(self._held.pop())
        self._pid, self._mutex = os.getpid(), threading.Lock()

    def unlock(self) -> None:
        if self._held:
            locks.release(self._held[0])
        self._mutex.release()

    def become(self, fd: int) -> None:
        """Go on with the file that took its place, which is locked too."""
        _close(self._held)
        self._hold(fd)

    def close(self) -> None:
        """Close it until it is needed again."""
        with self._mutex:
            _close(self._held)

    def _open(self) -> None:
        try:
            fd = os.open(self._path, TO_APPEND, 0o600)
        except FileNotFoundError:
            folders.make(Path(self._path).parent)
            fd = os.open(self._path, TO_APPEND, 0o600)
        self._hold(fd)

    def _hold(self, fd: int) -> None:
        self._held.append(fd)
        self._inode = os.fstat(fd).st_ino
        self.opened += 1


def _close(held: list[int]) -> None:
    """Close a file, and let its lock go for a child too that was just forked."""
    while held:
        fd = held.pop()
        locks.release(fd)
        os.close(fd)


def _take(fd: int, path: str) -> None:
    """Lock a file once nobody else does. Raises TimeoutError."""
    if locks.take(fd):
        return
    for delay_s in backoff(*_LOCK_WAIT_S, _LOCK_S):
        time.sleep(delay_s)
        if locks.take(fd):
            return
    raise _timeout(path)


def _timeout(path: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, f"another program has held it for {_LOCK_S:g} s", path)


@contextmanager
def _reading(path: str) -> Iterator[int]:
    """Open the newest file to read it, and keep all others from it meanwhile. Raises OSError."""
    while True:
        held = [os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)]
        try:
            _take(held[0], path)
            if os.path.samestat(os.fstat(held[0]), os.lstat(path)):
                yield held[0]
                return
        finally:
            _close(held)


def parts(folder: Path, stack: ExitStack) -> list[Part]:
    """All files as they are at one moment, the oldest first. Raises LedgerError."""
    try:
        with _reading(str(folder / CURRENT)) as newest:
            found = [_part(path, number, stack) for number, path in numbered(folder).items()]
            status = os.fstat(newest)
            # a rotation that was cut short has given it a number already
            found = [each for each in found if not os.path.samestat(os.fstat(each.file.fileno()), status)]
            number = read_number(newest) or 1 + max((each.number for each in found), default=0)
            return [*found, _part(folder / CURRENT, number, stack)]
    except FileNotFoundError:
        return [_part(path, number, stack) for number, path in numbered(folder).items()]
    except OSError as error:
        raise LedgerError(f"the ledger {folder} cannot be read: {error.strerror or error}") from error


def _part(path: Path, number: int, stack: ExitStack) -> Part:
    file = stack.enter_context(path.open("rb"))
    return Part(number, path.name, file, os.fstat(file.fileno()).st_size)


def raw_lines(part: Part) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their places, each with its newline if it has one."""
    left, place = part.size, 0
    while left > 0 and (raw := part.file.readline(min(left, 4 * MAX_LINE))):
        left -= len(raw)
        place += 1
        yield place, raw
