"""Who makes a sandbox: a process of this host, told apart from every other that was or will be."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from skerry.records import Owner


@cache
def host() -> str:
    """This host in this boot. `machine/boot`, so that the same machine after a restart is recognised."""
    return f"{_read('/etc/machine-id')}/{boot_id()}"


@cache
def boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def this_process() -> Owner:
    return Owner(host=host(), pid=os.getpid(), started=_start_time(os.getpid()) or 0)


def is_alive(owner: Owner) -> bool | None:
    """Whether that very process lives; None if it is on another machine and nobody here can know."""
    if owner.host == host():
        return _start_time(owner.pid) == owner.started
    return False if owner.host.partition("/")[0] == host().partition("/")[0] else None


def _start_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
