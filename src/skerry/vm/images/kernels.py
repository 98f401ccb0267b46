"""Kernels for machines: Debian's, made for clouds, with a first file system of ours; or one that we built."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import InvalidSpec, NotFound, ProviderError, Unsupported
from skerry.model.results import OnProgress, Progress
from skerry.vm.base import Kernel
from skerry.vm.images import boot, debian, programs
from skerry.vm.images.artifact_cache import ArtifactCache, read_note, stamp_of
from skerry.vm.images.debian import Modules

_PACKAGES = {"x86_64": "linux-image-cloud-amd64", "aarch64": "linux-image-cloud-arm64"}
_FILES = ("vmlinuz", "vmlinux", "initrd")
_ABOUT = "kernel.json"
_MODULES = "modules"
_WAIT_S = 1800.0
_BUILD_S = 4 * 3600.0
_FRAGMENT = Path(__file__).with_name("kernel.config")
_NEEDED = {
    "make": "make", "gcc": "gcc", "flex": "flex", "bison": "bison", "bc": "bc", "lz4": "lz4", "perl": "perl",
    "xz": "xz-utils", "tar": "tar",
}  # fmt: skip
_HEADERS = {"/usr/include/libelf.h": "libelf-dev", "/usr/include/linux/limits.h": "linux-libc-dev"}
_CONFIGURE_S = 600.0
_STEPS = 2080
"""About how many lines the build says, so that somebody who waits sees how far it is."""
_ASKED = re.compile(r"^(CONFIG_\w+)=y$", re.MULTILINE)


class KernelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Record of a kernel beside its files."""

    key: str
    version: str
    """As the kernel calls itself, so that modules that were made for it are found."""
    package: str
    """The version of the package that it comes from, or the file."""
    own: bool
    started_by: str
    """A digest of the script that it starts with; another script makes another kernel of it."""
    created_at: float
    sizes: dict[str, int]
    """Of its files, so that one that was cut short is noticed."""


