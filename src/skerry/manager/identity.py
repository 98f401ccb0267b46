"""Process identity: the process that makes a sandbox, told apart from every other that was or will be."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from skerry import mac
from skerry.clock import boot_id, machine_id
from skerry.model.records import Owner, Record
from skerry.model.spec import SandboxId
from skerry.model.states import State

making: set[SandboxId] = set()
"""Sandboxes that this process is making right now, whichever of its managers does."""


@contextmanager
def being_made(id: SandboxId) -> Iterator[None]:
    """Note that this process makes a sandbox, for as long as it does."""
    making.add(id)
    try:
        yield
    finally:
        making.discard(id)


@cache
def host() -> str:
    """This host in this boot, and where in it: `machine/boot/pids`. A pid means something only among its own kind."""
    pids = "pids" if sys.platform == "darwin" else os.readlink("/proc/self/ns/pid")
    return f"{machine_id()}/{boot_id()}/{pids}"


def this_process() -> Owner:
    return Owner(host=host(), pid=os.getpid(), started=_start_time(os.getpid()) or 0)


def is_abandoned(record: Record) -> bool:
    """Whether this very process once began to make it, and no longer does."""
    return record.owner == this_process() and record.id not in making


def is_rebuilt(record: Record) -> bool:
    """Whether somebody makes its box anew right now, as far as can be known from here."""
    if record.remaker is None or record.state is State.LOST:
        return False
    if record.remaker == this_process():
        return record.id in making
    return may_live(record.remaker)


def may_live(owner: Owner) -> bool:
    return is_alive(owner) is not False


def is_alive(owner: Owner) -> bool | None:
    """Whether that very process lives; None if it is on another machine or in another container, and nobody here can
    know. After a restart of this machine none of its processes lives."""
    if owner.host == host():
        return _start_time(owner.pid) == owner.started
    machine, boot, _ = host().split("/", 2)
    there = owner.host.split("/", 2)
    return False if there[0] == machine and there[1:2] != [boot] else None


def _start_time(pid: int) -> int | None:
    if sys.platform == "darwin":
        return mac.start_time(pid)
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
