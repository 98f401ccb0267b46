"""QEMU behind the seam of hypervisors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import ClassVar, Literal

import msgspec

from skerry.errors import Conflict, CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable, WrongState
from skerry.host import uids
from skerry.vm import cids, kvm, launch
from skerry.vm.base import Capabilities, Drive, Hypervisor, Kernel, Limits, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.qemu import command, host, migration, qcow2, qmp, saved
from skerry.vm.qemu.command import QMP, Accelerator
from skerry.vm.qemu.qcow2 import Layer
from skerry.vm.qemu.qmp import Qmp

_PROBE_S = 8
_END_S = 10
_SAVEABLE = "saveable.json"
_NOTE = ".json"
_READ_ONLY_MEMORY = (8, 2)
"""The first version that maps a file copy-on-write without opening it for writing."""
_LOG = 4096
_VSOCK = "/dev/vhost-vsock"


class _Saveable(msgspec.Struct, frozen=True):
    """What must be known to save a machine: left beside it when it is booted for that."""

    shape: list[str]
    sizes: Mapping[str, int]


class _Disk(msgspec.Struct, frozen=True):
    """What a drive is made of: its size, and the files below it."""

    size: int
    below: list[str]


class Qemu(Hypervisor):
    name: ClassVar[str] = "qemu"

    def __init__(
        self,
        cache: Path,
        kernel: Callable[[], Kernel | None] = lambda: None,
        channel: Literal["port", "vsock"] = "port",
    ) -> None:
        """`cache` keeps what was found out of this host; `kernel` gives one to find it out with, once there is one.
        The channel `vsock` is the kernel's own, which needs its module vhost_vsock."""
        self._cache = cache
        self._has_vsock = channel == "vsock"
        self._any_kernel = kernel
        self._version: str | None = None

    async def probe(self) -> Capabilities:
        """Without a kernel nobody knows whether KVM runs one: until then it is said that software must."""
        kernel = self._any_kernel()
        version = await self._find_version()
        if self._has_vsock and kvm.access(_VSOCK) is None:
            fix = f"modprobe vhost_vsock; chgrp kvm {_VSOCK}; chmod 660 {_VSOCK}"
            raise ProviderUnavailable(self.name, f"machines may not use {_VSOCK}", fix=fix)
        accelerator: Accelerator = "tcg" if kernel is None else await self._find_accelerator(kernel)
        # An older one lets a clone that was taken over change the memory of others, so none of them is cloned where
        # the machine is a boundary; where it is none, nothing is lost.
        can_clone = accelerator == "tcg" or host.numbers(version) >= _READ_ONLY_MEMORY
        return Capabilities(accelerator=accelerator, version=version, snapshots=can_clone, shares_memory=True)

    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        drive = Drive(name=name, path=f"{name}{qcow2.SUFFIX}", format="qcow2")
        await asyncio.to_thread(_make_overlay, folder, drive, Layer(base.absolute()), size or 0)
        return drive

    async def boot(self, folder: VmFolder, machine: Machine, limits: Limits | None) -> None:
        about = await self._about_host(await self._find_accelerator(machine.kernel), folder)
        if machine.saveable:
            note = _Saveable(
                command.shape(machine, about.accelerator, has_vsock=self._has_vsock), _sizes(folder, machine)
            )
            folder.write_file(_SAVEABLE, msgspec.json.encode(note))
        await self._launch(folder, command.command(machine, about, _layers(folder, machine)), limits)
        async with self._control(folder):
            """It has set up its devices and taken our call: it runs."""

    async def save(self, folder: VmFolder, into: Path) -> None:
        try:
            note = msgspec.json.decode(folder.read_file(_SAVEABLE), type=_Saveable)
        except msgspec.MsgspecError:
            raise WrongState(f"the machine in {folder.path} was not booted to be saved") from None
        version = await self._find_version()
        async with self._control(folder) as control:
            await control.execute("stop")
            state = await migration.send(control)
            await control.execute("quit")
        if not await folder.wait(_END_S):
            raise ProviderError(f"the machine in {folder.path} was saved, and does not end")
        await asyncio.to_thread(
            saved.write,
            into,
            state=state,
            memory=folder.file(command.MEMORY),
            mode=_memory_mode(version),
            about=saved.About(version=version, cpu=host.cpu_model(), shape=note.shape),
            sizes=note.sizes,
        )

    async def restore(self, folder: VmFolder, machine: Machine, saved_in: Path, limits: Limits | None) -> None:
        about = await self._about_host(await self._find_accelerator(machine.kernel), folder)
        now = saved.About(
            version=await self._find_version(),
            cpu=host.cpu_model(),
            shape=command.shape(machine, about.accelerator, has_vsock=self._has_vsock),
        )
        note, state = await asyncio.to_thread(saved.read, saved_in, now)
        what = command.command(machine, about, _layers(folder, machine), saved_in / saved.MEMORY)
        await self._launch(folder, what, limits)
        sizes = _sizes(folder, machine)
        async with self._control(folder) as control:
            try:
                await migration.receive(control, state)
            except ProviderError as error:
                said = folder.read_console(_LOG).strip()
                raise Conflict(f"the machine saved in {saved_in} cannot be restored: {error}\n{said}") from error
            for name, size in sizes.items():
                if size != note.sizes[name]:
                    await control.execute("block_resize", {"node-name": name, "size": size})
            await control.execute("cont")

    async def pause(self, folder: VmFolder) -> None:
        async with self._control(folder) as control:
            await control.execute("stop")

    async def resume(self, folder: VmFolder) -> None:
        async with self._control(folder) as control:
            await control.execute("cont")

    async def is_paused(self, folder: VmFolder) -> bool:
        async with self._control(folder) as control:
            return bool((await control.execute("query-status"))["status"] == "paused")

    async def kill(self, folder: VmFolder) -> None:
        await asyncio.to_thread(launch.kill, folder)

    async def _launch(self, folder: VmFolder, what: launch.Launch, limits: Limits | None) -> None:
        await asyncio.to_thread(launch.start, folder, what, limits)

    @contextlib.asynccontextmanager
    async def _control(self, folder: VmFolder) -> AsyncIterator[Qmp]:
        """QEMU's ear; if it is gone, what it said last."""
        try:
            async with qmp.connect(folder.file(QMP)) as control:
                yield control
        except qmp.QmpGone as error:
            await folder.wait(_END_S)  # it may still be about to end
            how = folder.how_it_ended() or "it does not listen"
            raise CreateFailed(f"{error}: {how}", log=folder.read_console(_LOG)) from error

    async def _find_version(self) -> str:
        if self._version is None:
            self._version = await asyncio.to_thread(host.version, self._cache)
        return self._version

    async def _about_host(self, accelerator: Accelerator, folder: VmFolder) -> command.Host:
        found = [kvm.access()] if accelerator == "kvm" else []
        cid = None
        if self._has_vsock:
            found.append(kvm.access(_VSOCK))
            cid = await asyncio.to_thread(cids.take, folder.path)
        return command.Host(
            program=host.program(),
            accelerator=accelerator,
            tsc_khz=host.tsc_khz(),
            opens_memory_read_only=host.numbers(await self._find_version()) >= _READ_ONLY_MEMORY,
            device_groups=tuple(access.group for access in found if access is not None and access.group is not None),
            cid=cid,
        )

    async def _find_accelerator(self, kernel: Kernel) -> Accelerator:
        if kvm.access() is None:
            return "tcg"
        works = await kvm.works(self._cache, await self._find_version(), lambda: self._try_kvm(kernel))
        return "kvm" if works else "tcg"

    async def _try_kvm(self, kernel: Kernel) -> bool:
        self._cache.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".try-", dir=self._cache) as parent:
            folder = VmFolder(Path(parent) / "vm")
            folder.make()
            machine = Machine(kernel=kernel, drives=(), vcpus=1, boot_args=("skerry.probe",))
            try:
                await self._launch(folder, command.command(machine, await self._about_host("kvm", folder), {}), None)
                await folder.wait(_PROBE_S)
            except CreateFailed:
                return False
            finally:
                await self.kill(folder)
            return kvm.SAID in folder.read_console()


