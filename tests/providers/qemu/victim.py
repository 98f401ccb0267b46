"""A program that makes a machine and is killed at the step that it was told: `STATE CACHE ID POINT before|after`."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from skerry.model.spec import SandboxId, Spec
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.machine.volumes import DiskVolumes
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.vm import guest, launch
from skerry.vm.folder import VmFolder
from skerry.vm.qemu.hypervisor import QemuHypervisor as Hypervisor

POINTS: dict[str, tuple[Any, str]] = {
    "box.folder": (MachineBox, "make"),
    "box.meta": (MachineBox, "write_meta"),
    "machine.folder": (VmFolder, "make"),
    "volume": (DiskVolumes, "make"),
    "disk": (Hypervisor, "make_disk"),
    "box.disk": (MachineBox, "write_disk"),
    "machine.note": (VmFolder, "write"),
    "warden": (launch.Child, "answer"),
    "machine.processes": (VmFolder, "write_processes"),
    "restore": (Hypervisor, "restore"),
    "greet": (guest, "greet"),
    "become": (guest, "become"),
    "whole": (MachineBox, "mark_whole"),
}
"""Where it can be killed: before or after each of these calls."""
TEMPLATE = {"template.save": (Hypervisor, "save")}
"""The same, where there is no template yet."""


def arm(owner: object, name: str, *, after: bool, counts: Callable[..., bool] = lambda *_: True) -> None:
    """Die before or after the first call of a function whose arguments count."""
    original = getattr(owner, name)

    async def call_async(*args: Any, **options: Any) -> Any:
        if not after:
            die()
        await original(*args, **options)
        die()

    def call(*args: Any, **options: Any) -> Any:
        if not counts(*args):
            return original(*args, **options)
        if not after:
            die()
        original(*args, **options)
        return die()

    setattr(owner, name, call_async if inspect.iscoroutinefunction(original) else call)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def main(state: str, cache: str, id: str, point: str, after: str) -> None:
    arm(*{**POINTS, **TEMPLATE}[point], after=after == "after")
    provider = Qemu(QemuConfig(state_dir=state, cache_dir=cache, start_timeout_s=120))
    await provider.create(SandboxId(id), Spec(provider="qemu"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
