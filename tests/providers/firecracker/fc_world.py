"""The provider on stand-ins for Firecracker: boxes without KVM, whose agents are real."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from vm.firecracker.world import kernel_head

from skerry.providers.firecracker import Firecracker, FirecrackerConfig
from skerry.providers.machine import images
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.vm.base import Kernel
from skerry.vm.firecracker import probe
from skerry.vm.folder import VmFolder
from skerry.vm.images import disks
from skerry.vm.images.store import ImageStore, VmImage

Make = Callable[..., Awaitable[AsyncSandbox]]


class NoStore(ImageStore):
    """In place of images: files of which only the stand-in's drives are made."""

    folder: Path

    async def resolve(self, name: str) -> VmImage:
        return VmImage(
            id="sha256:0",
            names=("minimal",),
            rootfs=_file(self.folder / "root.ext4", b"root"),
            kernel=await self.kernel(),
            env={},
            user="",
            cwd="",
            size=4,
            created_at=time.time(),
        )

    async def kernel(self, version: str = "") -> Kernel:
        return Kernel(
            key="k",
            version="6.12",
            own=True,
            vmlinuz=self.folder / "none",
            vmlinux=_file(self.folder / "vmlinux", kernel_head()),
            initrd=_file(self.folder / "initrd", b"initrd"),
        )


async def _runtime_disk(_cache: Path, *, has_python: bool = True) -> tuple[str, Path]:
    return "r", _file(NoStore.folder / "runtime.ext4", b"runtime")


async def _blank_disk(_cache: Path, size: int, *, journal: bool = False) -> Path:
    path = _file(NoStore.folder / f"{size}.ext4", b"")
    os.truncate(path, size)
    return path


def _file(path: Path, data: bytes) -> Path:
    if not path.exists():
        path.write_bytes(data)
        path.chmod(0o644)
    return path


def provider_on(folder: Path, *, jailed: bool) -> Firecracker:
    return Firecracker(config_on(folder, jailed=jailed))


def config_on(folder: Path, *, jailed: bool, template: bool = True) -> FirecrackerConfig:
    """Its stand-ins are in `folder / "bin"`. It believes in /dev/kvm without a look."""
    NoStore.folder = folder / "files"
    NoStore.folder.mkdir(exist_ok=True)
    images.ImageStore = NoStore  # type: ignore[misc]
    disks.runtime_disk, disks.blank_disk = _runtime_disk, _blank_disk
    probe.check_device = lambda **_: None
    return FirecrackerConfig(
        state_dir=str(folder / "state"),
        cache_dir=str(folder / "cache"),
        program=str(folder / "bin/firecracker"),
        jailer=str(folder / "bin/jailer") if jailed else "",
        start_timeout_s=30.0,
        template=template,
    )


def running_in(folder: Path) -> set[int]:
    """Processes that work below a folder, seen without asking whoever made them."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink().is_relative_to(folder):
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def machine_of(world_folder: Path, sandbox: AsyncSandbox) -> VmFolder:
    return VmFolder(world_folder / "state" / sandbox.id / "vm")