def _memory_mode(version: str) -> int:
    """Who may open saved memory: an older QEMU opens it for writing, though it never writes, as a clone's own user."""
    if host.numbers(version) >= _READ_ONLY_MEMORY:
        return 0o444
    return 0o666 if uids.are_available() else 0o600


def _make_overlay(folder: VmFolder, drive: Drive, base: Layer, size: int) -> None:
    disk = _Disk(max(size, qcow2.size_of(base)), [str(layer.path) for layer in qcow2.layers(base)])
    qcow2.create(folder.file(drive.path), base, disk.size)
    folder.write_file(f"{drive.path}{_NOTE}", msgspec.json.encode(disk))


def _disk_of(folder: VmFolder, drive: Drive) -> _Disk:
    """Not from the header of an overlay, which the machine may have changed, but from what was noted as it was made."""
    if drive.format == "raw":
        return _Disk(os.stat(folder.path / drive.path).st_size, [])
    try:
        return msgspec.json.decode(folder.read_file(f"{drive.path}{_NOTE}"), type=_Disk)
    except msgspec.MsgspecError:
        raise InvalidSpec(
            f"the drive {drive.path} was not made in {folder.path}: use raw ones from elsewhere"
        ) from None


def _layers(folder: VmFolder, machine: Machine) -> dict[str, tuple[Layer, ...]]:
    """Of each drive; the uppermost is named as the machine, which runs in its folder, finds it."""
    return {
        drive.name: (Layer(Path(drive.path)), *(Layer(Path(below)) for below in _disk_of(folder, drive).below))
        for drive in machine.drives
    }


def _sizes(folder: VmFolder, machine: Machine) -> dict[str, int]:
    return {drive.name: _disk_of(folder, drive).size for drive in machine.drives}
