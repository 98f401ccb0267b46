"""Boxes as virtual machines: all that their providers share, whatever hypervisor runs the machines.

A provider subclasses MachineProvider and names its hypervisor; nothing else here is for the outside.
"""

from skerry.providers.machine.plan import MachineConfig
from skerry.providers.machine.provider import MachineProvider

__all__ = ["MachineConfig", "MachineProvider"]
