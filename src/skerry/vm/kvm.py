"""KVM probe: it can be there, open, and even run some code, and still run no kernel; so a guest is tried."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from skerry.clock import boot_id
from skerry.errors import CreateFailed, ProviderError, ProviderUnavailable
from skerry.host import locks, uids
from skerry.vm.base import Hypervisor, Kernel, Machine
from skerry.vm.folder import VmFolder

_log = logging.getLogger("skerry.vm")

DEVICE = "/dev/kvm"
_OTHERS = stat.S_IROTH | stat.S_IWOTH
_GROUP = stat.S_IRGRP | stat.S_IWGRP
_LAST_WORDS_S = 1.0
SAID = "skerry: this kernel runs"
"""Words of a guest with `skerry.probe` on its command line, before it ends."""


def access(device: str = DEVICE) -> tuple[int, ...] | None:
    """Groups that a machine's user needs for a device; None if it may not use it: root's group is given to nobody."""
    try:
        fd = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    os.close(fd)
    if not uids.are_available() or status.st_mode & _OTHERS == _OTHERS:
        return ()
    return (status.st_gid,) if status.st_gid and status.st_mode & _GROUP == _GROUP else None


async def works(cache: Path, version: str, try_out: Callable[[], Awaitable[bool]]) -> bool:
    """Whether KVM runs a guest: remembered, or found by `try_out`, until this host boots anew or has another QEMU."""
    key = hashlib.sha256(f"{boot_id()} {version}".encode()).hexdigest()[:16]
    verdict = cache / f"kvm-{key}"
    try:
        return verdict.read_text() == "works"
    except FileNotFoundError:
        found = await try_out()
    said = "works" if found else "does not run a guest"
    _log.info("KVM %s with QEMU %s", said, version)
    remember(verdict, said)
    return found


def probe_machine(kernel: Kernel) -> Machine:
    return Machine(kernel=kernel, drives=(), vcpus=1, boot_args=("skerry.probe",))


async def try_guest(
    hypervisor: Hypervisor, cache: Path, timeout_s: float, boot: Callable[[VmFolder], Awaitable[object]]
) -> None:
    """Run a machine that `boot` starts in a folder, until it has said SAID. Raises ProviderError if it does not."""
    prefix = f".try-{hypervisor.name}-"
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    for left in [*cache.glob(f"{prefix}*")]:
        with contextlib.suppress(FileNotFoundError, BlockingIOError):  # it is gone, or somebody is at it
            if time.time() - left.stat().st_mtime > 2 * timeout_s:
                with locks.holding(left):
                    _log.info("removing the machine of a killed probe in %s", left)
                    await _clear(hypervisor, VmFolder(left))
    folder = VmFolder(cache / f"{prefix}{secrets.token_hex(6)}")
    folder.make()
    with locks.holding(folder.path):
        how = ""
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await boot(folder)
                    await folder.wait(timeout_s)
            except TimeoutError:
                how = f"it said nothing in {timeout_s:g} s"
            except (ProviderUnavailable, CreateFailed):
                raise  # with all that there is to say
            except ProviderError as error:
                await folder.wait(_LAST_WORDS_S)
                how = str(error)
            said = folder.read_console()
            if SAID not in said:
                how = how or folder.how_it_ended() or f"it said nothing in {timeout_s:g} s"
                raise ProviderError(f"{how}: {said.strip()[-500:]}")
        finally:
            await _clear(hypervisor, folder)


async def _clear(hypervisor: Hypervisor, folder: VmFolder) -> None:
    await hypervisor.kill(folder)
    await asyncio.to_thread(folder.remove)


def remember(path: Path, text: str) -> None:
    """Note a finding about this host, whole or not at all."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)
