"""A program that puts a machine to sleep and wakes it, and is killed at the step that it was told:
`STATE CACHE ID POINT before|after`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from providers.qemu.victim import arm

from skerry.model.spec import SandboxId
from skerry.providers.machine import memory
from skerry.providers.machine.boxes import MachineBox
from skerry.providers.machine.power import MachinePower
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.vm import guest, launch
from skerry.vm.qemu import qmp
from skerry.vm.qemu.hypervisor import QemuHypervisor as Hypervisor

POINTS: dict[str, tuple[Any, str]] = {
    "hold": (MachinePower, "hold"),
    "memory": (qmp, "send_memory"),
    "copied": (Hypervisor, "copy_memory"),
    "kept": (memory, "keep"),
    "in place": (Path, "rename"),
    "ended": (launch, "kill"),
    "launched": (launch, "start"),
    "state": (qmp, "receive_state"),
    "restored": (Hypervisor, "restore"),
    "awake": (MachineBox, "wake_up"),
    "goes on": (Hypervisor, "resume"),
    "reseeded": (guest, "reseed_and_thaw"),
    "greeted": (MachinePower, "greet"),
}
"""Where it can be killed: before or after each of these calls."""


def _counts(*args: Any) -> bool:
    """Files are renamed for other reasons too."""
    return not isinstance(args[0], Path) or ".asleep" in str(args[0])


async def main(state: str, cache: str, id: str, point: str, after: str) -> None:
    arm(*POINTS[point], after=after == "after", counts=_counts)
    provider = Qemu(QemuConfig(state_dir=state, cache_dir=cache, start_timeout_s=120))
    await provider.sleep(SandboxId(id))
    await provider.resume(SandboxId(id))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
