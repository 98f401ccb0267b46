"""WSL2 as the hypervisor of boxes, as far as it goes."""

from __future__ import annotations

from pathlib import Path

from skerry.errors import ProviderUnavailable
from skerry.providers.base import Isolation
from skerry.providers.machine import MachineConfig, MachineProvider
from skerry.vm import wsl
from skerry.vm.base import Capabilities, Hypervisor


class WslConfig(MachineConfig, frozen=True):
    program: str = wsl.commands.PROGRAM
    disks: str = "C:\\skerry"
    """The folder of Windows in which the disks of distributions are."""


class Wsl(MachineProvider):
    """Its grade is that of namespaces: all distributions have one kernel, and the one that it is used from too."""

    name = "wsl"
    isolation = Isolation.NAMESPACE
    Config = WslConfig
    _config: WslConfig

    def hypervisor(self, cache: Path) -> Hypervisor:
        return wsl.Wsl(self._config.disks, self._config.program)

    async def _can(self) -> Capabilities:
        """The hypervisor is whole; a box also needs a control group, and distributions have one tree of them."""
        await super()._can()
        reason = "distributions can be started here, but the limits of a box in one cannot be held yet"
        fix = "use the provider local, or qemu with KVM, in this distribution: docs/howto/wsl.md"
        raise ProviderUnavailable(self.name, reason, fix=fix)
