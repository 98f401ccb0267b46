"""The provider on stand-ins for Firecracker: boxes without KVM, whose agents are real."""

from __future__ import annotations

import os
import time
from pathlib import Path

from skerry.providers.firecracker import Firecracker, FirecrackerConfig
from skerry.providers.machine.images import Source, Sources
from skerry.vm.base import Kernel
from skerry.vm.firecracker import probe
from skerry.vm.images.store import VmImage

_MIB = 1 << 20
_MACHINES = {"x86_64": 62, "aarch64": 183}


class NoImages(Sources):
    """In place of images: files of which only the stand-in's drives are made."""

    folder: Path

    async def find(self, name: str | None) -> Source:
        image = VmImage(
            id="sha256:0",
            names=("minimal",),
            rootfs=_file(self.folder / "root.ext4", b"root"),
            kernel=self._a_kernel(),
            env={},
            user="",
            cwd="",
            size=4,
            created_at=time.time(),
        )
        runtime = _file(self.folder / "runtime.ext4", b"runtime")
        return Source(asked=name or "minimal", image=image, runtime_key="r", runtime=runtime)

    def kernel(self) -> Kernel:
        return self._a_kernel()

    async def find_kernel(self) -> None:
        return

    async def blank(self, size: int = _MIB, *, journal: bool = False) -> Path:
        path = _file(self.folder / f"{size}.ext4", b"")
        os.truncate(path, size)
        return path

    def _a_kernel(self) -> Kernel:
        head = b"\x7fELF".ljust(16, b"\0") + bytes([2, 0, _MACHINES[os.uname().machine], 0])
        return Kernel(
            key="k",
            version="6.12",
            own=True,
            vmlinuz=self.folder / "none",
            vmlinux=_file(self.folder / "vmlinux", head.ljust(1024, b"\0")),
            initrd=_file(self.folder / "initrd", b"initrd"),
        )


def _file(path: Path, data: bytes) -> Path:
    if not path.exists():
        path.write_bytes(data)
        path.chmod(0o644)
    return path


def provider_on(folder: Path, *, jailed: bool) -> Firecracker:
    return Firecracker(config_on(folder, jailed=jailed))


def config_on(folder: Path, *, jailed: bool, template: bool = True) -> FirecrackerConfig:
    """Its stand-ins are in `folder / "bin"`. It believes in /dev/kvm without a look."""
    from skerry.providers.machine import provider as module

    NoImages.folder = folder / "files"
    NoImages.folder.mkdir(exist_ok=True)
    module.Sources = NoImages  # type: ignore[misc]
    probe.check_device = lambda *_: None
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
