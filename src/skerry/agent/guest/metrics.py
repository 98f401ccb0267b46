"""What the box uses, as far as its own /proc tells."""

from __future__ import annotations

import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent
    from .channel import Call

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 4096
_last: dict[str, float] = {}


def metrics(agent: Agent, call: Call) -> None:
    cpu_s, memory, count = _processes()
    now = time.monotonic()
    since, before = _last.get("time", agent.begin), _last.get("cpu_s", 0.0)
    _last.update(time=now, cpu_s=cpu_s)
    disk = os.statvfs(agent.home)
    call.answer(
        {
            "uptime_s": round(now - agent.begin, 3),
            "cpu_percent": round(max(0.0, 100 * (cpu_s - before) / max(now - since, 0.001)), 1),
            "cpu_s": round(cpu_s, 2),
            "memory_bytes": memory,
            "disk": _disk(disk),
            "processes": count,
            "load": round(os.getloadavg()[0], 2),
        }
    )


def _disk(info: os.statvfs_result) -> dict[str, Any]:
    total, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    return {"total": total, "used": total - info.f_bfree * info.f_frsize, "free": free}


def _processes() -> tuple[float, int, int]:
    ticks = pages = count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = _read(f"/proc/{name}/stat").rpartition(b") ")[2].split()
        except OSError:
            continue
        count += 1
        ticks += sum(int(field) for field in fields[11:15])  # its own time and that of the children it waited for
        pages += int(fields[21])
    return ticks / _TICK, pages * _PAGE, count


def _read(path: str) -> bytes:
    """Half the price of a file object: a fleet's status asks hundreds of boxes at once."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _STAT_BYTES)
    finally:
        os.close(fd)
