"""The control group of a machine's user: what all of the user's processes may take together."""

from __future__ import annotations

import posix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ROOT = "/sys/fs/cgroup"
_FIRST = f"{_ROOT}/first"
_USER = f"{_ROOT}/user"
_PERIOD_US = 100_000
_CONTROLLERS = ("memory", "pids", "cpu", "cpuset", "io")
_MAX_NAMESPACES = "/proc/sys/user/max_cgroup_namespaces"
_UNSUPPORTED = 95


def make() -> None:
    """Mount the hierarchy and make two groups in it: one for us, as no process may be above groups that are limited,
    and the user's."""
    from . import syscalls

    syscalls.mount("cgroup2", _ROOT, "cgroup2", syscalls.NOSUID | syscalls.NODEV | syscalls.NOEXEC)
    for group in (_FIRST, _USER):
        posix.mkdir(group, 0o755)
    _write(f"{_FIRST}/cgroup.procs", "0")
    with open(f"{_ROOT}/cgroup.controllers") as file:
        known = file.read().split()
    for name in _CONTROLLERS:
        if name in known:
            _write(f"{_ROOT}/cgroup.subtree_control", f"+{name}")


def limit(params: dict[str, Any]) -> None:
    memory, pids = params.get("memory"), params.get("pids")
    if memory:
        _set("memory.max", str(int(memory)))
        if posix.access(f"{_USER}/memory.swap.max", posix.W_OK):
            _set("memory.swap.max", "0")
    if pids:
        _set("pids.max", str(int(pids)))


def bar_namespaces() -> None:
    """In one of its own root of the box could mount its group, whose files are root's, and change its limits."""
    if posix.access(_MAX_NAMESPACES, posix.W_OK):
        _write(_MAX_NAMESPACES, "0")


def limit_processor(cpus: float | None) -> None:
    if cpus:
        _set("cpu.max", f"{int(cpus * _PERIOD_US)} {_PERIOD_US}")


def _set(name: str, value: str) -> None:
    try:
        _write(f"{_USER}/{name}", value)
    except FileNotFoundError:
        raise OSError(_UNSUPPORTED, f"this kernel has no {name}: it cannot hold that limit") from None


def join() -> None:
    """This process, and all that it will start."""
    _write(f"{_USER}/cgroup.procs", "0")


def members() -> list[int]:
    with open(f"{_USER}/cgroup.procs") as file:
        return [int(pid) for pid in file]


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)
