"""What of our boxes the host sees, found without asking the provider."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from skerry.measure.memory import all_pids, processes_of, read
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


def leftovers(ids: Iterable[str]) -> dict[str, int]:
    """What the host still has of these boxes: processes, mounts, cgroups."""
    names = [id.encode() for id in ids]

    def count(texts: Iterable[bytes]) -> int:
        return sum(any(name in text for name in names) for text in texts)

    groups = (os.fsencode(folder) for folder, _, _ in os.walk("/sys/fs/cgroup"))
    return {
        "processes": count(read(pid, "cmdline") for pid in all_pids()),
        "zombies": sum(_is_our_zombie(pid) for pid in all_pids()),
        "mounts": count(Path("/proc/self/mountinfo").read_bytes().splitlines()),
        "cgroups": count(groups),
    }


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def _is_our_zombie(pid: int) -> bool:
    fields = read(pid, "stat").rpartition(b") ")[2].split()
    return bool(fields) and fields[0] == b"Z" and int(fields[1]) == os.getpid()
