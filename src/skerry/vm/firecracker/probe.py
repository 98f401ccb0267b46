"""Probe and checks: Firecracker's programs on this host, KVM by a guest that ran, and machines that it can run."""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import struct
import subprocess
import time
from pathlib import Path

import msgspec

from skerry.clock import boot_id
from skerry.errors import CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable, Unsupported
from skerry.vm import kvm
from skerry.vm.base import Hypervisor, Kernel, Machine
from skerry.vm.folder import read_note, write_note

NAME = "firecracker"
MAX_VCPUS = 32
_MAX_BOOT_ARGS = 2048
_PER_DEVICE = 64
"""Bytes that Firecracker itself adds to the arguments for each device."""
_FIRST_WITH_BZIMAGE = (1, 17)
_LOSES_WHAT_IT_RESUMES = (1, 16)
"""Release whose guests never answer on vsock once the API has paused and resumed them: 1.16.0 and 1.16.1 are known
for it, 1.15.1 and 1.17 are not."""
_LOSES_WHAT_IT_RESTORES = (1, 16, 0)
"""Release of whose clones some never answer on vsock, by what was in flight when their template was saved."""
_DRIVE_NAME = re.compile(r"[A-Za-z0-9_]{1,64}")
_VERSION = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_ELF_X86 = 62
_EXECUTABLE = 2
_GROUP = stat.S_IRGRP | stat.S_IWGRP
_GOOD = "1.15.1"
_DRIVEN = (_GOOD, "1.17.0")
"""Versions that this provider was driven on, the latter before its release, and that nothing speaks against."""
FIX = (
    f"put firecracker and jailer of release {_GOOD} of github.com/firecracker-microvm/firecracker into /usr/local/bin, "
    "or set providers.firecracker.program"
)
_VERSION_S = 10.0
_PROBE_S = 15.0
"""Less than `skerry doctor` waits, so that it tells the reason."""
_FAILED_S = 600.0
"""How long a failure is believed, as every command would wait for the next; one of a host that was too busy passes."""
_FINDING = "firecracker-kvm.json"
_FIX_KERNEL = "skerry image build --vm --recipe minimal"
_FIX_START = "mend that; with providers.firecracker.jailer empty machines start without a jail"
_FIX_KVM = (
    "use a host whose KVM runs guests (not one in a machine without nested virtualisation), or the provider qemu; "
    f"it is tried again {_FAILED_S / 60:g} minutes after it failed"
)


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


def check_device(*, in_jail: bool, device: Path = Path(kvm.DEVICE)) -> None:
    """Raise ProviderUnavailable unless the device is there and machines may use it. In a jail they have their own."""
    if not device.exists():
        reason = f"there is no {device}: this host's processor or kernel has no virtualisation, or it is switched off"
        fix = "load the module kvm_intel or kvm_amd, allow nested virtualisation, or use the provider qemu"
        raise ProviderUnavailable(NAME, reason, fix=fix)
    if os.access(device, os.R_OK | os.W_OK) if in_jail else kvm.access(str(device)) is not None:
        return
    if os.geteuid() == 0:
        reason = f"machines have uids of their own and no jail, and may not use {device}"
        raise ProviderUnavailable(NAME, reason, fix=f"install Firecracker's jailer, or {_open_to_group(device)}")
    raise ProviderUnavailable(NAME, f"you may not use {device}", fix=_how_to_join(device))


def _open_to_group(device: Path) -> str:
    return f"chgrp kvm {device} && chmod 660 {device}"


def _how_to_join(device: Path) -> str:
    """Commands by which we may use it: as a member of its group, once that may."""
    import grp
    import pwd

    status, user = device.stat(), pwd.getpwuid(os.geteuid()).pw_name
    if status.st_gid and status.st_mode & _GROUP == _GROUP:
        return f"usermod -aG {grp.getgrgid(status.st_gid).gr_name} {user}; then log in anew"
    return f"as root: {_open_to_group(device)} && usermod -aG kvm {user}; then log in anew"


