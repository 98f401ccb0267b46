"""QEMU: with KVM where that really runs a guest, else in software."""
