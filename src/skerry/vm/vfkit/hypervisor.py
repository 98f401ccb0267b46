"""vfkit as a hypervisor: machines on macOS, which boot from their kernel and can neither be saved nor cloned."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skerry.aio import backoff
from skerry.errors import ProviderError, ProviderUnavailable, Unsupported, WrongState
from skerry.net.http import HttpClient, HttpError, NoAnswer
from skerry.vm.base import Capabilities, Drive, Hypervisor, Machine, MachineLimits
from skerry.vm.vfkit.command import API, NAME, PID_FILE, command
from skerry.vm.vfkit.folder import find_all, has_ended

if TYPE_CHECKING:
    from skerry.vm.folder import VmFolder

_STATE = "/vm/state"
_PAUSED = "VirtualMachineStatePaused"
_RUNNING = "VirtualMachineStateRunning"
_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.02
_WORDS = "vfkit.log"
_NO_SNAPSHOTS = "vfkit cannot save a machine: each one boots from its kernel"


class _State(msgspec.Struct):
    state: str


class VfkitHypervisor(Hypervisor):
    name = NAME

    def __init__(self, program: str = NAME) -> None:
        self._program = program

    async def probe(self) -> Capabilities:
        if (sys.platform, platform.machine()) != ("darwin", "arm64"):
            here = f"{platform.system()} on {platform.machine()}"
            fix = "use a Mac with an M1 or later; on Linux use the providers qemu or firecracker"
            raise ProviderUnavailable(NAME, f"it needs macOS on Apple silicon, and this is {here}", fix=fix)
        argv = [_find_program(self._program), "--version"]
        said = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True, timeout=_TIMEOUT_S)
        return Capabilities(accelerator="hvf", version=version_of(said.stdout), snapshots=False, shares_memory=False)

    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        path = folder.path / name
        argv = ["/bin/cp", "-c", str(base), str(path)]  # a clone of APFS: it shares what neither has changed
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, text=True)
        if done.returncode:
            raise ProviderError(f"{base} cannot be cloned to {path}: {done.stderr.strip()}")
        if size is not None and size > path.stat().st_size:
            os.truncate(path, size)
        return Drive(name=name, path=name)

    async def boot(self, folder: VmFolder, machine: Machine, limits: MachineLimits | None) -> None:
        """macOS has no control groups: a machine is bounded by its own memory and processors alone."""
        argv = command(self._program, folder.path, machine)
        _remove_sockets(folder.path)
        (folder.path / PID_FILE).unlink(missing_ok=True)
        pid = await asyncio.to_thread(_start, argv, folder.path / _WORDS)
        for delay_s in backoff(_LOOK_AGAIN_S, _LOOK_AGAIN_S, _TIMEOUT_S):
            if await _state(folder.path) == _RUNNING:
                return
            if has_ended(pid):
                break
            await asyncio.sleep(delay_s)
        words = (folder.path / _WORDS).read_text(errors="replace").strip()[-2000:]
        raise ProviderError(f"vfkit did not start the machine: {words}")

    async def save(self, folder: VmFolder, into: Path) -> None:
        raise Unsupported("snapshot", NAME, _NO_SNAPSHOTS)

    async def copy_memory(self, folder: VmFolder, into: Path) -> None:
        raise Unsupported("snapshot", NAME, _NO_SNAPSHOTS)

    async def restore(
        self, folder: VmFolder, machine: Machine, saved: Path, limits: MachineLimits | None, *, frozen: bool = False
    ) -> None:
        raise Unsupported("snapshot", NAME, _NO_SNAPSHOTS)

    async def pause(self, folder: VmFolder) -> None:
        if not await self.is_paused(folder):
            await _change(folder.path, "Pause")

    async def resume(self, folder: VmFolder) -> None:
        if await self.is_paused(folder):
            await _change(folder.path, "Resume")

    async def is_paused(self, folder: VmFolder) -> bool:
        return await _state(folder.path) == _PAUSED

    async def kill(self, folder: VmFolder) -> None:
        for delay_s in backoff(_LOOK_AGAIN_S, _LOOK_AGAIN_S, _TIMEOUT_S):
            pids = await asyncio.to_thread(find_all, folder.path)
            if not pids:
                break
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(delay_s)
        else:
            raise ProviderError(f"vfkit, process {pids}, does not end")
        _remove_sockets(folder.path)
        (folder.path / PID_FILE).unlink(missing_ok=True)


def version_of(text: str) -> str:
    """Version in text like `vfkit version: v0.6.1`. Raises ProviderError."""
    found = re.search(r"version: v?(\S+)", text)
    if found is None:
        raise ProviderError(f"vfkit does not tell its version: {text.strip()[:200]!r}")
    return found[1]


def _start(argv: list[str], words: Path) -> int:
    """Start it in a session of its own, so that it outlives us. Raises ProviderUnavailable."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(words), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    environment = {"PATH": os.defpath}
    return os.posix_spawn(_find_program(argv[0]), argv, environment, file_actions=actions, setsid=True)


def _find_program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        raise ProviderUnavailable(NAME, "vfkit is not installed", fix="brew install vfkit")
    return program


async def _state(folder: Path) -> str | None:
    """State of the machine in vfkit's words; None if it does not answer."""
    try:
        answer = await _client(folder).request("GET", _STATE)
    except NoAnswer:
        return None
    return answer.json(_State).state


async def _change(folder: Path, wanted: str) -> None:
    try:
        answer = await _client(folder).request("POST", _STATE, json={"state": wanted})
    except HttpError as error:
        raise WrongState(f"the machine does not run: {error}") from error
    if answer.status >= 300:
        said = answer.body.decode(errors="replace").strip()[:500]
        raise ProviderError(f"vfkit refused to {wanted.lower()} the machine: {said}")


def _client(folder: Path) -> HttpClient:
    return HttpClient(f"unix://{folder / API}", timeout_s=_TIMEOUT_S)


def _remove_sockets(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        path.unlink(missing_ok=True)
