"""What an engine left on this machine: processes, mounts and cgroups that its daemon no longer ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from . import incus_leftovers

_PROGRAMS = ("conmon", "containerd", "docker", "exe", "podman", "runc", "runsc")
"""How the programs of an engine begin. A developer's own client or editor in the folder is none of them."""

_CGROUPS = Path("/sys/fs/cgroup")
_GONE_S = 10.0


def processes(folder: Path) -> list[int]:
    """The engine's own programs, and whatever runs in its containers."""
    ids = container_ids(folder)
    return [
        pid
        for pid in _pids()
        if _is_program_of(pid, folder) or _is_contained(pid, ids) or incus_leftovers.is_process(pid, folder, _read)
    ]


def mounts(folder: Path) -> list[str]:
    """The deepest first, as they have to be undone."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    below = [point for point in points if Path(point).is_relative_to(folder)]
    return sorted(below, key=len, reverse=True)


def container_ids(folder: Path) -> list[str]:
    found = [*folder.glob("data/containers/*"), *folder.glob("root/overlay-containers/*"), *folder.glob("c/*/*/moby/*")]
    return sorted({path.name for path in found if len(path.name) == 64})


def clear(folder: Path) -> None:
    """End what runs, undo what is mounted; the folder's files stay."""
    ids = [*container_ids(folder), *incus_leftovers.container_names(folder)]
    sockets = [Path(path.read_text().removeprefix("unix://")) for path in folder.glob("c/state/*/moby/*/address")]
    _end_all(folder)
    for point in mounts(folder):
        subprocess.run(["umount", "--lazy", point], check=False, capture_output=True, timeout=10)
    incus_leftovers.remove_network(folder)
    for path in sockets:
        path.unlink(missing_ok=True)
    for group in _cgroups(ids):
        with suppress(OSError):
            group.rmdir()


def _end_all(folder: Path) -> None:
    deadline = time.monotonic() + _GONE_S
    while left := processes(folder):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes of {folder} do not end: {left}")
        time.sleep(0.02)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _is_program_of(pid: int, folder: Path) -> bool:
    words = _read(pid, "cmdline").split("\0")
    return Path(words[0]).name.startswith(_PROGRAMS) and any(f"{folder}/" in word for word in words)


def _is_contained(pid: int, ids: list[str]) -> bool:
    if _read(pid, "stat").rpartition(")")[2].split()[:1] in (["Z"], []):
        return False
    groups = _read(pid, "cgroup")
    return any(id in groups for id in ids)


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""


def _cgroups(ids: list[str]) -> Iterator[Path]:
    """The deepest first."""
    for path, _, _ in os.walk(_CGROUPS, topdown=False):
        if any(id in path for id in ids):
            yield Path(path)
