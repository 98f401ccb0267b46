"""QEMU as a hypervisor, and the facts of this host that its machines depend on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from skerry.errors import Conflict, CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable, WrongState
from skerry.host import uids
from skerry.vm import guest, kvm, launch
from skerry.vm.base import Capabilities, Drive, Hypervisor, Kernel, Machine, MachineLimits
from skerry.vm.folder import VmFolder
from skerry.vm.qemu import command, qcow2, qmp, saved
from skerry.vm.qemu.command import QMP, Accelerator, Channel, HostFacts
from skerry.vm.qemu.qmp import Qmp

_log = logging.getLogger("skerry.vm")

_END_S = 10
_PROBE_S = 8
_SAVEABLE = "saveable.json"
_NOTE = ".json"
_READ_ONLY_MEMORY = (8, 2)
"""First version that maps a file copy-on-write without opening it for writing."""
_LOG = 4096
_VSOCK = "/dev/vhost-vsock"
_PROGRAM = "qemu-system-x86_64"
_PATH = "/usr/bin:/usr/local/bin:/bin"
_FIX = "apt-get install qemu-system-x86 (or your distribution's package of QEMU for x86)"
_VERSION_S = 20
_CPUINFO = Path("/proc/cpuinfo")
_SCALING = Path("/sys/devices/system/cpu/cpu0/cpufreq")


class _Saveable(msgspec.Struct, frozen=True):
    """Facts that are needed to save a machine: left beside it when it is started."""

    shape: list[str]
    sizes: Mapping[str, int]
    memory: int
    is_file: bool
    """Whether its memory is a file of its own: it was booted to be saved."""


class _Disk(msgspec.Struct, frozen=True):
    """Size of a drive, and the files below it."""

    size: int
    below: list[str]


class QemuHypervisor(Hypervisor):
    name: ClassVar[str] = "qemu"

    def __init__(
        self,
        cache: Path,
        kernel: Callable[[], Kernel | None] = lambda: None,
        channel: Channel = "port",
        *,
        merges_memory: bool = False,
    ) -> None:
        """`cache` keeps what was found out of this host; `kernel` gives one to find it out with, once there is one.
        The channel `vsock` is the kernel's own, which needs its module vhost_vsock."""
        self._cache = cache
        self._has_vsock = channel == "vsock"
        self._demands_token = self._has_vsock  # which every user of the host can connect to
        self._any_kernel = kernel
        self._merges_memory = merges_memory
        self._version: str | None = None

    async def probe(self) -> Capabilities:
        """Raises ProviderUnavailable. Without a kernel to try, KVM counts as not there."""
        kernel = self._any_kernel()
        version = await self._find_version()
        if self._has_vsock and kvm.access(_VSOCK) is None:
            fix = f"modprobe vhost_vsock; chgrp kvm {_VSOCK}; chmod 660 {_VSOCK}"
            raise ProviderUnavailable(self.name, f"machines may not use {_VSOCK}", fix=fix)
        accelerator: Accelerator = "tcg" if kernel is None else await self._find_accelerator(kernel)
        # with an older one, a clone that was taken over could change the memory of others: it matters at a boundary
        can_clone = accelerator == "tcg" or numbers(version) >= _READ_ONLY_MEMORY
        return Capabilities(accelerator=accelerator, version=version, snapshots=can_clone, shares_memory=True)

    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        drive = Drive(name=name, path=f"{name}{qcow2.SUFFIX}", format="qcow2")
        await asyncio.to_thread(_make_overlay, folder, drive, base.absolute(), size or 0)
        return drive

    async def boot(self, folder: VmFolder, machine: Machine, limits: MachineLimits | None) -> None:
        about = await self._about_host(machine.kernel, folder, machine.cid)
        if self._demands_token:
            about = about._replace(token_digest=guest.new_token(folder))
        self._note_saveable(folder, machine, self._shape(machine, about), is_file=machine.saveable)
        what = command.command(machine, about, _layers(folder, machine))
        await asyncio.to_thread(launch.start, folder, what, limits)
        async with self._control(folder):
            """It has set up its devices and taken our call: it runs."""

    async def save(self, folder: VmFolder, into: Path) -> None:
        note = _saveable(folder)
        if not note.is_file:
            raise WrongState(f"the machine in {folder.path} was not booted to be saved")
        async with self._control(folder) as control:
            await control.execute("stop")
            state = await qmp.send_state(control)
            await control.execute("quit")
        if not await folder.wait(_END_S):
            raise ProviderError(f"the machine in {folder.path} was saved, and does not end")
        await self._keep(folder, into, note, state, folder.file(command.MEMORY), lasting=True)

    async def copy_memory(self, folder: VmFolder, into: Path) -> None:
        note, memory = _saveable(folder), into / saved.MEMORY
        if note.is_file:
            raise WrongState(f"the machine in {folder.path} has its memory in a file: save it")
        async with self._control(folder) as control:
            await control.execute("stop")
            state = await qmp.send_memory(control, memory, note.memory)
        await self._keep(folder, into, note, state, memory, lasting=False)

    async def _keep(
        self, folder: VmFolder, into: Path, note: _Saveable, state: bytes, memory: Path, *, lasting: bool
    ) -> None:
        version = await self._find_version()
        # an older QEMU opens it for writing, though it never writes, as a clone's own user
        older = 0o666 if uids.are_available() else 0o600
        token = folder.read_token()
        if token is not None:
            VmFolder(into).write_token(token)
        await asyncio.to_thread(
            saved.write,
            into,
            state=state,
            memory=memory,
            mode=0o444 if numbers(version) >= _READ_ONLY_MEMORY else older,
            about=saved.About(version=version, cpu=cpu_model(), shape=note.shape),
            sizes=note.sizes,
            lasting=lasting,
        )

    def _note_saveable(self, folder: VmFolder, machine: Machine, shape: list[str], *, is_file: bool) -> None:
        note = _Saveable(shape, _sizes(folder, machine), machine.memory_mib << 20, is_file)
        folder.write_file(_SAVEABLE, msgspec.json.encode(note))

    async def restore(
        self, folder: VmFolder, machine: Machine, saved_in: Path, limits: MachineLimits | None, *, frozen: bool = False
    ) -> None:
        about = await self._about_host(machine.kernel, folder, machine.cid)
        version, shape = await self._find_version(), self._shape(machine, about)
        now = saved.About(version=version, cpu=cpu_model(), shape=shape)
        note, state = await asyncio.to_thread(saved.read, saved_in, now)
        token = VmFolder(saved_in).read_token()
        if token is not None:
            folder.write_token(token)
        elif self._demands_token:
            raise Conflict(f"the machine saved in {saved_in} demands no token; save it anew")
        self._note_saveable(folder, machine, shape, is_file=False)
        what = command.command(machine, about, _layers(folder, machine), saved_in / saved.MEMORY)
        await asyncio.to_thread(launch.start, folder, what, limits)
        sizes = _sizes(folder, machine)
        async with self._control(folder) as control:
            try:
                await qmp.receive_state(control, state)
            except ProviderError as error:
                said = folder.read_console(_LOG).strip()
                raise Conflict(f"the machine saved in {saved_in} cannot be restored: {error}\n{said}") from error
            for name, size in sizes.items():
                if size != note.sizes[name]:
                    await control.execute("block_resize", {"node-name": name, "size": size})
            if not frozen:
                await control.execute("cont")

    def why_no_network(self) -> str | None:
        return launch.why_no_network()

    async def pause(self, folder: VmFolder) -> None:
        await self._execute(folder, "stop")

    async def resume(self, folder: VmFolder) -> None:
        await self._execute(folder, "cont")

    async def is_paused(self, folder: VmFolder) -> bool:
        return not (await self._execute(folder, "query-status"))["running"]

    async def _execute(self, folder: VmFolder, command: str) -> Any:
        async with self._control(folder) as control:
            return await control.execute(command)

    async def kill(self, folder: VmFolder) -> None:
        await asyncio.to_thread(launch.kill, folder)

    @contextlib.asynccontextmanager
    async def _control(self, folder: VmFolder) -> AsyncIterator[Qmp]:
        """Connect to QEMU's control socket. Raises CreateFailed with its last words if it is gone."""
        try:
            async with qmp.connect(folder.file(QMP)) as control:
                yield control
        except qmp.QmpGone as error:
            await folder.wait(_END_S)  # it may still be about to end
            how = folder.how_it_ended() or "it does not listen"
            raise CreateFailed(f"{error}: {how}", log=folder.read_console(_LOG)) from error

    async def _find_version(self) -> str:
        if self._version is None:
            self._version = await asyncio.to_thread(find_version, self._cache)
        return self._version

    def _shape(self, machine: Machine, about: HostFacts) -> list[str]:
        return command.shape(machine, about.accelerator, has_vsock=self._has_vsock)

    async def _about_host(self, kernel: Kernel | None, folder: VmFolder, cid: int | None = None) -> HostFacts:
        """Facts for a machine in this folder; without a kernel, for one that tries KVM."""
        accelerator: Accelerator = "kvm" if kernel is None else await self._find_accelerator(kernel)
        devices = [*([kvm.DEVICE] if accelerator == "kvm" else []), *([_VSOCK] if self._has_vsock else [])]
        taken = await asyncio.to_thread(launch.take_cid, folder.path, cid) if self._has_vsock else None
        return HostFacts(
            program=program(),
            accelerator=accelerator,
            tsc_khz=tsc_khz(),
            opens_memory_read_only=numbers(await self._find_version()) >= _READ_ONLY_MEMORY,
            device_groups=tuple(group for device in devices for group in kvm.access(device) or ()),
            cid=taken,
            merges_memory=self._merges_memory,
        )

    async def _find_accelerator(self, kernel: Kernel) -> Accelerator:
        if kvm.access() is None:
            return "tcg"
        works = await kvm.works(self._cache, await self._find_version(), lambda: self._try_kvm(kernel))
        return "kvm" if works else "tcg"

    async def _try_kvm(self, kernel: Kernel) -> bool:
        async def boot(folder: VmFolder) -> None:
            what = command.command(kvm.probe_machine(kernel), await self._about_host(None, folder), {})
            await asyncio.to_thread(launch.start, folder, what, None)

        try:
            await kvm.try_guest(self, self._cache, _PROBE_S, boot)
            return True
        except ProviderError as error:
            _log.info("KVM does not run QEMU here: %s", error)
            return False


