"""Firecracker's two programs on this host: where they are, and which version."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from skerry.errors import ProviderUnavailable
from skerry.vm.firecracker.checks import NAME, parse_version

FIX = (
    "put firecracker and jailer of a release of github.com/firecracker-microvm/firecracker into /usr/local/bin, "
    "or set providers.firecracker.program"
)
_TIMEOUT_S = 10.0


class Programs(msgspec.Struct, frozen=True):
    firecracker: Path
    """The file itself, not a link to it: the jailer calls a folder by its name."""
    jailer: Path | None
    """None where machines run without a jail."""
    version: str


def find(firecracker: str, jailer: str) -> Programs:
    """By name or path. Raises ProviderUnavailable."""
    found = shutil.which(firecracker)
    if found is None:
        raise ProviderUnavailable(NAME, f"there is no {firecracker}", fix=FIX)
    path = Path(found).resolve()
    jailed_by = shutil.which(jailer) if jailer else None
    return Programs(
        firecracker=path,
        jailer=None if jailed_by is None else Path(jailed_by).resolve(),
        version=_version(path, path.stat().st_mtime_ns),
    )


def check_device(device: Path = Path("/dev/kvm")) -> None:
    if not device.exists():
        reason = f"there is no {device}: this host's processor or kernel has no virtualisation, or it is switched off"
        fix = "load the module kvm_intel or kvm_amd, allow nested virtualisation, or use the provider qemu"
        raise ProviderUnavailable(NAME, reason, fix=fix)
    if not os.access(device, os.R_OK | os.W_OK):
        raise ProviderUnavailable(NAME, f"you may not use {device}", fix=f"usermod -aG kvm {_user()}; then log in anew")


@functools.cache
def _version(program: Path, _changed: int) -> str:
    try:
        said = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        return ".".join(map(str, parse_version(said.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ProviderUnavailable(NAME, f"{program} does not tell its version: {error}", fix=FIX) from error


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.geteuid()).pw_name