class KernelStore:
    """Kernels in a cache folder, by their keys."""

    def __init__(self, cache: Path, folder: str = "kernels") -> None:
        self._cache = ArtifactCache(cache / folder)

    def all(self) -> list[KernelInfo]:
        """All kernels, the newest first, and our own before those; of those that differ in the script that they start
        with, as several versions of ours share a cache, this one's first."""
        found = (read_note(path, KernelInfo) for path in self._cache.folder.glob(f"[!.]*/{_ABOUT}"))
        whole = [about for about in found if about is not None]
        newest: dict[tuple[str, str], float] = {}
        for about in whole:
            kind = (about.version, about.package)
            newest[kind] = max(about.created_at, newest.get(kind, 0.0))
        ours = _started_by()

        def order(about: KernelInfo) -> tuple[bool, float, bool, float]:
            since = newest[about.version, about.package]
            return about.own, since, about.started_by == ours, about.created_at

        return sorted(whole, key=order, reverse=True)

    def find(self, key: str) -> KernelInfo:
        """Find a kernel by its key or the beginning of that. Raises NotFound."""
        found = [each for each in self.all() if len(key) >= 6 and each.key.startswith(key)]
        if len(found) != 1:
            raise NotFound(f"no kernel has the key {key!r}; `skerry image kernel ls` lists them")
        return found[0]

    async def get(self, version: str = "") -> Kernel:
        """Get one that is here, of that version if it is given. Raises NotFound."""
        about = next((each for each in self.all() if version in ("", each.version)), None)
        if about is None:
            if version:
                raise NotFound(
                    f"the kernel {version} is not here, and the image has its modules: build the image again"
                )
            raise NotFound("there is no kernel for machines: `skerry image kernel fetch` brings Debian's")
        return await self._ready(about)

    async def _ready(self, about: KernelInfo) -> Kernel:
        return self._kernel(about if about.started_by == _started_by() else await self._start_anew(about))

    async def from_file(self, path: Path) -> Kernel:
        """Get the kernel of a user's file, which is copied with the modules that machines need, once and again whenever
        it has changed. Raises InvalidSpec or ProviderError."""
        origin = await asyncio.to_thread(stamp_of, path, "kernel")
        async with self._cache.locked(origin, _WAIT_S):
            made = next((each for each in self.all() if each.package == origin), None)
            if made is None:
                with self._cache.aside() as scratch:
                    shell = await busybox(scratch, lambda _: None)
                    made = await asyncio.to_thread(self._put_file, path, origin, scratch / "kernel", shell)
        return await self._ready(made)

    async def get_or_fetch(self, on_progress: OnProgress) -> Kernel:
        try:
            return await self.get()
        except NotFound:
            return await self.fetch(on_progress)

    async def fetch(self, on_progress: OnProgress, *, again: bool = False) -> Kernel:
        """Fetch Debian's newest; one that is here already is not fetched twice, unless `again`. Raises Unsupported."""
        package = _PACKAGES.get(os.uname().machine)
        if package is None:
            raise Unsupported("machines", "this host", f"there is no kernel for {os.uname().machine}")
        async with self._cache.locked(package, _WAIT_S):
            here = next((each for each in self.all() if not each.own), None)
            if here is not None and not again:
                return await self.get(here.version)
            with self._cache.aside() as scratch:
                real = await debian.depended_on(package, "linux-image-")
                unpacked = scratch / "package"
                number = await debian.unpack(real, unpacked, on_progress)
                shell = await busybox(scratch, on_progress)
                on_progress(Progress(f"making {real} ready"))
                return self._kernel(await asyncio.to_thread(self._put_debian, scratch, unpacked, number, shell))

    async def build_own(self, on_progress: OnProgress) -> Kernel:
        """Build a kernel from Debian's source with all that machines need built in, unless one of the same source and
        configuration is here. Raises ProviderError or Unsupported."""
        if os.uname().machine != "x86_64":
            why = "its configuration is for x86; fetch Debian's instead"
            raise Unsupported("a kernel of our own", "this host", why)
        missing = [name for program, name in _NEEDED.items() if programs.which(program) is None]
        missing += [name for header, name in _HEADERS.items() if not os.path.exists(header)]
        if missing:
            raise ProviderError(
                f"a kernel is built with programs that are not here: apt-get install {' '.join(missing)}"
            )
        package = await debian.depended_on("linux-source", "linux-source-")
        digest = hashlib.sha256(_FRAGMENT.read_bytes()).hexdigest()[:12]
        async with self._cache.locked("a kernel of our own", _BUILD_S):
            with self._cache.aside() as scratch:
                version = await debian.unpack(package, scratch / "package", on_progress)
                origin = f"{package} {version}, configuration {digest}"
                made = next((each for each in self.all() if each.own and each.package == origin), None)
                if made is not None:
                    return await self.get(made.version)
                source = await _unpacked(scratch, package, on_progress)
                await _configure(source, on_progress)
                release = await _make(source, on_progress)
                shell = await busybox(scratch, lambda _: None)
                folder = scratch / "kernel"
                (folder / _MODULES).mkdir(parents=True)
                shutil.copyfile(source / "arch/x86/boot/bzImage", folder / "vmlinuz")
                shutil.copyfile(source / "vmlinux", folder / "vmlinux")
                return self._kernel(self._put(folder, shell, release, origin, own=True))

    def modules(self, version: str) -> Path:
        """Folder of a kernel's modules, for images that take some along. Raises NotFound."""
        about = next((each for each in self.all() if each.version == version), None)
        if about is None:
            raise NotFound(f"the kernel {version} is not here")
        return self._cache.folder / about.key / _MODULES

    def remove(self, key: str) -> None:
        """Remove a kernel; machines that run have read it. Raises NotFound."""
        place = self._cache.folder / self.find(key).key
        with self._cache.aside() as scratch:
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
        (folder / "vmlinux").write_bytes(boot.extract_vmlinux((folder / "vmlinuz").read_bytes()))
        return self._put(folder, shell, version, number, own=False)

    def _put_file(self, path: Path, origin: str, folder: Path, shell: Path) -> KernelInfo:
        folder.mkdir()
        shutil.copyfile(path, folder / "vmlinuz")
        try:
            (folder / "vmlinux").write_bytes(boot.extract_vmlinux((folder / "vmlinuz").read_bytes()))
            version = boot.version(folder / "vmlinux")
        except ProviderError as error:
            raise InvalidSpec(f"kernel: {path} cannot be booted: {error}", field="kernel") from error
        places = [base / "lib/modules" / version for base in (path.parent, path.parent.parent, Path("/"))]
        modules = next((place for place in places if place.is_dir()), None)
        if modules is not None:  # else all is to be built in
            debian.copy_modules(modules, folder / _MODULES, boot.MODULES)
        return self._put(folder, shell, version, origin, own=False)

    async def _start_anew(self, about: KernelInfo) -> KernelInfo:
        """Make the same kernel with the script of this version of ours; nothing is fetched for that."""
        async with self._cache.locked(about.version, _WAIT_S):
            same = [each for each in self.all() if (each.version, each.package) == (about.version, about.package)]
            made = next((each for each in same if each.started_by == _started_by()), None)
            if made is not None:
                return made
            with self._cache.aside() as scratch:
                shell = await busybox(scratch, lambda _: None)
                return await asyncio.to_thread(self._copied, about, scratch, shell)

    def _copied(self, about: KernelInfo, scratch: Path, shell: Path) -> KernelInfo:
        folder = scratch / "kernel"
        shutil.copytree(self._cache.folder / about.key, folder, copy_function=os.link)
        for name in (_ABOUT, "initrd"):
            (folder / name).unlink()
        return self._put(folder, shell, about.version, about.package, own=about.own)

    def _put(self, folder: Path, shell: Path, version: str, package: str, *, own: bool) -> KernelInfo:
        """Add the initrd and what is to be known of the kernel, and give it its place."""
        has_modules = not own and (folder / _MODULES).is_dir()
        modules = Modules(folder / _MODULES).in_load_order(boot.MODULES) if has_modules else {}
        (folder / "initrd").write_bytes(boot.make_initrd(shell.read_bytes(), modules))
        digests = [hashlib.sha256((folder / name).read_bytes()).digest() for name in _FILES]
        about = KernelInfo(
            key=hashlib.sha256(b"".join(digests)).hexdigest()[:32],
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
        place = self._cache.put(folder, about.key)
        if folder.exists():  # the same was there, with what another version of ours said of it
            (folder / _ABOUT).replace(place / _ABOUT)
        return about

    def _kernel(self, about: KernelInfo) -> Kernel:
        folder = self._cache.folder / about.key
        files: dict[str, Any] = {name: folder / name for name in _FILES}
        for name, path in files.items():
            if not path.is_file() or path.stat().st_size != about.sizes.get(name):
                raise ProviderError(f"{path} is damaged: `skerry image kernel rm {about.key}`, then fetch or build it")
        return Kernel(key=about.key, version=about.version, own=about.own, **files)


def _started_by() -> str:
    return hashlib.sha256(boot.init_script(boot.MODULES)).hexdigest()[:16]


async def busybox(scratch: Path, on_progress: OnProgress) -> Path:
    """Get the host's busybox if it needs no libraries, else that of Debian's package."""
    path = shutil.which("busybox")
    if path is not None and boot.is_static(await asyncio.to_thread(Path(path).read_bytes)):
        return Path(path)
    unpacked = scratch / "busybox"
    await debian.unpack("busybox-static", unpacked, on_progress)
    return next(path for path in (unpacked / "bin/busybox", unpacked / "usr/bin/busybox") if path.exists())


async def _unpacked(scratch: Path, package: str, on_progress: OnProgress) -> Path:
    on_progress(Progress(f"unpacking {package}"))
    tars = list((scratch / "package/usr/src").glob("linux-source-*.tar.xz"))
    if len(tars) != 1:
        raise ProviderError(f"{package} has {len(tars)} sources in it, not one")
    folder = scratch / "source"
    folder.mkdir()
    await programs.run("tar", "-xJf", tars[0], "-C", folder, "--strip-components=1", timeout_s=600.0)
    return folder


async def _configure(source: Path, on_progress: OnProgress) -> None:
    on_progress(Progress("configuring the kernel"))
    await programs.run("make", "tinyconfig", cwd=source, timeout_s=_CONFIGURE_S)
    config = source / ".config"
    config.write_text(config.read_text() + _FRAGMENT.read_text())
    await programs.run("make", "olddefconfig", cwd=source, timeout_s=_CONFIGURE_S)
    lost = frozenset(_ASKED.findall(_FRAGMENT.read_text())) - frozenset(_ASKED.findall(config.read_text()))
    if lost:
        raise ProviderError(f"this source does not take {', '.join(sorted(lost))} of the kernel's configuration")


async def _make(source: Path, on_progress: OnProgress) -> str:
    done, jobs = 0, os.cpu_count() or 1

    def told(_: str) -> None:
        nonlocal done
        done += 1
        on_progress(Progress("building the kernel", min(done, _STEPS), _STEPS))

    env = {"KBUILD_BUILD_TIMESTAMP": "1970-01-01", "KBUILD_BUILD_USER": "skerry", "KBUILD_BUILD_HOST": "skerry"}
    await programs.run("make", f"-j{jobs}", "bzImage", "vmlinux", cwd=source, timeout_s=_BUILD_S, env=env, on_line=told)
    return (await programs.run("make", "-s", "kernelrelease", cwd=source, timeout_s=_CONFIGURE_S)).strip()
