"""Whether KVM really runs a guest here: it can be there, and even run some code, and still run no kernel."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from skerry.host import uids
from skerry.host.processes import boot_id
from skerry.vm.qemu.host import remember

DEVICE = "/dev/kvm"
_OTHERS = stat.S_IROTH | stat.S_IWOTH
_GROUP = stat.S_IRGRP | stat.S_IWGRP
SAID = "skerry: this kernel runs"
"""What a guest with `skerry.probe` on its command line says before it ends."""


class Access(NamedTuple):
    """How the user of a machine comes to use KVM."""

    group: int | None
    """The group that it needs; None if it needs none."""


def access(device: str = DEVICE) -> Access | None:
    """None if there is no KVM, or a machine's user cannot be let use it: root's own group is given to nobody."""
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    if not uids.are_available() or status.st_mode & _OTHERS == _OTHERS:
        return Access(None)
    return Access(status.st_gid) if status.st_gid and status.st_mode & _GROUP == _GROUP else None


async def works(cache: Path, version: str, try_out: Callable[[], Awaitable[bool]]) -> bool:
    """What was found out before, or what trying says; it holds until this host boots anew or has another QEMU."""
    key = hashlib.sha256(f"{boot_id()} {version}".encode()).hexdigest()[:16]
    verdict = cache / f"kvm-{key}"
    try:
        return verdict.read_text() == "works"
    except FileNotFoundError:
        found = await try_out()
    remember(verdict, "works" if found else "does not run a guest")
    return found
