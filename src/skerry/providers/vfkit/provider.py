"""vfkit as the hypervisor of boxes; each boots from its kernel, since vfkit saves none."""

from __future__ import annotations

from pathlib import Path

from skerry.errors import ProviderUnavailable
from skerry.providers.machine import MachineConfig, MachineProvider
from skerry.vm import vfkit
from skerry.vm.base import Capabilities, Hypervisor


class VfkitConfig(MachineConfig, frozen=True):
    program: str = "vfkit"


class Vfkit(MachineProvider):
    name = "vfkit"
    Config = VfkitConfig
    _config: VfkitConfig

    def hypervisor(self, cache: Path) -> Hypervisor:
        return vfkit.Vfkit(self._config.program)

    async def _can(self) -> Capabilities:
        """The hypervisor is whole; a box also needs the interpreter for its guest, which is taken from a Linux host."""
        await super()._can()
        reason = "its machines can be started here, but what runs in them can only be made on Linux yet"
        raise ProviderUnavailable(self.name, reason, fix="run skerry in a Linux machine: docs/howto/macos.md")
