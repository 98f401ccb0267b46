"""Firecracker: small virtual machines on KVM, each in a jail of its own. Only the class is for the outside."""

from skerry.vm.firecracker.hypervisor import FirecrackerHypervisor

__all__ = ["FirecrackerHypervisor"]
