"""Boxes as virtual machines, each with a kernel of its own: all but the hypervisor that runs them."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from skerry.agent.stream import Stream
from skerry.errors import AgentError, CallInterrupted, Conflict, ProviderError, Unsupported, WrongState
from skerry.host import uids
from skerry.providers.base import (
    BoxStatus,
    Capability,
    Enforcement,
    Isolation,
    Provider,
    Snapshot,
    Volume,
)
from skerry.providers.image_verbs import ImageVerbs
from skerry.providers.machine import guest, logs, plan, states
from skerry.providers.machine.boxes import Box, Disk, Meta, all_boxes
from skerry.providers.machine.creation import Creator, coming_up
from skerry.providers.machine.images import MachineImages
from skerry.providers.machine.machinery import Machinery
from skerry.providers.machine.reach import Reach
from skerry.providers.machine.settings import MachineConfig
from skerry.providers.machine.snapshots import Snapshots
from skerry.providers.machine.sources import Sources
from skerry.providers.machine.volumes import Volumes
from skerry.spec import Network, SandboxId, Spec
from skerry.vm import sparse
from skerry.vm.base import Capabilities, Hypervisor
from skerry.vm.folder import VmFolder
from skerry.vm.images.kernels import KernelStore
from skerry.vm.templates import TemplateStore

_GRACE_S = 5.0
"""How long the processes of a box that is stopped have to end."""
_CONTROL_S = 5.0
_HOLD_S = 30.0
"""How long somebody else may be at a box beyond the time that it takes to start one."""


class MachineProvider(ImageVerbs, Provider):
    """A subclass has a name and says which hypervisor runs its machines."""

    isolation = Isolation.VM
    capabilities = frozenset(Capability) - {Capability.WATCH}
    honours = frozenset({"image", "writable_root", "data", "snapshot"})
    Config: ClassVar[type[MachineConfig]] = MachineConfig

    def __init__(self, config: MachineConfig | None = None) -> None:
        self._config = config or self.Config()
        self._defaults = self._config.limits(self.name)
        self._data_size = self._config.size_of_data(self.name)
        self._timeout_s = self._config.start_timeout_s
        self._state_dir = self._config.state(self.name)
        cache = self._config.cache() / "vm"
        self._sources = Sources(cache)
        self._hypervisor = self.hypervisor(cache)
        self._reach = Reach()
        self._volumes = Volumes(self._state_dir)
        self._snapshots = Snapshots(self._state_dir)
        store = TemplateStore(cache) if self._config.template else None
        self._machinery = Machinery(self._hypervisor, store, self._timeout_s, self.flavour)
        self._creator = Creator(
            self.name,
            self._hypervisor,
            self._machinery,
            self._sources,
            self._reach,
            self._volumes,
            self._snapshots,
        )

    @cached_property
    def _images(self) -> MachineImages:
        return MachineImages(self._config.cache() / "vm", self._state_dir)

    # what a subclass says

    @abstractmethod
    def hypervisor(self, cache: Path) -> Hypervisor:
        """What runs the machines; what machines share is in `cache`."""

    @property
    def flavour(self) -> str:
        """What of the settings makes a machine another than it would be: clones are of the same."""
        return ""

    async def why_no_network(self) -> str | None:
        """None where machines can have a network that leads out and not to the host."""
        return "it has none; leave network out"

    async def copy_disk(self, folder: VmFolder, disk: Disk, target: Path) -> None:
        """A copy of a disk that nobody writes to now, as one raw file that leans on no other."""
        await asyncio.to_thread(sparse.copy, folder.path / disk.drive.path, target)

    # the five verbs

    async def check(self) -> None:
        await self._can()

    async def describe(self) -> Mapping[str, Enforcement]:
        can = await self._can()
        return {
            "hypervisor": Enforcement(by=f"{self._hypervisor.name} {can.version}, {can.accelerator}"),
            **plan.enforcement(Spec(provider=self.name), self._defaults, can, has_own_uid=uids.are_available()),
            "image": await self._sources.told(),
        }

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        plan.refuse_what_is_never_honoured(self.name, spec)
        if spec.network == Network.BRIDGE and (reason := await self.why_no_network()) is not None:
            raise Unsupported("network", self.name, reason)
        can, limits = await self._can(), self._defaults.of(spec)
        held = plan.enforcement(spec, limits, can, has_own_uid=uids.are_available())
        if spec.snapshot is None:
            held["image"] = (await self._sources.find(spec.image)).told()
        return held

    async def create(self, id: SandboxId, spec: Spec) -> None:
        plan.refuse_what_is_never_honoured(self.name, spec)
        box = self._box(id)
        box.make()  # at once: a destroy that comes after a cancelled create must find it
        try:
            async with box.locked(self._timeout_s) as exists, coming_up(box, self._timeout_s):
                if not exists:
                    raise ProviderError(f"box {id} was destroyed before it was made")
                await self._creator.make(box, spec, self._defaults.of(spec), self._data_size)
        except Conflict:
            await self.destroy(id)  # nobody else would: a taken id is a conflict too, and that box is not ours
            raise

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        self._reach.forget(id)
        box = self._box(id)
        volume = None
        async with box.locked(self._timeout_s + _HOLD_S) as exists:
            if exists:
                meta = box.read_meta()
                volume = None if meta is None else meta.volume
                if volume is not None and not volumes:
                    await self._shut_down(box, 0)
                await self._machinery.clear(box.template)
                await self._machinery.clear(box.vm)
                await box.remove()
        if volumes:
            self._volumes.drop_data_of(id, volume)

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        images, boxes = self._sources.ids(), all_boxes(self._state_dir)
        found = await asyncio.gather(*(states.status_of(box, self._hypervisor, images) for box in boxes))
        return {box.id: status for box, status in zip(boxes, found, strict=True) if status is not None}

    async def dial(self, id: SandboxId) -> Stream:
        return await self._reach.dial(self._box(id))

    async def aclose(self) -> None:
        self._reach.close()

    # the optional verbs

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._reach.as_user(self._box(id), user)

    async def stop(self, id: SandboxId) -> None:
        box = self._box(id)
        self._reach.forget(id)
        async with self._held(box):
            box.mark_stopped()
            await self._shut_down(box, _GRACE_S)
            await self._hypervisor.kill(box.vm)
            box.mark_whole(False)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        box = self._box(id)
        async with self._held(box) as meta:
            if box.is_whole and box.vm.is_running():
                raise WrongState(f"box {id} runs")
            box.mark_stopped()
            box.mark_whole(False)
            box.mark_paused(False)
            await self._hypervisor.kill(box.vm)
            try:
                async with coming_up(box, self._timeout_s):
                    await self._creator.start(box, meta, spec, self._defaults.of(spec))
            except BaseException:
                await self._machinery.clear(box.template)
                await self._hypervisor.kill(box.vm)
                raise
            box.mark_stopped(False)

    async def pause(self, id: SandboxId) -> None:
        box = self._box(id)
        async with self._held(box):
            self._refuse_ended(box)
            if not await self._hypervisor.is_paused(box.vm):
                try:
                    await self._pause(box)
                except BaseException:
                    await self._resume(box)
                    raise

    async def resume(self, id: SandboxId) -> None:
        box = self._box(id)
        async with self._held(box):
            self._refuse_ended(box)
            await self._resume(box)

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
        """What the machines boot."""
        return self._images.store.kernels

    def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        return logs.of_box(self._box(id), follow=follow, tail=tail)

    # how they are done

    async def _can(self) -> Capabilities:
        await self._sources.find_kernel()
        return await self._hypervisor.probe()

    def _box(self, id: SandboxId) -> Box:
        return Box(self._state_dir, id)

    def _held(self, box: Box) -> contextlib.AbstractAsyncContextManager[Meta]:
        return box.held(self._timeout_s + _HOLD_S)

    def _refuse_ended(self, box: Box) -> None:
        if not box.vm.is_running():
            raise WrongState(f"the machine of box {box.id} does not run")

    async def _shut_down(self, box: Box, grace_s: float) -> None:
        """Let it write out what outlives it. What does not listen is ended all the same, by the caller."""
        if not box.is_whole or not box.vm.is_running():
            return
        try:
            await self._resume(box)
            async with guest.control(box.vm, _CONTROL_S) as client:
                await client.call("shutdown", {"grace_s": grace_s}, type=dict[str, Any])
        except CallInterrupted:
            """It has ended before it could answer."""
        except (AgentError, ProviderError):
            return
        await box.vm.wait(grace_s + _CONTROL_S)

    async def _pause(self, box: Box) -> None:
        """Once its files are written out. A guest that does not listen is paused all the same."""
        box.mark_paused()
        with contextlib.suppress(AgentError):
            async with guest.control(box.vm, _CONTROL_S) as client:
                await client.call("freeze", type=dict[str, Any])
        await self._hypervisor.pause(box.vm)

    async def _resume(self, box: Box) -> None:
        if not box.may_be_paused:
            return
        await self._hypervisor.resume(box.vm)
        with contextlib.suppress(AgentError):
            async with guest.control(box.vm, _CONTROL_S) as client:
                await client.call("thaw", type=dict[str, Any])
                await guest.sync_clock(client)
        box.mark_paused(False)

    @contextlib.asynccontextmanager
    async def _still(self, box: Box) -> AsyncIterator[None]:
        """While nothing is written to its disk, and all that was is on it."""
        if not box.vm.is_running() or (box.may_be_paused and await self._hypervisor.is_paused(box.vm)):
            yield
            return
        try:
            await self._pause(box)
            yield
        finally:
            await self._resume(box)
