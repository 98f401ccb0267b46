"""The box's processes as its /proc tells: trees or all of them, found for a signal, and what all of them use."""

from __future__ import annotations

import posix
import time

from .spawn import MARK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .agent import Agent
    from .channel import Call

_TICK = posix.sysconf("SC_CLK_TCK")
_PAGE = posix.sysconf("SC_PAGE_SIZE")
_STAT_BYTES = 4096
_ROUNDS = 20
_SIGKILL = 9
_SIGHUP, _SIGTERM, _SIGCONT = 1, 15, 18
_last: dict[str, float] = {}


def _stats() -> Iterator[tuple[int, list[bytes]]]:
    """Each process with the fields of its `stat` that follow its name. Descriptors cost half as much as file objects,
    and a fleet's status asks hundreds of boxes at once."""
    for name in posix.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fd = posix.open(f"/proc/{name}/stat", posix.O_RDONLY | posix.O_CLOEXEC)
            try:
                fields = posix.read(fd, _STAT_BYTES).rpartition(b") ")[2].split()
            finally:
                posix.close(fd)
        except OSError:
            continue  # it has ended
        yield int(name), fields


def metrics(agent: Agent, call: Call) -> None:
    ticks = pages = count = 0
    for _pid, fields in _stats():
        count += 1
        ticks += sum(int(field) for field in fields[11:15])  # its own time and that of the children it waited for
        pages += int(fields[21])
    cpu_s, now = ticks / _TICK, time.monotonic()
    since, before = _last.get("time", agent.begin), _last.get("cpu_s", 0.0)
    _last.update(time=now, cpu_s=cpu_s)
    disk = posix.statvfs(agent.home)
    total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    call.answer(
        {
            "uptime_s": round(now - agent.begin, 3),
            "cpu_percent": round(max(0.0, 100 * (cpu_s - before) / max(now - since, 0.001)), 1),
            "cpu_s": round(cpu_s, 2),
            "memory_bytes": pages * _PAGE,
            "disk": {"total": total, "used": total - disk.f_bfree * disk.f_frsize, "free": free},
            "processes": count,
            "load": round(posix.getloadavg()[0], 2),
        }
    )


def signal_trees(roots: dict[int, str], signal: int) -> None:
    """Signal processes (pid: mark) and every descendant. A kill is repeated until none is left: they may fork."""
    for _ in range(_ROUNDS if signal == _SIGKILL else 1):
        found = _find(roots)
        for each in found:
            try:
                posix.kill(each, signal)
            except (ProcessLookupError, PermissionError):
                pass
        if not found:
            return


def others() -> list[int]:
    """Living processes of a box whose first process we are, but for those that were started from outside, such as
    agents of other users."""
    return [pid for pid, _ in _others()]


def terminate_others() -> None:
    """Ask them to end. What stands still goes on, so that it hears it; shells on a terminal only end with that."""
    for pid, fields in _others():
        for signal in (_SIGTERM, _SIGCONT, *((_SIGHUP,) if fields[4] != b"0" else ())):
            try:
                posix.kill(pid, signal)
            except (ProcessLookupError, PermissionError):
                pass


def _others() -> list[tuple[int, list[bytes]]]:
    return [
        (pid, fields)
        for pid, fields in _stats()
        if pid != 1 and fields[0] not in (b"Z", b"X") and fields[1] != b"0" and fields[20] != b"0"
    ]


def _find(roots: dict[int, str]) -> list[int]:
    """Roots, their sessions, processes that bear their marks, and the children of all of these; none that are dead."""
    parents: dict[int, int] = {}
    members: set[int] = set()
    for pid, fields in _stats():
        if fields[0] not in (b"Z", b"X"):
            parents[pid] = int(fields[1])
            if int(fields[3]) in roots:
                members.add(pid)
    marks = {f"{MARK}={mark}".encode() for mark in roots.values()}
    members |= {pid for pid in parents if pid not in members and _has_mark(pid, marks)}
    members |= roots.keys() & parents.keys()
    while children := {pid for pid, parent in parents.items() if parent in members} - members:
        members |= children
    return sorted(members - {posix.getpid()})


def _has_mark(pid: int, marks: set[bytes]) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return not marks.isdisjoint(file.read().split(b"\0"))
    except OSError:
        return False
