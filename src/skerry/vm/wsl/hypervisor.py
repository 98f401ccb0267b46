"""WSL2 as a hypervisor: its machines are distributions, which share one kernel. It is used from within another one."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from skerry.errors import ProviderError, ProviderUnavailable, Unsupported
from skerry.vm import launch
from skerry.vm.base import Capabilities, Drive, Hypervisor, Limits, Machine

from . import commands

if TYPE_CHECKING:
    from skerry.vm.folder import VmFolder

NAME = "wsl"
_TIMEOUT_S = 120.0
_NO_SNAPSHOTS = "WSL cannot save a distribution with its memory: each one starts anew"
_NO_PAUSE = "WSL cannot pause a distribution; stop it"


class Wsl(Hypervisor):
    name = NAME

    def __init__(self, disks: str, program: str = commands.PROGRAM) -> None:
        self._disks = disks
        self._program = program

    async def probe(self) -> Capabilities:
        release = platform.release()
        if not commands.is_wsl2(release):
            fix = "on Windows run skerry in a distribution of WSL2 (wsl --install); on Linux use another provider"
            raise ProviderUnavailable(NAME, f"it needs WSL2, and this is {platform.system()} {release}", fix=fix)
        if os.geteuid() != 0:
            raise ProviderUnavailable(NAME, "only root can unpack images for it", fix="use sudo")
        if not os.access(self._program, os.X_OK):
            fix = "set providers.wsl.program, and [interop] enabled=true in /etc/wsl.conf"
            raise ProviderUnavailable(NAME, f"{self._program} cannot be started", fix=fix)
        version = commands.version_of(await _said([self._program, "--version"]))
        return Capabilities(accelerator="none", version=version, snapshots=False, shares_memory=False)

    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        """None is made: a distribution has the one disk that WSL makes for it, which grows as it is written to."""
        return Drive(name=name, path=str(base), read_only=True)

    async def boot(self, folder: VmFolder, machine: Machine, limits: Limits | None) -> None:
        """The kernel is WSL's, whatever `machine` says; its limits are those of the box's user in the guest."""
        if machine.network != "none":
            raise Unsupported("network", NAME, "the network of WSL reaches this host; use none")
        name = distribution_of(folder)
        if name not in commands.registered(await _said(commands.list_all(self._program))):
            await asyncio.to_thread(import_distribution, self._program, name, self._disks, machine.drives)
        plan = launch.Launch(argv=commands.run(self._program, name), channel=True, publish=machine.publish)
        await asyncio.to_thread(launch.start, folder, plan, limits)

    async def save(self, folder: VmFolder, into: Path) -> None:
        raise Unsupported("snapshot", NAME, _NO_SNAPSHOTS)

    async def restore(self, folder: VmFolder, machine: Machine, saved: Path, limits: Limits | None) -> None:
        raise Unsupported("snapshot", NAME, _NO_SNAPSHOTS)

    async def pause(self, folder: VmFolder) -> None:
        raise Unsupported("pause", NAME, _NO_PAUSE)

    async def resume(self, folder: VmFolder) -> None:
        raise Unsupported("pause", NAME, _NO_PAUSE)

    async def is_paused(self, folder: VmFolder) -> bool:
        return False

    async def kill(self, folder: VmFolder) -> None:
        await asyncio.to_thread(launch.kill, folder)
        name = distribution_of(folder)
        if name in commands.registered(await _said(commands.list_all(self._program))):
            await _said(commands.terminate(self._program, name))

    async def forget(self, folder: VmFolder) -> None:
        """Remove the distribution of a killed machine with its disk; quiet if there is none."""
        name = distribution_of(folder)
        if name in commands.registered(await _said(commands.list_all(self._program))):
            await _said(commands.unregister(self._program, name))


def import_distribution(program: str, name: str, disks: str, drives: Sequence[Drive]) -> None:
    """Make a distribution of the first two drives: the image, and the runtime."""
    with TemporaryDirectory(prefix="skerry-wsl-") as aside:
        mount, conf = Path(aside, "root"), Path(aside, "conf")
        mount.mkdir()
        conf.mkdir()
        (conf / "wsl.conf").write_text(commands.CONF)
        packer = commands.pack(Path(drives[0].path), Path(drives[1].path), mount, conf)
        importer = commands.import_from_stdin(program, name, disks)
        with subprocess.Popen(packer, stdout=subprocess.PIPE) as packing:
            done = subprocess.run(importer, stdin=packing.stdout, capture_output=True, timeout=_TIMEOUT_S)
        if packing.returncode or done.returncode:
            raise ProviderError(f"WSL did not import {name}: {commands.text_of(done.stdout).strip()}")


def distribution_of(folder: VmFolder) -> str:
    """A box's folder has its machine's within."""
    return f"skerry-{folder.path.parent.name}"


async def _said(argv: Sequence[str]) -> bytes:
    """What a command of wsl.exe prints; it prints its refusals there too."""
    try:
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProviderError(f"{argv[0]} cannot be used: {error}") from error
    if done.returncode:
        raise ProviderError(f"{' '.join(argv[:3])} failed: {commands.text_of(done.stdout).strip()[:500]}")
    return done.stdout