@functools.cache
def _version(program: Path, _changed: int) -> str:
    try:
        said = subprocess.run(
            [program, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_VERSION_S
        )
        return ".".join(map(str, parse_version(said.stdout)))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ProviderUnavailable(NAME, f"{program} does not tell its version: {error}", fix=FIX) from error


class _Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a probe."""

    host: str
    """Boot and version that it holds for."""
    tried: str
    """Kernel and device that a failure holds for."""
    problem: str = ""
    """Why KVM runs no guest; empty if it does."""


async def probe_kvm(hypervisor: Hypervisor, kernel: Kernel | None, version: str, cache: Path) -> None:
    """Run a guest, once for each boot of the host: see `kvm`. Raises ProviderUnavailable."""
    note, host = cache / _FINDING, f"{boot_id()} {version}"
    found = read_note(note, _Finding)
    if found is not None and (found.host != host or (found.problem and not _is_believed(note, found, kernel))):
        found = None
    if found is None and kernel is None:
        raise ProviderUnavailable(NAME, "there is no kernel to try KVM with", fix=_FIX_KERNEL)
    if found is None and kernel is not None:
        problem = await _why_no_guest(hypervisor, kernel, cache)
        found = _Finding(host=host, tried=_tried(kernel), problem=problem)
        write_note(note, found)
    if found is not None and found.problem:
        raise ProviderUnavailable(NAME, f"KVM runs no guest here: {found.problem}", fix=_FIX_KVM)


async def _why_no_guest(hypervisor: Hypervisor, kernel: Kernel, cache: Path) -> str:
    """Reason why a guest did not run; empty if it did. Raises ProviderUnavailable if it could not be tried, which says
    nothing of KVM."""
    machine = kvm.probe_machine(kernel)
    try:
        await kvm.try_guest(hypervisor, cache, _PROBE_S, lambda folder: hypervisor.boot(folder, machine, None))
    except ProviderUnavailable:
        raise
    except CreateFailed as error:
        reason = f"no machine starts here that KVM could be tried with: {error}"
        raise ProviderUnavailable(NAME, reason, fix=_FIX_START) from error
    except ProviderError as error:
        return str(error)
    return ""


def _is_believed(note: Path, failure: _Finding, kernel: Kernel | None) -> bool:
    is_same = kernel is None or failure.tried == _tried(kernel)
    return is_same and abs(time.time() - note.stat().st_mtime) < _FAILED_S


def _tried(kernel: Kernel) -> str:
    """Text that changes with the kernel, and with the device: a module that is loaded anew makes another."""
    try:
        return f"{kernel.key} {os.stat(kvm.DEVICE).st_ctime_ns}"
    except OSError:
        return kernel.key


def parse_version(text: str) -> tuple[int, int, int]:
    """Version in text like `Firecracker v1.16.1` or `1.17.0-dev`. Raises ValueError."""
    found = _VERSION.search(text)
    if found is None:
        raise ValueError(f"no version in {text[:100]!r}")
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch)


def loses_what_it_resumes(version: str) -> bool:
    return parse_version(version)[:2] == _LOSES_WHAT_IT_RESUMES


def loses_what_it_restores(version: str) -> bool:
    return parse_version(version) == _LOSES_WHAT_IT_RESTORES


def why_not_good(version: str) -> str | None:
    """What speaks against a version, and the one to take instead; None for a good one."""
    if loses_what_it_resumes(version):
        reason = f"{version} loses guests that its API pauses: they are stopped by signals instead"
        if loses_what_it_restores(version):
            reason += "; it loses clones too, so each machine boots"
        return f"{reason}; {_GOOD} is good"
    return None if version in _DRIVEN else f"this provider was never driven on {version}; {_GOOD} is good"


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
    if head[:4] == b"\x7fELF" and machine == "aarch64":
        return "is an ELF file: on aarch64 Firecracker boots an Image, as Debian's kernels are"
    if head[:4] == b"\x7fELF":
        kind, built_for = struct.unpack_from("<HH", head, 16) if len(head) >= 20 else (0, 0)
        if kind != _EXECUTABLE:
            return "is an ELF file, but no kernel"
        return None if built_for == _ELF_X86 and machine == "x86_64" else f"is not for {machine}"
    if head[0x38:0x3C] == b"ARMd":
        return None if machine == "aarch64" else f"is not for {machine}"
    if head[0x202:0x206] == b"HdrS":
        return None if version[:2] >= _FIRST_WITH_BZIMAGE else "is compressed, which Firecracker boots from 1.17 on"
    return "is no kernel"
