"""Firecracker as a hypervisor: every machine is a process of its own, in a jail where we may make one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from skerry.aio import backoff
from skerry.errors import Conflict, CreateFailed, ProviderError, Unsupported
from skerry.host import processes, sparse
from skerry.host.processes import Process
from skerry.vm import launch
from skerry.vm.base import CHANNEL, FIRST_CID, Capabilities, Drive, Hypervisor, Kernel, Machine, MachineLimits
from skerry.vm.firecracker import api as bodies
from skerry.vm.firecracker import jail, probe, snapshot_note
from skerry.vm.firecracker.api import Api, ApiRefused, Gone, VmState
from skerry.vm.firecracker.jail import API, drive_path
from skerry.vm.firecracker.probe import Programs
from skerry.vm.firecracker.snapshot_note import MEMORY, NEW_MEMORY, NEW_STATE, STATE, MachineNote
from skerry.vm.folder import VmFolder

_BOOT_ARGS = (
    *("console=ttyS0", "quiet", "loglevel=3", "reboot=k", "panic=-1", "pci=off"),
    *("i8042.noaux", "i8042.nomux", "i8042.dumbkbd", "skerry.channel=vsock"),
)
"""A guest ends its machine by a reboot through the keyboard's controller: Firecracker has no power switch."""
Files = Mapping[str, Path]
_KERNEL, _INITRD = "kernel", "initrd"
_API_UP_S = 15.0
_LOOK_AGAIN_S = 0.003
_LAST_WORDS_S = 1.0
_HALT_S = 10.0


