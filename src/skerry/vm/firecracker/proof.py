"""KVM, proven by a guest that ran: a device that can be opened, and even runs a little, may run no kernel."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from pathlib import Path

from skerry.errors import ProviderError, ProviderUnavailable
from skerry.host.processes import boot_id
from skerry.vm.base import Hypervisor, Kernel, Machine
from skerry.vm.firecracker.checks import NAME
from skerry.vm.folder import VmFolder
from skerry.vm.kvm import SAID

_PROBE = "skerry.probe"
_TIMEOUT_S = 30.0
_TRY = ".try-firecracker-"
_FIX_KERNEL = "skerry image build --vm --recipe minimal"
_FIX = "use a host whose KVM runs guests (not one in a machine without nested virtualisation), or the provider qemu"


async def prove(hypervisor: Hypervisor, kernel: Kernel | None, version: str, cache: Path) -> None:
    """Raises ProviderUnavailable. What was proven once holds until the host is started anew."""
    if kernel is None:
        raise ProviderUnavailable(NAME, "there is no kernel to try KVM with", fix=_FIX_KERNEL)
    proven, known = cache / "firecracker-works", f"{boot_id()} {version} {kernel.key}"
    with contextlib.suppress(OSError):
        if proven.read_text() == known:
            return
    cache.mkdir(mode=0o755, parents=True, exist_ok=True)
    await _sweep(hypervisor, cache)
    folder = VmFolder(cache / f"{_TRY}{secrets.token_hex(6)}")
    folder.make()
    machine = Machine(kernel=kernel, drives=(), vcpus=1, boot_args=(_PROBE,))
    try:
        await hypervisor.boot(folder, machine, None)
        await folder.wait(_TIMEOUT_S)
        said = folder.read_console()
        if SAID not in said:
            how = folder.how_it_ended() or f"it said nothing in {_TIMEOUT_S:g} s"
            raise ProviderError(f"{how}: {said.strip()[-500:]}")
    except ProviderUnavailable:
        raise
    except ProviderError as error:
        raise ProviderUnavailable(NAME, f"KVM runs no guest here: {error}", fix=_FIX) from error
    finally:
        await hypervisor.kill(folder)
        await asyncio.to_thread(folder.remove)
    proven.write_text(known)


async def _sweep(hypervisor: Hypervisor, cache: Path) -> None:
    """Remove what somebody left who was killed while trying."""
    for path in [*cache.glob(f"{_TRY}*")]:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > 2 * _TIMEOUT_S:
                await hypervisor.kill(VmFolder(path))
                await asyncio.to_thread(VmFolder(path).remove)
