"""Boxes as virtual machines: what every provider of them shares, whatever runs the machines."""

from skerry.providers.machine.provider import MachineProvider
from skerry.providers.machine.settings import MachineConfig

__all__ = ["MachineConfig", "MachineProvider"]
