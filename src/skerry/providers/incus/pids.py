"""A process of a container on this host, by its cgroup, which no box can forge: to ask Incus for it costs 30 ms."""

from __future__ import annotations

from pathlib import Path

_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/pids")
"""Where the groups are on hosts with cgroup v2, with both, and with v1."""
_DEFAULT = "default"


def pid_of(project: str, container: str) -> int | None:
    """Any process in it, since all see the same files; None where its group is not to be seen."""
    name = container if project == _DEFAULT else f"{project}_{container}"
    for root in _ROOTS:
        try:
            pids = Path(root, f"lxc.payload.{name}", "cgroup.procs").read_text().split()
        except OSError:
            continue
        seen = [int(pid) for pid in pids if pid != "0"]
        if seen:
            return min(seen)
    return None
