"""Host uids that belong to one box each: nothing that a box does can touch another's processes, files or counters."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

_FIRST = 0x70000000
_COUNT = 0x0FFFFFFF
_COUNTER = Path("/run/skerry/last-uid")
"""For the whole host, not for an installation: two of them must not hand out the same uid."""


def are_available() -> bool:
    """Root may take them, unless it is only the root of a user namespace that does not have them."""
    if os.geteuid() != 0:
        return False
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(int(first) <= _FIRST and int(first) + int(count) > _FIRST + _COUNT for first, _, count in ranges)


def take(counter: Path = _COUNTER) -> int:
    """The next uid; a crash loses one at most, and none is given out twice while a quarter of a billion are left."""
    counter.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    fd = os.open(counter, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        number = (int(os.pread(fd, 16, 0) or b"0") + 1) % _COUNT
        os.pwrite(fd, b"%-12d" % number, 0)
    finally:
        os.close(fd)
    return _FIRST + number
