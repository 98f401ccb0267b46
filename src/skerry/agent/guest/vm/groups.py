"""Control group of a machine's user, which limits all of the user's processes together."""

from __future__ import annotations

import posix

from .mounts import NODEV, NOEXEC, NOSUID, mount

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_ROOT = "/sys/fs/cgroup"
_FIRST = f"{_ROOT}/first"
_USER = f"{_ROOT}/user"
_PERIOD_US = 100_000
_CONTROLLERS = ("memory", "pids", "cpu", "cpuset", "io")
_MAX_NAMESPACES = "/proc/sys/user/max_user_namespaces"
_UNSUPPORTED = 95


def make() -> None:
    """Make two groups: one for us, as no process may be above groups that are limited, and the user's."""
    mount("cgroup2", _ROOT, "cgroup2", NOSUID | NODEV | NOEXEC)
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
    """Forbid user namespaces, in which a user has every capability: root of the box could mount its group and change
    its limits, and anybody reaches most of the kernel."""
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
    """Move this process, with all that it will start, into the user's group."""
    _write(f"{_USER}/cgroup.procs", "0")


def hold(wanted: bool) -> None:
    """Let the user's processes stand still, or go on."""
    _set("cgroup.freeze", "1" if wanted else "0")


def is_held() -> bool:
    with open(f"{_USER}/cgroup.events") as file:
        return "frozen 1" in file.read()


def members() -> list[int]:
    with open(f"{_USER}/cgroup.procs") as file:
        return [int(pid) for pid in file]


def _write(path: str, text: str) -> None:
    fd = posix.open(path, posix.O_WRONLY | posix.O_CLOEXEC)
    try:
        posix.write(fd, text.encode())
    finally:
        posix.close(fd)
