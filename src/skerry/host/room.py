"""Room: what this host has left for boxes, in one look that takes microseconds."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import msgspec

from skerry.host import cgroup

_PROC = Path("/proc")
_LONGEST = 16384
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file "),
    2: ("memory.max", "memory.current", b"inactive_file "),
}
"""Limit of a group, what it uses, and what of that is the page cache's and given back when it is needed."""


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """What a host has left. None is what it does not tell, or was not asked."""

    memory_bytes: int | None = None
    """All of it, or as much as this process and what it starts may have."""
    memory_free_bytes: int | None = None
    """What new processes can have without swapping."""
    cpu_pressure: float | None = None
    """Percent of the last 10 s in which something waited for a processor."""
    memory_pressure: float | None = None
    """Percent of the last 10 s in which all that had work stood still for want of memory."""
    disk_free_bytes: int | None = None
    inodes_free: int | None = None


def look(folder: str, *, cpu: bool = True, memory: bool = True, proc: Path = _PROC) -> Room:
    """What there is now, on disk where a folder is; pressure of `cpu` and `memory` if that is asked for."""
    total, free = _memory(proc)
    disk, inodes = _disk(folder)
    return Room(
        memory_bytes=total,
        memory_free_bytes=free,
        cpu_pressure=_pressure(proc, "cpu", b"some") if cpu else None,
        memory_pressure=_pressure(proc, "memory", b"full") if memory else None,
        disk_free_bytes=disk,
        inodes_free=inodes,
    )


def _memory(proc: Path) -> tuple[int | None, int | None]:
    """Memory of the host, or of a control group that we and our boxes are in and that has less, and what is free."""
    try:
        text = _read(proc / "meminfo")
        total, free = (int(_after(text, name).split(maxsplit=1)[0]) * 1024 for name in (b"MemTotal:", b"MemAvailable:"))
    except (OSError, ValueError, IndexError):
        return None, None
    for path, version in _groups(proc, os.getpid()):
        try:
            limit, used, cache = _FILES[version]
            most = int(_read(path / limit))  # of a group without one v2 has a word, and v1 more than there is
            taken = int(_read(path / used)) - int(_after(_read(path / "memory.stat"), cache).split(maxsplit=1)[0])
        except (OSError, ValueError, IndexError):
            continue
        total, free = min(total, most), max(0, min(free, most - taken))
    return total, free


@lru_cache(4)
def _groups(proc: Path, pid: int) -> tuple[tuple[Path, int], ...]:
    """The control groups with a limit of memory that holds boxes too. Of v1 boxes are below our own group; of v2 they
    are above it, if there is any above."""
    try:
        found = cgroup.ours("memory", proc / str(pid))
    except OSError:
        return ()
    groups = found[1:] or found if found and found[0].version == 2 else found
    return tuple((path, version) for path, version in groups if _is_bounded(path / _FILES[version][0]))


def _is_bounded(limit: Path) -> bool:
    try:
        return int(_read(limit)) < 1 << 62
    except (OSError, ValueError):
        return False


def _pressure(proc: Path, of: str, line: bytes) -> float | None:
    """The average of 10 s that the kernel tells, if it was built and started to tell any."""
    try:
        return float(_after(_read(proc / "pressure" / of), line + b" avg10=").split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return None


def _disk(folder: str) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None


def _after(text: bytes, name: bytes) -> bytes:
    """What follows a name at the beginning of a line. Raises ValueError if none begins so."""
    at = (b"\n" + text).find(b"\n" + name)
    if at < 0:
        raise ValueError(f"no line begins with {name!r}")
    return text[at + len(name) :]


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _LONGEST)
    finally:
        os.close(descriptor)
