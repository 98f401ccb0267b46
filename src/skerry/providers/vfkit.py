"""vfkit as the hypervisor of boxes. Not whole: a project's machine on it is, which the provider vmdocker has."""

from __future__ import annotations

from pathlib import Path

from skerry.errors import ProviderUnavailable
from skerry.providers.machine import MachineConfig, MachineProvider
from skerry.vm.base import Capabilities, Hypervisor
from skerry.vm.vfkit.hypervisor import VfkitHypervisor


class VfkitConfig(MachineConfig, frozen=True):
    program: str = "vfkit"


class Vfkit(MachineProvider):
    name = "vfkit"
    Config = VfkitConfig
    _config: VfkitConfig

    def hypervisor(self, cache: Path) -> Hypervisor:
        return VfkitHypervisor(self._config.program)

    async def _can(self) -> Capabilities:
        """A box for itself needs more of the host than vfkit and macOS have: a warden, and ports that come and go."""
        await super()._can()
        reason = "a machine for each sandbox is not made here; one for each project is"
        raise ProviderUnavailable(self.name, reason, fix="use the provider vmdocker: docs/howto/macos.md")
