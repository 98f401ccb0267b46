"""Templates: machines that were booted once and saved, for others to be cloned from."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from skerry.errors import AgentError, Conflict, ProviderError
from skerry.host import folders
from skerry.vm.base import FIRST_CID, Capabilities, Hypervisor, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.images.artifact_cache import ArtifactCache

_log = logging.getLogger("skerry.vm")

Build = Callable[[Path], Awaitable[None]]
"""Boots a machine and saves it into the folder that it is given, which is there and empty."""

_ABOUT = "template.json"
KEPT_S = 7 * 86400.0
"""How long a template is kept that nobody uses."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """Saved machine, in a folder that never changes."""

    key: str
    made_at: float
    folder: Path


class _TemplateNote(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    made_at: float
    files: dict[str, tuple[int, int]]
    """Size and time of the last change of each of its files: what was touched since is not trusted."""


class TemplateStore:
    """Templates of a host, by their keys. One may be removed at any time: what is open or linked of it stays."""

    def __init__(self, cache: Path) -> None:
        self._cache = ArtifactCache(cache / "templates")

    def get(self, key: str) -> Template | None:
        """Template of this key; None if there is none, or only a broken one."""
        folder = self._cache.folder / key
        try:
            found = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_TemplateNote)
            is_good = found.key == key and found.files == _files(folder)
            os.utime(folder / _ABOUT)  # for `sweep`
        except (OSError, msgspec.MsgspecError):
            return None
        return Template(key=key, made_at=found.made_at, folder=folder) if is_good else None

    async def make(self, key: str, build: Build, *, timeout_s: float) -> Template:
        """Get the template of this key, or build it. Of all who ask at once one builds it and the others wait; if it
        fails, the next one tries. Old ones are swept then. Raises ProviderError."""
        # some hypervisors want to open memory for writing: no one else is to come near it
        folders.make(self._cache.folder)
        async with self._cache.locked(key, timeout_s):
            if (found := self.get(key)) is None:
                await self._build(key, build)
                found = self.get(key)
                await self.sweep()
            if found is None:
                raise ProviderError(f"the template {key} was changed while it was made; try again")
            return found

    async def _build(self, key: str, build: Build) -> None:
        try:
            with self._cache.aside() as aside:
                made = aside / key
                made.mkdir(mode=0o755)
                await build(made)
                about = _TemplateNote(key=key, made_at=time.time(), files=_files(made))
                (made / _ABOUT).write_bytes(msgspec.json.encode(about))
                (made / _ABOUT).chmod(0o644)
                self._remove(key)
                self._cache.put(made, key)
        except OSError as error:
            raise ProviderError(f"the template {key} cannot be made: {error}") from error

    @contextlib.asynccontextmanager
    async def cloning(
        self, template: Template, hypervisor: Hypervisor, folder: VmFolder, *, timeout_s: float
    ) -> AsyncIterator[None]:
        """Start a clone within this, and leave by `return`. One that cannot be restored or does not answer is killed
        and its template discarded, quietly: the code after this is for that case."""
        try:
            yield
        except (Conflict, AgentError, FileNotFoundError) as error:
            _log.info("template %s discarded: its clone in %s failed: %s", template.key, folder.path, error)
            await hypervisor.kill(folder)
            await self.discard(template, timeout_s=timeout_s)

    async def discard(self, template: Template, *, timeout_s: float) -> None:
        """Remove one that cannot be cloned, unless another has taken its place."""
        async with self._cache.locked(template.key, timeout_s):
            found = self.get(template.key)
            if found is None or found.made_at == template.made_at:
                self._remove(template.key)

    async def sweep(self, *, unused_s: float = KEPT_S) -> list[str]:
        """Remove templates that nobody has used for so long; returns their keys."""
        removed = []
        for about in [*self._cache.folder.glob(f"[!.]*/{_ABOUT}")]:
            key = about.parent.name
            with contextlib.suppress(OSError, ProviderError):  # in use
                async with self._cache.locked(key, 0):
                    if time.time() - about.stat().st_mtime > unused_s:
                        self._remove(key)
                        removed.append(key)
                        _log.info("template %s removed: nobody used it", key)
        return removed

    def _remove(self, key: str) -> None:
        """Move it aside at once, so that nobody uses half of it; it is removed with the folder that it is in now."""
        with self._cache.aside() as aside, contextlib.suppress(FileNotFoundError):
            (self._cache.folder / key).rename(aside / ".old")


def key_of(hypervisor: str, can: Capabilities, machine: Machine, *contents: str) -> str:
    """Key of a template: changes with all that a saved machine depends on, as the keys of its drives' `contents`."""
    drives = [(drive.name, drive.format, drive.read_only) for drive in machine.drives]
    parts = (
        *(hypervisor, can.version, can.accelerator, processor()),
        *(machine.kernel.key, machine.vcpus, machine.memory_mib, machine.boot_args, machine.network, FIRST_CID),
        *(drives, sorted(machine.publish.items()), contents),
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def processor() -> str:
    """Processor as a guest under KVM sees it: it must find the same when it is restored."""
    wanted = ("model name", "flags", "cpu model", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return os.uname().machine
    return "\n".join(line for line in lines if line.startswith(wanted))


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path.name: path.stat(follow_symlinks=False) for path in folder.iterdir() if path.name != _ABOUT}
    return {name: (seen.st_size, seen.st_mtime_ns) for name, seen in found.items()}


async def clear(hypervisor: Hypervisor, folder: VmFolder) -> None:
    """Kill the machine in a folder, and remove the folder; quiet if there is none."""
    if folder.path.exists():
        await hypervisor.kill(folder)
        await asyncio.to_thread(folder.remove)
