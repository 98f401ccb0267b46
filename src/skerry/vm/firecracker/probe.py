"""Probe and checks: Firecracker's programs on this host, KVM by a guest that ran, and machines that it can run."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

import msgspec

from skerry.clock import boot_id
from skerry.errors import InvalidSpec, ProviderError, ProviderUnavailable, Unsupported
from skerry.vm import kvm
from skerry.vm.base import Hypervisor, Kernel, Machine

NAME = "firecracker"
MAX_VCPUS = 32
_MAX_BOOT_ARGS = 2048
_PER_DEVICE = 64
"""Bytes that Firecracker itself adds to the arguments for each device."""
_FIRST_WITH_BZIMAGE = (1, 17)
_DRIVE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_EXECUTABLE = 2
FIX = (
    "put firecracker and jailer of a release of github.com/firecracker-microvm/firecracker into /usr/local/bin, "
    "or set providers.firecracker.program"
)
_VERSION_S = 10.0
_PROBE_S = 30.0
_FIX_KERNEL = "skerry image build --vm --recipe minimal"
_FIX_KVM = "use a host whose KVM runs guests (not one in a machine without nested virtualisation), or the provider qemu"


class Programs(msgspec.Struct, frozen=True):
    """Firecracker's two programs on this host."""

    firecracker: Path
    """File itself, not a link to it: the jailer calls a folder by its name."""
    jailer: Path | None
    """None where machines run without a jail."""
    version: str


def find(firecracker: str, jailer: str) -> Programs:
    """Find them by name or path. Raises ProviderUnavailable."""
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
    """Raise ProviderUnavailable unless the device is there and ours."""
    if not device.exists():
        reason = f"there is no {device}: this host's processor or kernel has no virtualisation, or it is switched off"
        fix = "load the module kvm_intel or kvm_amd, allow nested virtualisation, or use the provider qemu"
        raise ProviderUnavailable(NAME, reason, fix=fix)
    if not os.access(device, os.R_OK | os.W_OK):
        import pwd

        user = pwd.getpwuid(os.geteuid()).pw_name
        raise ProviderUnavailable(NAME, f"you may not use {device}", fix=f"usermod -aG kvm {user}; then log in anew")


@functools.cache
def _version(program: Path, _changed: int) -> str:
    try:
        said = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_VERSION_S
        )
        return ".".join(map(str, parse_version(said.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ProviderUnavailable(NAME, f"{program} does not tell its version: {error}", fix=FIX) from error


async def probe_kvm(hypervisor: Hypervisor, kernel: Kernel | None, version: str, cache: Path) -> None:
    """Run a guest, once for each boot of the host: see `kvm`. Raises ProviderUnavailable."""
    if kernel is None:
        raise ProviderUnavailable(NAME, "there is no kernel to try KVM with", fix=_FIX_KERNEL)
    proven, known = cache / "firecracker-works", f"{boot_id()} {version} {kernel.key}"
    with contextlib.suppress(OSError):
        if proven.read_text() == known:
            return
    try:
        machine = kvm.probe_machine(kernel)
        await kvm.try_guest(hypervisor, cache, _PROBE_S, lambda folder: hypervisor.boot(folder, machine, None))
    except ProviderUnavailable:
        raise
    except ProviderError as error:
        raise ProviderUnavailable(NAME, f"KVM runs no guest here: {error}", fix=_FIX_KVM) from error
    proven.write_text(known)


def parse_version(text: str) -> tuple[int, int, int]:
    """Version in text like `Firecracker v1.16.1` or `1.17.0-dev`. Raises ValueError."""
    found = _VERSION.search(text)
    if found is None:
        raise ValueError(f"no version in {text[:100]!r}")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch)


def check_machine(machine: Machine, boot_args: str) -> None:
    """Raise InvalidSpec or Unsupported for what Firecracker does not check, or only once it is too late."""
    if not 1 <= machine.vcpus <= MAX_VCPUS:
        raise InvalidSpec(f"{machine.vcpus} vCPUs: Firecracker has 1 to {MAX_VCPUS}", field="cpus")
    if machine.memory_mib < 1:
        raise InvalidSpec(f"a memory of {machine.memory_mib} MiB: Firecracker needs at least 1", field="memory")
    if machine.network != "none":
        raise Unsupported("network", NAME, "it has no user-mode network; use network none, or the provider qemu")
    room, taken = _MAX_BOOT_ARGS - (len(machine.drives) + 2) * _PER_DEVICE, len(boot_args.encode())
    if taken > room:
        raise InvalidSpec(f"{taken} bytes of boot arguments: there is room for {room}", field="boot")
    if not boot_args.isascii() or not boot_args.isprintable():
        raise InvalidSpec("boot arguments can only have printable ASCII characters", field="boot")
    names = [drive.name for drive in machine.drives]
    if len({*names}) < len(names):
        raise InvalidSpec(f"drives {', '.join(names)}: one name is there twice", field="drives")
    for drive in machine.drives:
        if not _DRIVE_NAME.fullmatch(drive.name):
            raise InvalidSpec(f"a drive named {drive.name!r}: only letters, digits and _ will do", field="drives")
        if drive.format != "raw":
            reason = f"the drive {drive.name} is {drive.format}: Firecracker has raw ones only"
            raise InvalidSpec(reason, field="drives")


def kernel_file(kernel: Kernel, version: str) -> Path:
    """File to boot: uncompressed if there is one, else as it is, if this version can boot that. Raises InvalidSpec."""
    problems = {path: _why_no_kernel(path, parse_version(version)) for path in (kernel.vmlinux, kernel.vmlinuz)}
    for path, problem in problems.items():
        if problem is None:
            return path
    said = "; ".join(f"{path} {problem}" for path, problem in problems.items())
    raise InvalidSpec(f"no kernel that Firecracker can boot: {said}", field="kernel")


def _why_no_kernel(path: Path, version: tuple[int, ...]) -> str | None:
    """Reason why a file is no kernel: Firecracker takes any file, and fails when it starts."""
    try:
        with path.open("rb") as file:
            head = file.read(1024)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    machine = os.uname().machine
    if head[:4] == b"\x7fELF":
        kind, built_for = struct.unpack_from("<HH", head, 16) if len(head) >= 20 else (0, 0)
        if kind != _EXECUTABLE:
            return "is an ELF file, but no kernel"
        return None if built_for == _ELF_MACHINES.get(machine) else f"is not for {machine}"
    if head[0x38:0x3C] == b"ARMd":
        return None if machine == "aarch64" else f"is not for {machine}"
    if head[0x202:0x206] == b"HdrS":
        return None if version[:2] >= _FIRST_WITH_BZIMAGE else "is compressed, which Firecracker boots from 1.17 on"
    return "is no kernel"
