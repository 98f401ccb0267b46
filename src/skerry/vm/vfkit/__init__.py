"""Machines on macOS: vfkit, which runs them on Apple's Virtualization framework."""

from .hypervisor import Vfkit

__all__ = ["Vfkit"]
