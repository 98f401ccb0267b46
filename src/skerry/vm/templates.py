"""Machines that were booted once and saved, for others to begin where they stood."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from skerry.errors import ProviderError
from skerry.vm.base import Capabilities, Machine
from skerry.vm.images.shelf import Shelf

Build = Callable[[Path], Awaitable[None]]
"""Boots a machine and saves it into the folder that it is given, which is there and empty."""

_ABOUT = "template.json"
KEPT_S = 7 * 86400.0
"""How long a template is kept that nobody uses."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A saved machine, in a folder that never changes."""

    key: str
    made_at: float
    folder: Path


class _About(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    made_at: float
    files: dict[str, tuple[int, int]]
    """Size and time of the last change of each of its files: what was touched since is not trusted."""


class TemplateStore:
    """The templates of a host, by their keys. Whoever uses one may lose its files at any time but not what it has
    opened of them; who needs a file of a template for longer links it."""

    def __init__(self, cache: Path) -> None:
        self._shelf = Shelf(cache / "templates")

    def get(self, key: str) -> Template | None:
        """None if there is none, or only a broken one."""
        folder = self._shelf.folder / key
        try:
            found = msgspec.json.decode((folder / _ABOUT).read_bytes(), type=_About)
            is_good = found.key == key and found.files == _files(folder)
            os.utime(folder / _ABOUT)  # for `sweep`
        except (OSError, msgspec.MsgspecError):
            return None
        return Template(key=key, made_at=found.made_at, folder=folder) if is_good else None

    async def make(self, key: str, build: Build, *, timeout_s: float) -> Template:
        """The template of this key, which is built if there is none. Of all who ask at once one builds it, and the
        others wait for that; if it fails, the next one tries. A new one is the moment to look for old ones."""
        # some hypervisors want to open memory for writing: no one else is to come near it
        self._shelf.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        async with self._shelf.locked(key, timeout_s):
            if (found := self.get(key)) is None:
                await self._build(key, build)
                found = self.get(key)
                await self.sweep()
            if found is None:
                raise ProviderError(f"the template {key} was changed while it was made; try again")
            return found

    async def _build(self, key: str, build: Build) -> None:
        try:
            with self._shelf.aside() as aside:
                made = aside / key
                made.mkdir(mode=0o755)
                await build(made)
                await asyncio.to_thread(_finish, made, key)
                self._put_away(key, aside)
                self._shelf.put(made, key)
        except OSError as error:
            raise ProviderError(f"the template {key} cannot be made: {error}") from error

    async def discard(self, template: Template, *, timeout_s: float) -> None:
        """Remove one that turned out to be useless, unless another has taken its place."""
        async with self._shelf.locked(template.key, timeout_s):
            found = self.get(template.key)
            if found is None or found.made_at == template.made_at:
                with self._shelf.aside() as aside:
                    self._put_away(template.key, aside)

    async def sweep(self, *, unused_s: float = KEPT_S) -> list[str]:
        """Remove what nobody has used for so long; their keys."""
        removed = []
        for about in [*self._shelf.folder.glob(f"[!.]*/{_ABOUT}")]:
            key = about.parent.name
            with contextlib.suppress(OSError, ProviderError):  # somebody is at it
                async with self._shelf.locked(key, 0):
                    if time.time() - about.stat().st_mtime > unused_s:
                        with self._shelf.aside() as aside:
                            self._put_away(key, aside)
                        removed.append(key)
        return removed

    def _put_away(self, key: str, aside: Path) -> None:
        """Out of sight at once, so that nobody takes half of it for one; it goes with the folder that it is in now."""
        with contextlib.suppress(FileNotFoundError):
            (self._shelf.folder / key).rename(aside / ".old")


def key_of(hypervisor: str, can: Capabilities, machine: Machine, *contents: str) -> str:
    """Changes with whatever a saved machine depends on. `contents` are the keys of what its drives hold; where they
    lie is no matter."""
    drives = [(drive.name, drive.format, drive.read_only) for drive in machine.drives]
    parts = (
        *(hypervisor, can.version, can.accelerator, _processor()),
        *(machine.kernel.key, machine.vcpus, machine.memory_mib, machine.boot_args, machine.network, machine.cid),
        *(drives, sorted(machine.publish.items()), contents),
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def _processor() -> str:
    """What a guest under KVM sees of the processor: it must find the same when it goes on."""
    wanted = ("model name", "flags", "cpu model", "Features", "CPU part")
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return os.uname().machine
    return "\n".join(line for line in lines if line.startswith(wanted))


def _finish(folder: Path, key: str) -> None:
    """Nobody changes it from here on."""
    about = _About(key=key, made_at=time.time(), files=_files(folder))
    (folder / _ABOUT).write_bytes(msgspec.json.encode(about))
    (folder / _ABOUT).chmod(0o644)


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path.name: path.stat(follow_symlinks=False) for path in folder.iterdir() if path.name != _ABOUT}
    return {name: (seen.st_size, seen.st_mtime_ns) for name, seen in found.items()}
