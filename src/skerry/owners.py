"""Who makes a sandbox: a process of this host, told apart from every other that was or will be."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from skerry.lifecycle import State
from skerry.records import Owner, Record
from skerry.spec import SandboxId

making: set[SandboxId] = set()
"""What this process is making right now, whichever of its managers does."""


@cache
def host() -> str:
    """This host in this boot, and where in it: `machine/boot/pids`. A pid means something only among its own kind."""
    return f"{_read('/etc/machine-id')}/{boot_id()}/{os.readlink('/proc/self/ns/pid')}"


@cache
def boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id")


def this_process() -> Owner:
    return Owner(host=host(), pid=os.getpid(), started=_start_time(os.getpid()) or 0)


def is_abandoned(record: Record) -> bool:
    """Whether this very process once began to make it, and no longer does."""
    return record.owner == this_process() and record.id not in making


def is_remade(record: Record) -> bool:
    """Whether somebody makes its box anew right now, as far as can be known from here."""
    if record.remaker is None or record.state is State.LOST:
        return False
    if record.remaker == this_process():
        return record.id in making
    return is_alive(record.remaker) is not False


def is_alive(owner: Owner) -> bool | None:
    """Whether that very process lives; None if it is on another machine or in another container, and nobody here can
    know. After a restart of this machine none of its processes lives."""
    if owner.host == host():
        return _start_time(owner.pid) == owner.started
    machine, boot, _ = host().split("/", 2)
    there = owner.host.split("/", 2)
    return False if there[0] == machine and there[1:2] != [boot] else None


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
