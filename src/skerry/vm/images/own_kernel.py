"""A kernel of our own, from Debian's source: with all that machines need built in, and nothing else."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from skerry.errors import ProviderError, Unsupported
from skerry.progress import OnProgress, Progress
from skerry.vm.base import Kernel
from skerry.vm.images import packages, programs
from skerry.vm.images.kernels import KernelStore

_FRAGMENT = Path(__file__).with_name("kernel.config")
_NEEDED = {
    "make": "make", "gcc": "gcc", "flex": "flex", "bison": "bison", "bc": "bc", "lz4": "lz4", "perl": "perl",
    "xz": "xz-utils", "tar": "tar",
}  # fmt: skip
_HEADERS = {"/usr/include/libelf.h": "libelf-dev", "/usr/include/linux/limits.h": "linux-libc-dev"}
_UNPACK_S = 600.0
_CONFIGURE_S = 600.0
_BUILD_S = 4 * 3600.0
_STEPS = 2080
"""About how many lines the build says, so that somebody who waits sees how far it is."""
_ASKED = re.compile(r"^(CONFIG_\w+)=y$", re.MULTILINE)


async def build(store: KernelStore, on_progress: OnProgress, *, jobs: int | None = None) -> Kernel:
    """Build it, unless one of the same source and configuration is here."""
    if os.uname().machine != "x86_64":
        raise Unsupported("a kernel of our own", "this host", "its configuration is for x86; fetch Debian's instead")
    _check_needed()
    package = await packages.depended_on("linux-source", "linux-source-")
    digest = hashlib.sha256(_FRAGMENT.read_bytes()).hexdigest()[:12]
    async with store.making_own() as scratch:
        version = await packages.unpack(package, scratch / "package", on_progress)
        origin = f"{package} {version}, configuration {digest}"
        made = next((each for each in store.all() if each.own and each.package == origin), None)
        if made is not None:
            return await store.get(made.version)
        source = await _unpacked(scratch, package, on_progress)
        await _configure(source, on_progress)
        release = await _make(source, jobs or os.cpu_count() or 1, on_progress)
        return await store.add_own(source / "arch/x86/boot/bzImage", source / "vmlinux", release, origin, scratch)


def _check_needed() -> None:
    missing = [name for program, name in _NEEDED.items() if not programs.is_there(program)]
    missing += [name for header, name in _HEADERS.items() if not os.path.exists(header)]
    if missing:
        raise ProviderError(f"a kernel is built with programs that are not here: apt-get install {' '.join(missing)}")


async def _unpacked(scratch: Path, package: str, on_progress: OnProgress) -> Path:
    on_progress(Progress(f"unpacking {package}"))
    tars = list((scratch / "package/usr/src").glob("linux-source-*.tar.xz"))
    if len(tars) != 1:
        raise ProviderError(f"{package} has {len(tars)} sources in it, not one")
    folder = scratch / "source"
    folder.mkdir()
    await programs.run("tar", "-xJf", tars[0], "-C", folder, "--strip-components=1", timeout_s=_UNPACK_S)
    return folder


async def _configure(source: Path, on_progress: OnProgress) -> None:
    on_progress(Progress("configuring the kernel"))
    await programs.run("make", "tinyconfig", cwd=source, timeout_s=_CONFIGURE_S)
    config = source / ".config"
    config.write_text(config.read_text() + _FRAGMENT.read_text())
    await programs.run("make", "olddefconfig", cwd=source, timeout_s=_CONFIGURE_S)
    there = frozenset(_ASKED.findall(config.read_text()))
    lost = frozenset(_ASKED.findall(_FRAGMENT.read_text())) - there
    if lost:
        raise ProviderError(f"this source does not take {', '.join(sorted(lost))} of the kernel's configuration")


async def _make(source: Path, jobs: int, on_progress: OnProgress) -> str:
    done = 0

    def told(_: str) -> None:
        nonlocal done
        done += 1
        on_progress(Progress("building the kernel", min(done, _STEPS), _STEPS))

    env = {"KBUILD_BUILD_TIMESTAMP": "1970-01-01", "KBUILD_BUILD_USER": "skerry", "KBUILD_BUILD_HOST": "skerry"}
    await programs.run("make", f"-j{jobs}", "bzImage", "vmlinux", cwd=source, timeout_s=_BUILD_S, env=env, on_line=told)
    return (await programs.run("make", "-s", "kernelrelease", cwd=source, timeout_s=_CONFIGURE_S)).strip()
