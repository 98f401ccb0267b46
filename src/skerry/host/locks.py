"""Locks on files and folders: each ends with whoever holds it, however that ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry import aio
from skerry.errors import ProviderError

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.001, 0.05


def take(fd: int) -> bool:
    """Take the lock; False if another has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def release(fd: int) -> None:
    """Let it go, also for a child that was just forked and has a copy of the descriptor until it runs its program:
    closing ours would leave the lock with that."""
    fcntl.flock(fd, fcntl.LOCK_UN)


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder meanwhile. Raises BlockingIOError if another has it."""
    fd = open_folder(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def open_folder(path: Path) -> int:
    """Open a folder to lock it."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def is_in_place(fd: int, path: Path) -> bool:
    """Whether a file that was locked is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def wait(fd: int, timeout_s: float, held: str) -> None:
    """Take the lock once it is free. Raises ProviderError with `held` if that takes too long."""
    for delay_s in _until_taken(fd, timeout_s, held):
        time.sleep(delay_s)


async def wait_async(fd: int, timeout_s: float, held: str) -> None:
    """Do the same as `wait` without blocking the event loop."""
    for delay_s in _until_taken(fd, timeout_s, held):
        await asyncio.sleep(delay_s)


def _until_taken(fd: int, timeout_s: float, held: str) -> Iterator[float]:
    if take(fd):
        return
    for delay_s in aio.backoff(_FIRST_DELAY_S, _LONGEST_DELAY_S, timeout_s):
        yield delay_s
        if take(fd):
            return
    raise ProviderError(f"{held}; try again later")
