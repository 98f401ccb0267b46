"""Boxes as virtual machines of QEMU."""

from skerry.providers.qemu.provider import Qemu, QemuConfig

__all__ = ["Qemu", "QemuConfig"]
