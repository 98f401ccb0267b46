"""Boxes as virtual machines, each with a kernel of its own: all but the hypervisor that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from skerry.errors import (
    AgentError,
    AgentUnreachable,
    CallInterrupted,
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
from skerry.providers.machine.snapshots import DiskSnapshots
from skerry.providers.machine.volumes import DiskVolumes
from skerry.providers.shared import layout, loopback, polling, volume_plan
from skerry.providers.shared.dialer import DIAL_S, FirstStreams
from skerry.vm import console, guest, templates
from skerry.vm.base import AGENT_PORT, Capabilities, Hypervisor
from skerry.vm.folder import VmFolder
from skerry.vm.images.kernels import KernelStore
from skerry.vm.templates import TemplateStore

_log = logging.getLogger("skerry.providers")

_CONTROL_S = 5.0
_FREEZE_S = 30.0
"""How long a guest may take to write out what it has in memory."""
_HOLD_S = 30.0
"""How long somebody else may be at a box beyond the time that it takes to start one."""


class _Agent(msgspec.Struct):
    port: int


class MachineProvider(ImageVerbs, Provider):
    """A subclass has a name and says which hypervisor runs its machines."""

    isolation = Isolation.VM
    takes_memory_here = True
    capabilities = frozenset(Capability) - {Capability.MEMORY}
    honours = frozenset({"image", "writable_root", "admin", "data", "snapshot"})
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
                    await self._shut_down(box)
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
            await self._shut_down(box)
            await self._hypervisor.kill(box.vm)
            box.mark(Mark.WHOLE, False)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        box = self._box(id)
        async with self._held(box) as meta:
            if box.has(Mark.WHOLE) and box.vm.is_running():
                raise WrongState(f"box {id} runs")
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

    @contextlib.asynccontextmanager
    async def _held_running(self, id: SandboxId) -> AsyncIterator[MachineBox]:
        box = self._box(id)
        async with self._held(box):
            if not box.vm.is_running():
                raise WrongState(f"the machine of box {id} does not run")
            yield box

    async def pause(self, id: SandboxId) -> None:
        async with self._held_running(id) as box:
            if not await self._hypervisor.is_paused(box.vm):
                async with self._resumed_if_it_fails(box):
                    await self._pause(box)

    async def resume(self, id: SandboxId) -> None:
        async with self._held_running(id) as box:
            await self._resume(box)

    def watch(self) -> AsyncIterator[BoxChange]:
        return polling.watch(self.discover)

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        box = self._box(id)
        async with self._held(box) as meta:
            disk = box.read_disk()
            if disk is None:
                raise WrongState(f"box {id} has no disk: it was never made whole")

            async def copy(target: Path) -> None:
                async with self._still(box):
                    await self.copy_disk(box.vm, disk, target)

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
        return box.held(self._timeout_s + _HOLD_S)

    def _existing(self, id: SandboxId) -> MachineBox:
        box = self._box(id)
        if not box.path.is_dir():
            raise NotFound(f"there is no box {id}")
        return box

    async def _reachable(self, id: SandboxId) -> MachineBox:
        box = self._existing(id)
        await box.kill_if_left_alone()
        if not box.vm.is_running():
            raise AgentUnreachable("the machine does not run: start it first, or destroy it")
        return box

    async def _shut_down(self, box: MachineBox) -> None:
        """Let it write out its data. One that does not listen is killed all the same, by the caller."""
        if not box.has(Mark.WHOLE) or not box.vm.is_running():
            return
        try:
            await self._resume(box)
            await guest.call(box.vm, _CONTROL_S, "shutdown", {"grace_s": 0})
        except CallInterrupted:
            """It has ended before it could answer."""
        except (AgentError, ProviderError) as error:
            _log.debug("box %s does not shut down, and is killed: %s", box.id, error)
            return
        await box.vm.wait(_CONTROL_S)

    async def _pause(self, box: MachineBox) -> None:
        """Pause it once its files are written out. Raises ProviderError if its guest does not do that."""
        box.mark(Mark.PAUSED)
        try:
            await guest.call(box.vm, _FREEZE_S, "freeze")
        except AgentError as error:
            raise ProviderError(f"box {box.id} does not write out its files: {error}; stop or destroy it") from error
        await self._hypervisor.pause(box.vm)

    async def _resume(self, box: MachineBox) -> None:
        """Let it go on. Raises ProviderError if its guest does not; the next call tries again."""
        if not box.has(Mark.PAUSED):
            return
        await self._hypervisor.resume(box.vm)
        try:
            async with guest.control(box.vm, _CONTROL_S) as client:
                await client.call("thaw", type=dict[str, Any])
                await client.call("sync_clock", {"time": time.time()}, type=dict[str, Any])
        except AgentError as error:
            reason = f"box {box.id} was resumed, and its guest does not go on: {error}"
            raise ProviderError(f"{reason}; try again, or stop and start it") from error
        box.mark(Mark.PAUSED, False)

    @contextlib.asynccontextmanager
    async def _resumed_if_it_fails(self, box: MachineBox) -> AsyncIterator[None]:
        """Resume it if the code within fails, whose error is the one that counts."""
        try:
            yield
        except BaseException:
            try:
                await self._resume(box)
            except ProviderError as error:
                _log.warning("%s", error)
            raise

    @contextlib.asynccontextmanager
    async def _still(self, box: MachineBox) -> AsyncIterator[None]:
        """Hold its disk still, with all that was written on it."""
        if not box.vm.is_running() or (box.has(Mark.PAUSED) and await self._hypervisor.is_paused(box.vm)):
            yield
            return
        async with self._resumed_if_it_fails(box):
            await self._pause(box)
            yield
        await self._resume(box)
