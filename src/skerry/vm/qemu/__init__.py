"""QEMU: machines with KVM, or emulated. From outside only `hypervisor.QemuHypervisor` and `qcow2.flatten` are used."""
