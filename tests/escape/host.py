"""The witness outside: what no box may change, and what may not outlive one."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

_WATCHED = (
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/tainted",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/user/max_user_namespaces",
    "/etc/passwd",
    "/etc/hosts",
    "/usr/bin/env",
)
_TARGETS = ("/x", "/usr/x", "/etc/x", "/dev/x", "/home/x", "/var/x", "/tmp/kmsg", "/dev/shm/kmsg")
_CLOCK = time.time() - time.monotonic()


def state() -> dict[str, str]:
    """What no box may change."""
    found = {path: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in _WATCHED if os.path.exists(path)}
    lines = Path("/proc/self/mounts").read_text().splitlines()
    found["mounts"] = "\n".join(line for line in lines if not line.split()[1].startswith(("/run/", "/tmp/")))
    found["made"] = str([path for path in _TARGETS if os.path.exists(path)])
    found["clock"] = str(abs(time.time() - time.monotonic() - _CLOCK) < 5)
    return found


def bearing(marker: str) -> int:
    """How many processes have this text among their arguments."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            count += marker.encode() in (entry / "cmdline").read_bytes()
        except OSError:
            continue
    return count


def threads() -> Counter[str]:
    """How many there are in each namespace of processes but ours: every box has one, and daemons and other tests, which
    come and go meanwhile, are in ours."""
    found: Counter[str] = Counter()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            found[os.readlink(f"/proc/{pid}/ns/pid")] += len(os.listdir(f"/proc/{pid}/task"))
    del found[os.readlink("/proc/self/ns/pid")]
    return found


def control_groups(text: str) -> list[str]:
    """Those that have this text in their names. The groups of others may come and go meanwhile."""
    return [
        os.path.join(folder, name) for folder, names, _ in os.walk("/sys/fs/cgroup") for name in names if text in name
    ]
