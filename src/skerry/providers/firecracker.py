"""Boxes as virtual machines of Firecracker, for hosts with KVM: the smallest thing that has a kernel of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skerry.providers.base import Enforcement
from skerry.providers.machine import MachineConfig, MachineProvider
from skerry.vm.base import Hypervisor


class FirecrackerConfig(MachineConfig, frozen=True):
    program: str = "firecracker"
    """A name in PATH, or a path."""
    jailer: str = "jailer"
    """The same; empty: machines have a uid of their own but no jail."""


class Firecracker(MachineProvider):
    name = "firecracker"
    Config = FirecrackerConfig
    _config: FirecrackerConfig

    def hypervisor(self, cache: Path) -> Hypervisor:
        from skerry.vm.firecracker import FirecrackerHypervisor

        return FirecrackerHypervisor(
            cache, self._sources.kernel, program=self._config.program, jailer=self._config.jailer
        )

    async def why_no_network(self) -> str | None:
        return "Firecracker has no user-mode network; leave network out, or use the provider qemu"

    async def describe(self) -> Mapping[str, Enforcement]:
        from skerry.vm.firecracker import jail as jails
        from skerry.vm.firecracker import probe

        found = probe.find(self._config.program, self._config.jailer)
        why_not = jails.why_no_jail(self._state_dir, found)
        jail = Enforcement(by=f"{found.jailer}") if why_not is None else Enforcement(why_not=why_not)
        against = probe.why_not_good(found.version)
        version = Enforcement(by=found.version) if against is None else Enforcement(why_not=against)
        return {**await super().describe(), "version": version, "jail": jail}
