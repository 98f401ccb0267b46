"""Boxes as virtual machines, each with a kernel of its own: all but the hypervisor that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import msgspec

from skerry.errors import (
    AgentUnreachable,
    Conflict,
    NotFound,
    ProviderError,
    Unsupported,
    WrongState,
)
from skerry.host import sparse, uids
from skerry.model.spec import Network, SandboxId, Spec
from skerry.net.stream import Stream
from skerry.providers.base import (
    BoxChange,
    BoxStatus,
    Capability,
    Enforcement,
    ImageVerbs,
    Isolation,
    Provider,
    Snapshot,
    Volume,
)
from skerry.providers.machine import plan
from skerry.providers.machine.boxes import Disk, MachineBox, MachineMeta, Mark, all_boxes, status_of
from skerry.providers.machine.create import MachineCreator, coming_up
from skerry.providers.machine.images import MachineImages, Sources
from skerry.providers.machine.plan import MachineConfig
from skerry.providers.machine.power import MachinePower
from skerry.providers.machine.snapshots import DiskSnapshots, data_beside, memory_beside
from skerry.providers.machine.volumes import DiskVolumes
from skerry.providers.shared import layout, loopback, polling, volume_plan
from skerry.providers.shared.dialer import DIAL_S, FirstStreams
from skerry.vm import console, guest, templates
from skerry.vm.base import AGENT_PORT, Capabilities, Hypervisor
from skerry.vm.folder import VmFolder
from skerry.vm.images.kernels import KernelStore
from skerry.vm.templates import TemplateStore

_log = logging.getLogger("skerry.providers")

_HOLD_S = 30.0
"""How long somebody else may be at a box beyond the time that it takes to start one."""


class _Agent(msgspec.Struct):
    port: int


class MachineProvider(ImageVerbs, Provider):
    """A subclass has a name and says which hypervisor runs its machines."""

    isolation = Isolation.VM
    takes_memory_here = True
    capabilities = frozenset(Capability)
    honours = frozenset({"image", "writable_root", "admin", "data", "snapshot", "sleep_after_s"})
    needs_builder = True
    Config: ClassVar[type[MachineConfig]] = MachineConfig

    def __init__(self, config: MachineConfig | None = None) -> None:
        self._config = config or self.Config()
        self._defaults = self._config.limits(self.name)
        self._data_size = self._config.size(self.name, "data_size")
        self._timeout_s = self._config.start_timeout_s
        self._state_dir = self._config.state(self.name)
        cache = self._config.cache() / "vm"
        self._sources = Sources(cache, self._config.kernel_file())
        self._hypervisor = self.hypervisor(cache)
        self._first_streams = FirstStreams()
        self._volumes = DiskVolumes(self._state_dir)
        self._snapshots = DiskSnapshots(self._state_dir)
        self._power = MachinePower(self._hypervisor, self._first_streams)
        self._creator = MachineCreator(
            provider=self.name,
            hypervisor=self._hypervisor,
            store=TemplateStore(cache) if self._config.template else None,
            sources=self._sources,
            first_streams=self._first_streams,
            volumes=self._volumes,
            snapshots=self._snapshots,
            timeout_s=self._timeout_s,
            flavour=self.flavour,
        )

    @cached_property
    def _images(self) -> MachineImages:
        return MachineImages(self._config.cache() / "vm", self._state_dir, self._config.kernel_file())

    @abstractmethod
    def hypervisor(self, cache: Path) -> Hypervisor:
        """Hypervisor that runs the machines; what they share is in `cache`."""

    @property
    def flavour(self) -> str:
        """Settings that make templates differ, as a text."""
        return ""

    async def why_no_network(self) -> str | None:
        """Reason why machines can have no network that leads out and not to the host; None where they can."""
        return "it has none; leave network out"

    def why_no_memory(self) -> str | None:
        """Reason why memory of machines cannot be kept, beside what this host lacks; None where it can."""
        return None

    async def _check_memory(self, field: str) -> None:
        """Raise Unsupported where memory cannot be kept and come back as another's."""
        reason = self.why_no_memory()
        if reason is None and not (can := await self._can()).snapshots:
            reason = f"{self._hypervisor.name} {can.version} does not bring memory back here without a risk for others"
        if reason is not None:
            raise Unsupported(field, self.name, reason)

    async def copy_disk(self, folder: VmFolder, disk: Disk, target: Path) -> None:
        """Copy a disk that nobody writes to now into one raw file that leans on no other. Raises ProviderError."""
        fd = folder.open_file(disk.drive.path)
        if fd is None:
            raise ProviderError(f"{folder.path / disk.drive.path} is not the disk that was made there: it is not read")
        try:
            await asyncio.to_thread(sparse.copy, Path(f"/proc/self/fd/{fd}"), target)
        finally:
            os.close(fd)

    async def check(self) -> None:
        await self._can()

    async def describe(self) -> Mapping[str, Enforcement]:
        can = await self._can()
        return {
            "hypervisor": Enforcement(by=f"{self._hypervisor.name} {can.version}, {can.accelerator}"),
            **plan.enforcement(Spec(provider=self.name), self._defaults, can, has_own_uid=uids.are_available()),
            "rules": Enforcement(by=loopback.BY_RULES),
            "image": await self._sources.told(),
        }

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        plan.refuse_unsupported(self.name, spec)
        if spec.network == Network.BRIDGE and (reason := await self.why_no_network()) is not None:
            raise Unsupported("network", self.name, reason)
        if spec.sleep_after_s:
            await self._check_memory("sleep_after_s")
        can, limits = await self._can(), self._defaults.of(spec)
        held = plan.enforcement(spec, limits, can, has_own_uid=uids.are_available())
        if spec.snapshot is None:
            source = await self._sources.find(spec.image)
            layout.check_command(spec, source.image.command)
            held["image"] = source.told()
        return held

    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:
        plan.refuse_unsupported(self.name, spec)
        box = self._box(id)
        box.make()  # at once: a destroy that comes after a cancelled create must find it
        try:
            async with box.locked(self._timeout_s) as exists, coming_up(box, self._timeout_s):
                if not exists:
                    raise ProviderError(f"box {id} was destroyed before it was made")
                await self._creator.make(box, spec, self._defaults.of(spec), self._data_size)
                said = plan.enforcement(spec, self._defaults.of(spec), await self._can(), has_own_uid=False)
                return plan.read_back(said, box.vm.read())
        except Conflict:
            await self.destroy(id)  # nobody else would: a taken id is a conflict too, and that box is not ours
            raise

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        self._first_streams.forget(id)
        box = self._box(id)
        volume = None
        async with box.locked(self._timeout_s + _HOLD_S) as exists:
            if exists:
                if (meta := box.read_meta()) is not None:
                    volume = meta.volume
                if volume is not None and not volumes:
                    await self._power.shut_down(box)
                await templates.clear(self._hypervisor, box.template)
                await templates.clear(self._hypervisor, box.vm)
                await box.remove()
        if volumes:
            self._volumes.drop_data_of(id, volume)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        images, boxes = self._sources.ids(), all_boxes(self._state_dir)
        found = await asyncio.gather(*(status_of(box, self._hypervisor, images) for box in boxes))
        return {box.id: status for box, status in zip(boxes, found, strict=True) if status is not None}

    async def dial(self, id: SandboxId) -> Stream:
        """Hand out the stream that the box was started through, if nobody has had it yet; else another."""
        box = await self._reachable(id)
        return self._first_streams.take(id) or await box.vm.dial(AGENT_PORT, DIAL_S)

    async def aclose(self) -> None:
        self._first_streams.close()

    def memory_of(self, spec: Spec) -> int:
        return plan.most_memory(self._defaults.of(spec))

    def holds(self, spec: Spec) -> int | None:
        return self._defaults.of(spec).written + (self._data_size if volume_plan.has_data(spec) else 0)

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        """Dial an agent of another user, which ends with the stream."""
        box = await self._reachable(id)
        async with guest.control(box.vm, DIAL_S) as client:
            agent = await client.call("agent_as", {"user": user}, type=_Agent)
            return await box.vm.dial(agent.port, DIAL_S)

    async def stop(self, id: SandboxId) -> None:
        box = self._box(id)
        self._first_streams.forget(id)
        async with self._held(box):
            box.mark(Mark.STOPPED)
            await self._power.shut_down(box)
            await self._hypervisor.kill(box.vm)
            await asyncio.to_thread(box.forget_memory)
            box.mark(Mark.HELD, False)
            box.mark(Mark.WHOLE, False)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        box = self._box(id)
        async with self._held(box) as meta:
            if box.is_asleep() or (box.has(Mark.WHOLE) and box.vm.is_running()):
                raise WrongState(f"box {id} {'sleeps: resume it' if box.is_asleep() else 'runs'}")
            box.mark(Mark.STOPPED)
            box.mark(Mark.WHOLE, False)
            box.mark(Mark.PAUSED, False)
            await self._hypervisor.kill(box.vm)
            try:
                async with coming_up(box, self._timeout_s):
                    await self._creator.start(box, meta, spec, self._defaults.of(spec))
            except BaseException:
                await templates.clear(self._hypervisor, box.template)
                await self._hypervisor.kill(box.vm)
                raise
            box.mark(Mark.STOPPED, False)

    async def pause(self, id: SandboxId) -> None:
        box = self._box(id)
        async with self._held(box):
            _refuse_if_off(box)
            await self._power.pause(box)

    async def resume(self, id: SandboxId) -> None:
        box = self._box(id)
        async with self._held(box):
            if box.is_asleep():
                await self._power.wake(box)
                await self._power.greet(box)
            else:
                _refuse_if_off(box)
                await self._power.resume(box)

    async def sleep(self, id: SandboxId) -> None:
        box = self._box(id)
        await self._check_memory("memory")
        self._first_streams.forget(id)
        async with self._held(box):
            if not box.is_asleep():
                _refuse_if_off(box)
            await self._power.sleep(box)

    def watch(self) -> AsyncIterator[BoxChange]:
        return polling.watch(self.discover)

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        box = self._box(id)
        async with self._held(box) as meta:
            disk = box.read_disk()
            if disk is None:
                raise WrongState(f"box {id} has no disk: it was never made whole")

            async def copy(target: Path) -> None:
                async with self._power.still(box):
                    await self.copy_disk(box.vm, disk, target)

            return await self._snapshots.take(box, meta, name, copy)

    async def snapshot_memory(self, id: SandboxId, name: str) -> Snapshot:
        box = self._box(id)
        await self._check_memory("memory")
        async with self._held(box) as meta:
            disk = box.read_disk()
            if disk is None or not (box.is_asleep() or box.vm.is_running()):
                raise WrongState(f"box {id} has no memory: it does not run")

            async def copy(target: Path) -> None:
                into = memory_beside(target)
                into.mkdir(mode=0o700)
                async with self._power.with_memory(box, into):
                    await self.copy_disk(box.vm, disk, target)
                    if meta.volume is not None:
                        await asyncio.to_thread(sparse.copy, self._volumes.disk(meta.volume), data_beside(target))

            return await self._snapshots.take(box, meta, name, copy)

    async def snapshots(self) -> Sequence[Snapshot]:
        return self._snapshots.all()

    async def remove_snapshot(self, name: str) -> None:
        self._snapshots.remove(name)

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        return self._volumes.all()

    async def remove_volume(self, name: str) -> None:
        self._volumes.remove(name)

    @property
    def kernels(self) -> KernelStore:
        """Kernels that the machines boot."""
        return self._images.store.kernels

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        async for chunk in console.read(self._existing(id).vm, follow=follow, tail=tail):
            yield chunk

    async def _can(self) -> Capabilities:
        await self._sources.find_kernel()
        return await self._hypervisor.probe()

    def _box(self, id: SandboxId) -> MachineBox:
        return MachineBox(self._state_dir, id)

    def _held(self, box: MachineBox) -> contextlib.AbstractAsyncContextManager[MachineMeta]:
        return box.held(self._timeout_s + _HOLD_S, self._hypervisor)

    def _existing(self, id: SandboxId) -> MachineBox:
        box = self._box(id)
        if not box.path.is_dir():
            raise NotFound(f"there is no box {id}")
        return box

    async def _reachable(self, id: SandboxId) -> MachineBox:
        box = self._existing(id)
        await box.kill_if_left_alone()
        if box.is_asleep():
            raise AgentUnreachable("the machine sleeps: resume it first")
        if not box.vm.is_running():
            raise AgentUnreachable("the machine does not run: start it first, or destroy it")
        return box


def _refuse_if_off(box: MachineBox) -> None:
    if box.is_asleep():
        raise WrongState(f"box {box.id} sleeps: resume it first")
    if not box.vm.is_running():
        raise WrongState(f"the machine of box {box.id} does not run")
