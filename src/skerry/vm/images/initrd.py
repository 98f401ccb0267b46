"""The file system that a kernel starts with: one shell, the modules for the drives and the channel, and a script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from skerry.vm.images import cpio
from skerry.vm.images.vmlinux import ELF

MODULES = (
    "virtio_pci",
    "virtio_mmio",
    "virtio_blk",
    "virtio_console",
    "vmw_vsock_virtio_transport",
    "virtio_net",
    "virtio_rng",
    "overlay",
)
"""For drives, the channel, the network and what else every machine has."""
_APPLETS = ("sh", "mount", "mkdir", "insmod", "sleep", "switch_root", "reboot", "poweroff")
_FOLDERS = ("bin", "dev", "modules", "proc", "root")
_ELF64 = 2
_PT_INTERP = 3


def script(modules: Iterable[str]) -> bytes:
    """The first program."""
    text = Path(__file__).with_name("init.sh").read_text()
    return text.replace("@MODULES@", " ".join(modules)).encode()


def make(busybox: bytes, modules: Mapping[str, bytes]) -> bytes:
    """Not compressed: to inflate it costs more time at boot than to read it."""
    items = [cpio.folder(name) for name in _FOLDERS]
    items.append(cpio.Item("dev/console", 0o20600, device=(5, 1)))
    items.append(cpio.file("bin/busybox", busybox, 0o755))
    items += [cpio.link(f"bin/{name}", "busybox") for name in _APPLETS]
    items += [cpio.file(f"modules/{name}.ko", content) for name, content in modules.items()]
    items.append(cpio.file("init", script(modules), 0o755))
    return cpio.archive(items)


def is_static(program: bytes) -> bool:
    """Whether it runs where there is nothing else: no loader, no libraries."""
    if not program.startswith(ELF) or program[4] != _ELF64:
        return False
    start = int.from_bytes(program[32:40], "little")
    size, count = (int.from_bytes(program[at : at + 2], "little") for at in (54, 56))
    kinds = (int.from_bytes(program[start + n * size : start + n * size + 4], "little") for n in range(count))
    return _PT_INTERP not in kinds
