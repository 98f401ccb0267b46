"""What Firecracker does not check, or only once it is too late: held to before anything is started."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path

from skerry.errors import InvalidSpec, Unsupported
from skerry.vm.base import FIRST_CID, Kernel, Machine

NAME = "firecracker"
MAX_VCPUS = 32
_MAX_CID = 2**32 - 1
_MAX_BOOT_ARGS = 2048
_PER_DEVICE = 64
"""What Firecracker itself adds to the arguments for each device."""
_FIRST_WITH_BZIMAGE = (1, 17)
_DRIVE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_JAIL_ID = re.compile(r"[A-Za-z0-9-]{1,64}")
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}
_EXECUTABLE = 2


def parse_version(text: str) -> tuple[int, int, int]:
    """From `Firecracker v1.16.1`, `1.17.0-dev` and the like."""
    found = _VERSION.search(text)
    if found is None:
        raise ValueError(f"no version in {text[:100]!r}")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch)


def check_machine(machine: Machine, boot_args: str) -> None:
    """Whether Firecracker can run such a machine at all."""
    if not 1 <= machine.vcpus <= MAX_VCPUS:
        raise InvalidSpec(f"{machine.vcpus} vCPUs: Firecracker has 1 to {MAX_VCPUS}", field="cpus")
    if machine.memory_mib < 1:
        raise InvalidSpec(f"a memory of {machine.memory_mib} MiB: Firecracker needs at least 1", field="memory")
    if not FIRST_CID <= machine.cid <= _MAX_CID:
        raise InvalidSpec(f"the CID {machine.cid}: those of guests are {FIRST_CID} to {_MAX_CID}", field="cid")
    if machine.network != "none":
        raise Unsupported("network", NAME, "it has no user-mode network; use network none, or the provider qemu")
    _check_boot_args(boot_args, len(machine.drives) + 2)
    names = [drive.name for drive in machine.drives]
    if len({*names}) < len(names):
        raise InvalidSpec(f"drives {', '.join(names)}: one name is there twice", field="drives")
    for drive in machine.drives:
        if not _DRIVE_NAME.fullmatch(drive.name):
            raise InvalidSpec(f"a drive named {drive.name!r}: only letters, digits and _ will do", field="drives")
        if drive.format != "raw":
            raise InvalidSpec(
                f"the drive {drive.name} is {drive.format}: Firecracker has raw ones only", field="drives"
            )


def _check_boot_args(boot_args: str, devices: int) -> None:
    room = _MAX_BOOT_ARGS - devices * _PER_DEVICE
    if len(boot_args.encode()) > room:
        raise InvalidSpec(f"{len(boot_args.encode())} bytes of boot arguments: there is room for {room}", field="boot")
    if not boot_args.isascii() or not boot_args.isprintable():
        raise InvalidSpec("boot arguments can only have printable ASCII characters", field="boot")


def kernel_file(kernel: Kernel, version: str) -> Path:
    """The file to boot: uncompressed if there is one, else as it is, if this version can boot that."""
    problems = []
    for path in (kernel.vmlinux, kernel.vmlinuz):
        problem = _why_no_kernel(path, parse_version(version))
        if problem is None:
            return path
        problems.append(f"{path} {problem}")
    raise InvalidSpec(f"no kernel that Firecracker can boot: {'; '.join(problems)}", field="kernel")


def _why_no_kernel(path: Path, version: tuple[int, ...]) -> str | None:
    """Firecracker takes any file for a kernel, and fails when it starts."""
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


def check_jail_id(id: str) -> None:
    if not _JAIL_ID.fullmatch(id):
        raise InvalidSpec(f"the jail {id!r}: only letters, digits and - will do, and 64 of them", field="id")
