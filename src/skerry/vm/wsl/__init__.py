"""Machines on Windows: a distribution of WSL2 for each, all on the one kernel of WSL."""

from . import commands
from .hypervisor import Wsl

__all__ = ["Wsl", "commands"]
