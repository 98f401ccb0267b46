"""Locks on files and folders: each ends with whoever holds it, however that ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skerry.errors import ProviderError

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.001, 0.05


def take(fd: int) -> bool:
    """False if another has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def holding(folder: Path) -> Iterator[None]:
    """Hold a folder meanwhile. Raises BlockingIOError if another has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)


def wait(fd: int, timeout_s: float, held: str) -> None:
    """Take it once it is free; `held` says what is wrong if it is not in time."""
    for delay_s in _until_taken(fd, timeout_s, held):
        time.sleep(delay_s)


async def wait_async(fd: int, timeout_s: float, held: str) -> None:
    """The same for who has other things to do meanwhile."""
    for delay_s in _until_taken(fd, timeout_s, held):
        await asyncio.sleep(delay_s)


def _until_taken(fd: int, timeout_s: float, held: str) -> Iterator[float]:
    deadline, delay_s = time.monotonic() + timeout_s, _FIRST_DELAY_S
    while not take(fd):
        if time.monotonic() > deadline:
            raise ProviderError(f"{held}; try again later")
        yield delay_s
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
