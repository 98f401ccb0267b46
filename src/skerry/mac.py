"""Facts of a host that is a Mac: what Linux tells in /proc, macOS tells by programs."""

from __future__ import annotations

import time

_TIMEOUT_S = 10.0


def boot_id() -> str:
    """Name of this boot; `unknown` if it is not told."""
    return _said("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid").strip() or "unknown"


def start_time(pid: int) -> int | None:
    """When a process was started, in seconds of the wall clock; None if it has ended."""
    state, _, since = _said("ps", "-o", "stat=,lstart=", "-p", str(pid)).strip().partition(" ")
    if not since or state.startswith("Z"):
        return None
    try:
        return int(time.mktime(time.strptime(since.strip())))
    except ValueError:
        return None


def _said(*argv: str) -> str:
    import subprocess

    env = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"}
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=_TIMEOUT_S, env=env).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
