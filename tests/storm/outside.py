"""What bounds a process, read from the kernel by whoever has nothing to do with the one that made it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

LIMITS = {"memory": 96 << 20, "pids": 50, "cpus": 0.5}
"""As settings of a provider: nobody asks for them, so that one that is not held would be no reason to refuse."""
_FILES = {
    "memory": ("memory.limit_in_bytes", "memory.max"),
    "pids": ("pids.max", "pids.max"),
    "cpu": ("cpu.cfs_quota_us", "cpu.max"),
}


class Group(NamedTuple):
    """A control group and what it allows; the quota of `cpu` is in microseconds."""

    path: Path
    most: float


def group_of(pid: int, controller: str) -> Group:
    """The tightest that the process is in."""
    found = [Group(path, _most(path, controller)) for path in _groups(pid, controller)]
    return min(found, key=lambda group: group.most, default=Group(Path("/none"), math.inf))


def processes_of(word: str) -> set[int]:
    """Those in a pid namespace of their own that have it among their arguments."""
    found = set()
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            words = Path("/proc", entry, "cmdline").read_text(errors="replace").split("\0")
            if word in words and os.readlink(f"/proc/{entry}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                found.add(int(entry))
    return found


def at_work_in(folder: str) -> set[int]:
    found = set()
    for entry in os.listdir("/proc"):
        with suppress(OSError):
            if entry.isdigit() and os.readlink(f"/proc/{entry}/cwd").startswith(folder):
                found.add(int(entry))
    return found


def groups_named(words: Iterable[str]) -> set[str]:
    """Control groups with one of these in their name. Not by rglob: those of others come and go meanwhile."""
    words = list(words)
    return {
        f"{folder}/{name}"
        for folder, names, _ in os.walk("/sys/fs/cgroup")
        for name in names
        if any(word in name for word in words)
    }


def _groups(pid: int, controller: str) -> Iterator[Path]:
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or not controllers:
            for root in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup"):
                here = Path(root + path)
                if here.is_dir():
                    yield from (each for each in (here, *here.parents) if str(each).startswith(f"{root}/"))
                    break


def _most(group: Path, controller: str) -> float:
    for file in _FILES[controller]:
        with suppress(OSError):
            text = (group / file).read_text().split()[0]
            return math.inf if text in ("max", "-1") else int(text)
    return math.inf
