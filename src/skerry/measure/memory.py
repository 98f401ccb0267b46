"""Memory of a sandbox as the host sees it: its processes are found in /proc, without asking the provider."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def processes_of(id: str) -> set[int]:
    """Every process that bears the id, those below it, and every other one in the same pid namespaces; none where a
    provider keeps its boxes elsewhere."""
    pids = list(all_pids())
    marked = {pid for pid in pids if id.encode() in read(pid, "cmdline")} - {os.getpid()}
    inside = {_namespace(pid) for pid in marked} - {_namespace(os.getpid()), None}
    return marked | {pid for pid in pids if parent_of(pid) in marked or _namespace(pid) in inside}


def private_memory(pid: int) -> int:
    """Bytes that only this process has."""
    return _sum(pid, b"Private_")


def proportional_memory(pid: int) -> int:
    """Bytes, with its share of what it has in common with others."""
    return _sum(pid, b"Pss:")


def available() -> int:
    """Bytes that this host could still give to processes."""
    lines = Path("/proc/meminfo").read_bytes().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(b"MemAvailable:"))


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def read(pid: int, name: str) -> bytes:
    """A file of a process; empty if it has ended or is another's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def parent_of(pid: int) -> int:
    fields = read(pid, "stat").rpartition(b") ")[2].split()
    return int(fields[1]) if fields else 0


def _sum(pid: int, field: bytes) -> int:
    lines = read(pid, "smaps_rollup").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None
