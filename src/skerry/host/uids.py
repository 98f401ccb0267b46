"""Users of boxes: host uids that belong to one box each, so that none touches another's; and names of users inside."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_FIRST = 0x70000000
_COUNT = 0x0FFFFFFF
_COUNTER = Path("/run/skerry/last-uid")
"""For the whole host, not for an installation: two of them must not hand out the same uid."""
_RESERVED = Path("/var/lib/skerry/last-uid")
"""Number up to which they were given out before the host was booted: a box that is stopped has files of its uid."""
_STEP = 1024


def are_available() -> bool:
    """Whether we may take them: root may, unless it is the root of a user namespace that does not have them."""
    if os.geteuid() != 0:
        return False
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(int(first) <= _FIRST and int(first) + int(count) > _FIRST + _COUNT for first, _, count in ranges)


def is_one(uid: int) -> bool:
    """Whether it is of those that boxes get."""
    return _FIRST <= uid < _FIRST + _COUNT


def take(counter: Path = _COUNTER, reserved: Path = _RESERVED) -> int:
    """Take the next uid; a crash or a boot loses a few at most, and none is given out twice within a quarter of a
    billion."""
    fd = _open(counter)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        last = os.pread(fd, 16, 0)
        most = _read(reserved)
        number = (int(last or most) + 1) % _COUNT
        if not number < most <= number + _STEP:
            _reserve(reserved, number + _STEP)
        os.pwrite(fd, b"%-12d" % number, 0)
    finally:
        os.close(fd)
    return _FIRST + number


def _open(path: Path) -> int:
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _read(path: Path) -> int:
    try:
        return int(path.read_bytes())
    except (FileNotFoundError, ValueError):  # the host went down before it was whole
        return 0


def _reserve(path: Path, number: int) -> None:
    """Note it so that it is there after a crash of the host, before any of the numbers below it is given out."""
    fd = _open(path)
    try:
        os.pwrite(fd, b"%-12d" % number, 0)
        os.fsync(fd)
    finally:
        os.close(fd)


def numbers(passwd: str, name: str) -> tuple[int, int] | None:
    """Uid and gid by a name that a box's own list of users has."""
    for line in passwd.splitlines():
        entry = line.split(":")
        if len(entry) > 3 and entry[0] == name and entry[2].isdigit() and entry[3].isdigit():
            return int(entry[2]), int(entry[3])
    return None


def agent_config(first: Mapping[str, Any]) -> str:
    """The configuration of a second agent, for another user, from the first one's: it serves one stream, its own."""
    return msgspec.json.encode({**first, "listen": {"stdio": True}, "lifetime_s": None, "idle_s": None}).decode()
