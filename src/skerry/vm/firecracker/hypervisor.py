"""Firecracker as a hypervisor: every machine is a process of its own, in a jail where we may make one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from skerry.errors import Conflict, CreateFailed
from skerry.vm import launch, sparse
from skerry.vm.base import CHANNEL, Capabilities, Drive, Hypervisor, Kernel, Limits, Machine
from skerry.vm.firecracker import checks, keeping, model, place, programs, proof
from skerry.vm.firecracker.api import Api, Gone, Refused
from skerry.vm.firecracker.keeping import MEMORY, STATE, Note
from skerry.vm.firecracker.place import API, drive_path
from skerry.vm.firecracker.programs import Programs
from skerry.vm.folder import VmFolder

_BOOT_ARGS = (
    *("console=ttyS0", "quiet", "loglevel=3", "reboot=k", "panic=-1", "pci=off"),
    *("i8042.noaux", "i8042.nomux", "i8042.dumbkbd", "skerry.channel=vsock"),
)
"""A guest ends its machine by a reboot through the keyboard's controller: Firecracker has no power switch."""
_KERNEL, _INITRD = "kernel", "initrd"
_API_UP_S = 15.0
_LOOK_AGAIN_S = 0.003
_LAST_WORDS_S = 1.0


class Firecracker(Hypervisor):
    name = checks.NAME

    def __init__(
        self,
        cache: Path,
        kernel: Callable[[], Kernel | None],
        *,
        program: str = "firecracker",
        jailer: str = "jailer",
    ) -> None:
        """`cache` keeps what was found out of this host, and `kernel` gives one to find it out with. Without a jailer,
        or where we are not root, machines run without a jail."""
        self._cache = cache
        self._any_kernel = kernel
        self._program = program
        self._jailer = jailer
        self._can: Capabilities | None = None
        self._probing = asyncio.Lock()

    async def probe(self) -> Capabilities:
        async with self._probing:
            if self._can is None:
                found = await self._programs()
                programs.check_device()
                await proof.prove(self, self._any_kernel(), found.version, self._cache)
                self._can = Capabilities(accelerator="kvm", version=found.version, snapshots=True, shares_memory=True)
            return self._can

    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        path = f"{name}.raw"
        await asyncio.to_thread(_copy, base, folder.file(path), size)
        return Drive(name=name, path=path)

    async def boot(self, folder: VmFolder, machine: Machine, limits: Limits | None) -> None:
        boot_args = " ".join((*_BOOT_ARGS, *machine.boot_args))
        checks.check_machine(machine, boot_args)
        found = await self._programs()
        kernel = checks.kernel_file(machine.kernel, found.version)
        files = {_KERNEL: kernel, _INITRD: machine.kernel.initrd}
        api = await self._start(folder, machine, limits, files, found)
        await api.set_machine_config(model.MachineConfig(vcpu_count=machine.vcpus, mem_size_mib=machine.memory_mib))
        await api.set_boot_source(model.BootSource(kernel_image_path=_KERNEL, initrd_path=_INITRD, boot_args=boot_args))
        for drive in machine.drives:
            await api.set_drive(_device(drive))
        await api.set_vsock(model.Vsock(guest_cid=machine.cid, uds_path=CHANNEL))
        await api.act("InstanceStart")

    async def save(self, folder: VmFolder, into: Path) -> None:
        note = Note.read(folder.path)
        api = _api(folder)
        await api.set_state("Paused")
        await api.create_snapshot(
            model.SnapshotCreate(
                snapshot_type="Full", snapshot_path=keeping.NEW_STATE, mem_file_path=keeping.NEW_MEMORY
            )
        )
        await asyncio.to_thread(launch.kill, folder)
        await asyncio.to_thread(keeping.keep, note, folder.file(note.home), into)
        await self.kill(folder)

    async def restore(self, folder: VmFolder, machine: Machine, saved: Path, limits: Limits | None) -> None:
        checks.check_machine(machine, "")
        found = await self._programs()
        before = await asyncio.to_thread(keeping.check, saved, machine, found.version)
        files = {STATE: saved / STATE, MEMORY: saved / MEMORY}
        api = await self._start(folder, machine, limits, files, found)
        backend = model.MemoryBackend(backend_type="File", backend_path=MEMORY)
        try:
            await api.load_snapshot(model.SnapshotLoad(snapshot_path=STATE, mem_backend=backend, resume_vm=True))
        except (Refused, Gone) as error:
            raise Conflict(f"{saved} cannot be restored here: {error}") from error
        for name, size in Note.read(folder.path).drives.items():
            if size != before.drives[name]:
                await api.update_drive(model.DriveUpdate(drive_id=name, path_on_host=drive_path(name)))

    async def pause(self, folder: VmFolder) -> None:
        await _api(folder).set_state("Paused")

    async def resume(self, folder: VmFolder) -> None:
        await _api(folder).set_state("Resumed")

    async def is_paused(self, folder: VmFolder) -> bool:
        return (await _api(folder).instance()).state == "Paused"

    async def kill(self, folder: VmFolder) -> None:
        await asyncio.to_thread(_kill, folder)

    async def _programs(self) -> Programs:
        return await asyncio.to_thread(programs.find, self._program, self._jailer)

    async def _start(
        self, folder: VmFolder, machine: Machine, limits: Limits | None, files: Mapping[str, Path], found: Programs
    ) -> Api:
        """The process, with nothing configured."""
        await asyncio.to_thread(_launch, folder, machine, limits, files, found)
        api = _api(folder)
        deadline = time.monotonic() + _API_UP_S
        while True:
            try:
                await api.instance()
                return api
            except Gone as error:
                if folder.how_it_ended() or time.monotonic() > deadline:
                    await folder.wait(_LAST_WORDS_S)
                    reason = folder.how_it_ended() or f"it did not answer within {_API_UP_S:g} s"
                    words = folder.read_console(4096)
                    raise CreateFailed(f"Firecracker did not start: {reason}", log=words) from error
            await asyncio.sleep(_LOOK_AGAIN_S)


def _api(folder: VmFolder) -> Api:
    return Api(folder.file(Note.read(folder.path).home) / API)


def _launch(
    folder: VmFolder, machine: Machine, limits: Limits | None, files: Mapping[str, Path], found: Programs
) -> None:
    made = place.prepare(folder, machine, files, found)
    Note.of(machine, folder.path, found.version, made.home).write(folder.path)
    launch.start(folder, made.launch, limits)


def _kill(folder: VmFolder) -> None:
    if folder.path.exists():
        launch.kill(folder)
        place.clear(folder)


def _device(drive: Drive) -> model.Drive:
    """None is Firecracker's root device: our own first process finds the root, and no argument is added for it."""
    return model.Drive(
        drive_id=drive.name,
        path_on_host=drive_path(drive.name),
        is_root_device=False,
        is_read_only=drive.read_only,
        cache_type=None if drive.read_only else "Writeback",
    )


def _copy(base: Path, target: Path, size: int | None) -> None:
    sparse.copy(base, target)
    if size is not None and size > target.stat().st_size:
        os.truncate(target, size)
