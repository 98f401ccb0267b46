"""Firecracker: small virtual machines on KVM, each in a jail of its own."""

from skerry.vm.firecracker.hypervisor import Firecracker

__all__ = ["Firecracker"]