def _saveable(folder: VmFolder) -> _Saveable:
    try:
        return msgspec.json.decode(folder.read_note(_SAVEABLE), type=_Saveable)
    except msgspec.MsgspecError:
        raise WrongState(f"the machine in {folder.path} was started by another version: it cannot be saved") from None


def _make_overlay(folder: VmFolder, drive: Drive, base: Path, size: int) -> None:
    disk = _Disk(max(size, qcow2.size_of(base)), [str(layer) for layer in qcow2.layers(base)])
    qcow2.create(folder.file(drive.path), base, disk.size)
    folder.write_file(f"{drive.path}{_NOTE}", msgspec.json.encode(disk))


def _disk_of(folder: VmFolder, drive: Drive) -> _Disk:
    """Facts noted when it was made: the machine may have changed an overlay's header. Raises InvalidSpec."""
    if drive.format == "raw":
        return _Disk(os.stat(folder.path / drive.path).st_size, [])
    try:
        return msgspec.json.decode(folder.read_note(f"{drive.path}{_NOTE}"), type=_Disk)
    except msgspec.MsgspecError:
        reason = f"the drive {drive.path} was not made in {folder.path}: use raw ones from elsewhere"
        raise InvalidSpec(reason) from None


def _layers(folder: VmFolder, machine: Machine) -> dict[str, tuple[Path, ...]]:
    """Files of each drive; the uppermost is named as the machine, which runs in its folder, finds it."""
    return {drive.name: (Path(drive.path), *map(Path, _disk_of(folder, drive).below)) for drive in machine.drives}


