"""What of our boxes the host sees, found without asking the provider."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

_TRIES = 40
_PAUSE_S = 0.05


async def warm_up(provider: Provider) -> None:
    """Make boxes until one is forked, and so one process with no launcher beside it; or long enough."""
    for _ in range(_TRIES):
        sandbox = await AsyncSandbox.create(Spec(), provider)
        try:
            if len(processes_of(sandbox.id)) == 1:
                return
        finally:
            await sandbox.destroy()
        await asyncio.sleep(_PAUSE_S)


def processes_of(id: str) -> set[int]:
    """Every process that bears the id, and every other one in the same pid namespaces."""
    marked = {pid for pid in _pids() if id.encode() in _read(pid, "cmdline")}
    inside = {_namespace(pid) for pid in marked} - {_namespace(os.getpid()), None}
    return marked | {pid for pid in _pids() if _namespace(pid) in inside}


def private_memory(pid: int) -> int:
    """Bytes that only this process has."""
    lines = _read(pid, "smaps_rollup").decode().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def leftovers(ids: Iterable[str]) -> dict[str, int]:
    """What the host still has of these boxes: processes, mounts, cgroups."""
    names = [id.encode() for id in ids]

    def count(texts: Iterable[bytes]) -> int:
        return sum(any(name in text for name in names) for text in texts)

    groups = (os.fsencode(folder) for folder, _, _ in os.walk("/sys/fs/cgroup"))
    return {
        "processes": count(_read(pid, "cmdline") for pid in _pids()),
        "zombies": sum(_is_our_zombie(pid) for pid in _pids()),
        "mounts": count(Path("/proc/self/mountinfo").read_bytes().splitlines()),
        "cgroups": count(groups),
    }


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return None


def _is_our_zombie(pid: int) -> bool:
    fields = _read(pid, "stat").rpartition(b") ")[2].split()
    return bool(fields) and fields[0] == b"Z" and int(fields[1]) == os.getpid()