class FirecrackerHypervisor(Hypervisor):
    name = probe.NAME

    def __init__(
        self, cache: Path, kernel: Callable[[], Kernel | None], *, program: str = "firecracker", jailer: str = "jailer"
    ) -> None:
        """`cache` keeps findings about this host, and `kernel` gives one to probe KVM with. Without a jailer, or where
        we are not root, machines run without a jail."""
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
                probe.check_device(in_jail=jail.why_no_jail(self._cache, found) is None)
                await probe.probe_kvm(self, self._any_kernel(), found.version, self._cache)
                can_clone = not probe.loses_what_it_restores(found.version)
                self._can = Capabilities(
                    accelerator="kvm", version=found.version, snapshots=can_clone, shares_memory=True
                )
            return self._can

    async def make_disk(self, folder: VmFolder, name: str, *, base: Path, size: int | None = None) -> Drive:
        path = f"{name}.raw"
        await asyncio.to_thread(_copy, base, folder.file(path), size)
        return Drive(name=name, path=path)

    async def boot(self, folder: VmFolder, machine: Machine, limits: MachineLimits | None) -> None:
        boot_args = " ".join((*_BOOT_ARGS, *machine.boot_args))
        probe.check_machine(machine, boot_args)
        found = await self._programs()
        files = {_KERNEL: probe.kernel_file(machine.kernel, found.version), _INITRD: machine.kernel.initrd}
        api = await self._start(folder, machine, limits, files, found)
        for body in (
            bodies.MachineConfigBody(vcpu_count=machine.vcpus, mem_size_mib=machine.memory_mib),
            bodies.BootSource(kernel_image_path=_KERNEL, initrd_path=_INITRD, boot_args=boot_args),
            *map(_device, machine.drives),
            bodies.Vsock(guest_cid=machine.cid or FIRST_CID, uds_path=CHANNEL),
            bodies.InstanceAction(action_type="InstanceStart"),
        ):
            await api.send(body)

    async def save(self, folder: VmFolder, into: Path) -> None:
        note = MachineNote.read(folder.path)
        api = _api(folder)
        await api.send(VmState(state="Paused"))
        await api.send(bodies.SnapshotCreate(snapshot_type="Full", snapshot_path=NEW_STATE, mem_file_path=NEW_MEMORY))
        await asyncio.to_thread(launch.kill, folder)
        await asyncio.to_thread(snapshot_note.keep, note, folder.file(note.home), into)
        await self.kill(folder)

    async def copy_memory(self, folder: VmFolder, into: Path) -> None:
        note = MachineNote.read(folder.path)
        if probe.loses_what_it_resumes(note.version):
            raise Unsupported("memory", self.name, f"{note.version} loses guests that go on after they were saved")
        api = _api(folder)
        await api.send(VmState(state="Paused"))
        await api.send(bodies.SnapshotCreate(snapshot_type="Full", snapshot_path=NEW_STATE, mem_file_path=NEW_MEMORY))
        # its process lives, and may have kept its files open: what others are made of is a copy
        await asyncio.to_thread(snapshot_note.keep, note, folder.file(note.home), into, copied=True)

    async def restore(
        self, folder: VmFolder, machine: Machine, saved: Path, limits: MachineLimits | None, *, frozen: bool = False
    ) -> None:
        probe.check_machine(machine, "")
        found = await self._programs()
        before = await asyncio.to_thread(snapshot_note.check, saved, machine, found.version)
        files = {STATE: saved / STATE, MEMORY: saved / MEMORY}
        api = await self._start(folder, machine, limits, files, found)
        backend = bodies.MemoryBackend(backend_type="File", backend_path=MEMORY)
        try:
            await api.send(bodies.SnapshotLoad(snapshot_path=STATE, mem_backend=backend, resume_vm=not frozen))
        except (ApiRefused, Gone) as error:
            raise Conflict(f"{saved} cannot be restored here: {error}") from error
        for name, size in MachineNote.read(folder.path).drives.items():
            if size != before.drives[name]:
                await api.send(bodies.DriveUpdate(drive_id=name, path_on_host=drive_path(name)))

    async def pause(self, folder: VmFolder) -> None:
        process = _paused_by_signal(folder)
        if process is None:
            await _api(folder).send(VmState(state="Paused"))
            return
        _send(process, signal.SIGSTOP)
        for delay_s in backoff(_LOOK_AGAIN_S, _LOOK_AGAIN_S, _HALT_S):
            if processes.is_halted(process):
                return
            await asyncio.sleep(delay_s)
        raise ProviderError(f"Firecracker's process {process.pid} was not stopped within {_HALT_S:g} s")

    async def resume(self, folder: VmFolder) -> None:
        process = _paused_by_signal(folder)
        if process is None:
            await _api(folder).send(VmState(state="Resumed"))
        else:
            _send(process, signal.SIGCONT)

    async def is_paused(self, folder: VmFolder) -> bool:
        process = _paused_by_signal(folder)
        if process is None:
            return (await _api(folder).instance()).state == "Paused"
        return processes.is_halted(process)

    async def kill(self, folder: VmFolder) -> None:
        await asyncio.to_thread(_kill, folder)

    async def _programs(self) -> Programs:
        return await asyncio.to_thread(probe.find, self._program, self._jailer)

    async def _start(
        self, folder: VmFolder, machine: Machine, limits: MachineLimits | None, files: Files, found: Programs
    ) -> Api:
        """Start the process, with nothing configured. Raises CreateFailed."""
        await asyncio.to_thread(_launch, folder, machine, limits, files, found)
        api = _api(folder)
        gone: Gone | None = None
        for delay_s in backoff(_LOOK_AGAIN_S, _LOOK_AGAIN_S, _API_UP_S):
            try:
                await api.instance()
                return api
            except Gone as error:
                gone = error
                if folder.how_it_ended():
                    break
            await asyncio.sleep(delay_s)
        await folder.wait(_LAST_WORDS_S)
        reason = folder.how_it_ended() or f"it did not answer within {_API_UP_S:g} s"
        raise CreateFailed(f"Firecracker did not start: {reason}", log=folder.read_console(4096)) from gone


def _api(folder: VmFolder) -> Api:
    return Api(folder.file(MachineNote.read(folder.path).home) / API)


def _paused_by_signal(folder: VmFolder) -> Process | None:
    """Process of a machine that its Firecracker would lose: it is stopped and continued as a whole. None for others.
    The version is the one that runs it, whatever is installed by now. Raises Conflict, Gone."""
    if not probe.loses_what_it_resumes(MachineNote.read(folder.path).version):
        return None
    vm = folder.read()
    if vm is None or vm.vmm is None:
        raise Gone(f"there is no Firecracker in {folder.path}")
    return vm.vmm


def _send(process: Process, number: signal.Signals) -> None:
    if not processes.send(process, number):
        raise Gone(f"Firecracker's process {process.pid} has ended")


def _launch(folder: VmFolder, machine: Machine, limits: MachineLimits | None, files: Files, found: Programs) -> None:
    process, home = jail.prepare(folder, machine, files, found)
    MachineNote.of(machine, folder.path, found.version, home).write(folder.path)
    launch.start(folder, process, limits)


def _kill(folder: VmFolder) -> None:
    if folder.path.exists():
        launch.kill(folder)
        jail.clear(folder)


def _device(drive: Drive) -> bodies.DriveBody:
    """No drive is Firecracker's root device: our own first process finds the root, and no argument is added for it."""
    return bodies.DriveBody(
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
