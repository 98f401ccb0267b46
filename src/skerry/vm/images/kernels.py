"""Kernels for machines: Debian's, made for clouds, with a first file system of ours; or one that we built."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import NotFound, ProviderError, Unsupported
from skerry.progress import OnProgress, Progress
from skerry.vm.base import Kernel
from skerry.vm.images import initrd, packages, vmlinux
from skerry.vm.images.modules import Modules
from skerry.vm.images.shelf import Shelf

_PACKAGES = {"x86_64": "linux-image-cloud-amd64", "aarch64": "linux-image-cloud-arm64"}
_FILES = ("vmlinuz", "vmlinux", "initrd")
_ABOUT = "kernel.json"
_MODULES = "modules"
_SHORTEST_KEY = 6
_WAIT_S = 1800.0
_BUILD_S = 4 * 3600.0


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a kernel beside its files."""

    key: str
    version: str
    """As the kernel calls itself, so that modules that were made for it are found."""
    package: str
    """The version of the package that it comes from."""
    own: bool
    started_by: str
    """A digest of the script that it starts with; another script makes another kernel of it."""
    created_at: float
    sizes: dict[str, int]
    """Of its files, so that one that was cut short is noticed."""


class KernelStore:
    """The kernels in a cache folder, by their keys."""

    def __init__(self, cache: Path) -> None:
        self._shelf = Shelf(cache / "kernels")

    def all(self) -> list[KernelInfo]:
        """The newest first, and our own before those."""
        found = (_read(path) for path in self._shelf.folder.glob(f"[!.]*/{_ABOUT}"))
        whole = [about for about in found if about is not None]
        return sorted(whole, key=lambda about: (about.own, about.created_at), reverse=True)

    def find(self, key: str) -> KernelInfo:
        """By its key or the beginning of that. Raises NotFound."""
        found = [each for each in self.all() if len(key) >= _SHORTEST_KEY and each.key.startswith(key)]
        if len(found) != 1:
            raise NotFound(f"no kernel has the key {key!r}; `skerry image kernel ls` lists them")
        return found[0]

    async def get(self, version: str = "") -> Kernel:
        """One that is here, of that version if it is given. Asks nobody; raises NotFound."""
        about = next((each for each in self.all() if version in ("", each.version)), None)
        if about is None:
            if version:
                raise NotFound(
                    f"the kernel {version} is not here, and the image has its modules: build the image again"
                )
            raise NotFound("there is no kernel for machines: `skerry image kernel fetch` brings Debian's")
        if about.started_by != _started_by():
            about = await self._start_anew(about)
        return self._kernel(about)

    async def get_or_fetch(self, on_progress: OnProgress) -> Kernel:
        try:
            return await self.get()
        except NotFound:
            return await self.fetch(on_progress)

    async def fetch(self, on_progress: OnProgress, *, again: bool = False) -> Kernel:
        """Debian's newest; one that is here already is not fetched twice, unless that is asked for."""
        package = _PACKAGES.get(os.uname().machine)
        if package is None:
            raise Unsupported("machines", "this host", f"there is no kernel for {os.uname().machine}")
        async with self._shelf.locked(package, _WAIT_S):
            here = next((each for each in self.all() if not each.own), None)
            if here is not None and not again:
                return await self.get(here.version)
            with self._shelf.aside() as scratch:
                real = await packages.depended_on(package, "linux-image-")
                unpacked = scratch / "package"
                number = await packages.unpack(real, unpacked, on_progress)
                shell = await busybox(scratch, on_progress)
                on_progress(Progress(f"making {real} ready"))
                return self._kernel(await asyncio.to_thread(self._put_debian, scratch, unpacked, number, shell))

    async def add_own(self, vmlinuz: Path, uncompressed: Path, version: str, package: str, scratch: Path) -> Kernel:
        """A kernel that needs no modules, built elsewhere."""
        shell = await busybox(scratch, lambda _: None)
        folder = scratch / "kernel"
        (folder / _MODULES).mkdir(parents=True)
        shutil.copyfile(vmlinuz, folder / "vmlinuz")
        shutil.copyfile(uncompressed, folder / "vmlinux")
        (folder / "initrd").write_bytes(initrd.make(shell.read_bytes(), {}))
        return self._kernel(self._put(folder, version, package, own=True))

    @asynccontextmanager
    async def making_own(self) -> AsyncIterator[Path]:
        """A folder to build one in; one at a time."""
        async with self._shelf.locked("a kernel of our own", _BUILD_S):
            with self._shelf.aside() as scratch:
                yield scratch

    def modules(self, version: str) -> Path:
        """The folder of a kernel's modules, for images that take some along."""
        about = next((each for each in self.all() if each.version == version), None)
        if about is None:
            raise NotFound(f"the kernel {version} is not here")
        return self._shelf.folder / about.key / _MODULES

    def remove(self, key: str) -> None:
        """Machines that run have read it. Raises NotFound."""
        place = self._shelf.folder / self.find(key).key
        with self._shelf.aside() as scratch:
            place.rename(scratch / "gone")

    def _put_debian(self, scratch: Path, unpacked: Path, number: str, shell: Path) -> KernelInfo:
        images = list(unpacked.glob("boot/vmlinuz-*"))
        if len(images) != 1:
            raise ProviderError(f"the package has {len(images)} kernels, not one")
        version = images[0].name.removeprefix("vmlinuz-")
        below = next(path for path in (unpacked / "lib/modules", unpacked / "usr/lib/modules") if path.is_dir())
        folder = scratch / "kernel"
        folder.mkdir()
        images[0].rename(folder / "vmlinuz")
        (below / version).rename(folder / _MODULES)
        (folder / "vmlinux").write_bytes(vmlinux.extract((folder / "vmlinuz").read_bytes()))
        modules = Modules(folder / _MODULES).in_load_order(initrd.MODULES)
        (folder / "initrd").write_bytes(initrd.make(shell.read_bytes(), modules))
        return self._put(folder, version, number, own=False)

    async def _start_anew(self, about: KernelInfo) -> KernelInfo:
        """The same kernel with the script of this version of ours; nothing is fetched for that."""
        async with self._shelf.locked(about.version, _WAIT_S):
            made = next((e for e in self.all() if e.version == about.version and e.started_by == _started_by()), None)
            if made is not None:
                return made
            with self._shelf.aside() as scratch:
                shell = await busybox(scratch, lambda _: None)
                return await asyncio.to_thread(self._copied, about, scratch, shell)

    def _copied(self, about: KernelInfo, scratch: Path, shell: Path) -> KernelInfo:
        folder = scratch / "kernel"
        shutil.copytree(self._shelf.folder / about.key, folder, copy_function=os.link)
        for name in (_ABOUT, "initrd"):
            (folder / name).unlink()
        modules = {} if about.own else Modules(folder / _MODULES).in_load_order(initrd.MODULES)
        (folder / "initrd").write_bytes(initrd.make(shell.read_bytes(), modules))
        return self._put(folder, about.version, about.package, own=about.own)

    def _put(self, folder: Path, version: str, package: str, *, own: bool) -> KernelInfo:
        about = KernelInfo(
            key=_key(folder),
            version=version,
            package=package,
            own=own,
            started_by=_started_by(),
            created_at=time.time(),
            sizes={name: (folder / name).stat().st_size for name in _FILES},
        )
        (folder / _ABOUT).write_bytes(msgspec.json.encode(about))
        for name in _FILES:  # hypervisors run as users of their own
            (folder / name).chmod(0o644)
        folder.chmod(0o755)
        place = self._shelf.put(folder, about.key)
        if folder.exists():  # the same was there, with what another version of ours said of it
            (folder / _ABOUT).replace(place / _ABOUT)
        return about

    def _kernel(self, about: KernelInfo) -> Kernel:
        folder = self._shelf.folder / about.key
        files: dict[str, Any] = {name: folder / name for name in _FILES}
        for name, path in files.items():
            if not path.is_file() or path.stat().st_size != about.sizes.get(name):
                raise ProviderError(f"{path} is damaged: `skerry image kernel rm {about.key}`, then fetch or build it")
        return Kernel(key=about.key, version=about.version, own=about.own, **files)


def _read(path: Path) -> KernelInfo | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=KernelInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def _key(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        digest.update(hashlib.sha256((folder / name).read_bytes()).digest())
    return digest.hexdigest()[:32]


def _started_by() -> str:
    return hashlib.sha256(initrd.script(initrd.MODULES)).hexdigest()[:16]


async def busybox(scratch: Path, on_progress: OnProgress) -> Path:
    """The host's own if it needs no libraries, else that of Debian's package."""
    path = shutil.which("busybox")
    if path is not None and initrd.is_static(await asyncio.to_thread(Path(path).read_bytes)):
        return Path(path)
    unpacked = scratch / "busybox"
    await packages.unpack("busybox-static", unpacked, on_progress)
    return next(path for path in (unpacked / "bin/busybox", unpacked / "usr/bin/busybox") if path.exists())
