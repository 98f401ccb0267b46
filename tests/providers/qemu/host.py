"""What machines leave on the host, seen without asking whoever made them."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from skerry.errors import InvalidSpec
from skerry.model.spec import SandboxId, parse_id
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.qemu import Qemu
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm import guest

Make = Callable[..., Awaitable[AsyncSandbox]]
START_S = 120.0
"""Machines in software on a busy host take their time."""

_groups: set[str] = set()
"""Control groups that a machine was seen in: they outlive a process that is not looked after."""


def left_of(state_dir: Path) -> set[str]:
    """Folders of boxes, processes that work there or have a file of it open, and their control groups."""
    found = {f"box {path.name}" for path in state_dir.iterdir() if _is_box(path.name)}
    for pid in _processes():
        if _belongs(pid, str(state_dir)):
            found.add(f"process {pid}")
            _groups.update(_groups_of(pid))
    return found | {f"cgroup {path}" for path in _groups if os.path.exists(path)}


def machines_in(state_dir: Path) -> list[int]:
    """The pids of the hypervisors themselves."""
    return [pid for pid in _processes() if _belongs(pid, str(state_dir)) and "qemu-system" in _program(pid)]


def wardens_in(state_dir: Path) -> list[int]:
    mine = [pid for pid in _processes() if _belongs(pid, str(state_dir))]
    return [pid for pid in mine if "qemu-system" not in _program(pid)]


def _processes() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            yield int(entry)


def _belongs(pid: int, folder: str) -> bool:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd").startswith(folder)
    return False


def _program(pid: int) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return ""


def _groups_of(pid: int) -> Iterator[str]:
    """Those with our name in them."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "skerry-vm-" in path:
                for root in (f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                    if os.path.exists(root + path):
                        yield root + path


def _is_box(name: str) -> bool:
    try:
        parse_id(name)
    except InvalidSpec:
        return False
    return True


async def in_guest(qemu: Qemu, id: SandboxId, command: str) -> None:
    """As root of the machine itself, which only the host can be."""
    async with guest.control(MachineBox(qemu._state_dir, id).vm, START_S) as client:
        await client.call("exec", {"shell": command}, type=dict[str, Any])
