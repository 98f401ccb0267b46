"""Boxes as virtual machines of QEMU: with KVM where the host has it, else in software, for development and tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

from skerry.providers.machine import MachineConfig, MachineProvider
from skerry.providers.machine.boxes import Disk
from skerry.vm import launch
from skerry.vm.base import Hypervisor
from skerry.vm.folder import VmFolder


class QemuConfig(MachineConfig, frozen=True):
    channel: Literal["port", "vsock"] = "port"
    """How the host speaks with a guest: through a port of the machine, or the kernel's vsock, which needs its module
    vhost_vsock."""
    merge_memory: bool = False
    """Let the host's kernel keep one copy of equal pages of all machines, where it looks for them (KSM): a guest can
    tell by the time of a write whether another one has a page like its own."""


class Qemu(MachineProvider):
    name = "qemu"
    Config = QemuConfig
    _config: QemuConfig

    def hypervisor(self, cache: Path) -> Hypervisor:
        from skerry.vm.qemu.hypervisor import QemuHypervisor

        return QemuHypervisor(
            cache, self._sources.kernel, self._config.channel, merges_memory=self._config.merge_memory
        )

    @property
    def flavour(self) -> str:
        return self._config.channel

    def why_no_memory(self) -> str | None:
        own = self._config.channel == "vsock"
        return "with the channel vsock its machines keep their tokens in their memory; take the port" if own else None

    async def why_no_network(self) -> str | None:
        return launch.why_no_network()

    async def copy_disk(self, folder: VmFolder, disk: Disk, target: Path) -> None:
        if disk.drive.format == "raw":
            await super().copy_disk(folder, disk, target)
        else:
            from skerry.vm.qemu.qcow2 import flatten

            await asyncio.to_thread(flatten, folder.path / disk.drive.path, Path(disk.below), target, disk.size)