def _sizes(folder: VmFolder, machine: Machine) -> dict[str, int]:
    return {drive.name: _disk_of(folder, drive).size for drive in machine.drives}


def program() -> str:
    """Path of QEMU. Raises ProviderUnavailable."""
    path = shutil.which(_PROGRAM, path=_PATH)
    if path is None:
        raise ProviderUnavailable("qemu", f"{_PROGRAM} is not installed", fix=_FIX)
    return path


def find_version(cache: Path) -> str:
    """Version with the packager's own number: what one build has saved another may not restore. It is asked once for
    each program, as that takes as long as a clone. Raises ProviderUnavailable."""
    path = program()
    status = os.stat(path)
    known = cache / f"qemu-{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"
    try:
        return known.read_text()
    except FileNotFoundError:
        found = _ask(path)
    kvm.remember(known, found)
    return found


def _ask(path: str) -> str:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, timeout=_VERSION_S, check=True, env={})
    except (OSError, subprocess.SubprocessError) as error:
        raise ProviderUnavailable("qemu", f"QEMU cannot be run: {error}", fix=_FIX) from error
    found = re.search(r"version (\d+\.\d+.*)", said.stdout.decode(errors="replace"))
    if found is None:
        raise ProviderUnavailable("qemu", f"{_PROGRAM} does not tell its version", fix=_FIX)
    return found[1].strip()


def numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(re.match(r"\d+", minor)[0])  # type: ignore[index]


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    return found[1].strip() if found else "unknown"


def tsc_khz(cpuinfo: Path = _CPUINFO, scaling: Path = _SCALING) -> int | None:
    """Rate of the processor's clock; None where it only tells how fast it happens to run."""
    try:
        return int((scaling / "base_frequency").read_text())
    except OSError:
        found = re.search(r"^cpu MHz\s*:\s*([\d.]+)$", cpuinfo.read_text(), re.MULTILINE)
    return None if found is None or scaling.exists() else int(float(found[1]) * 1000)
