"""Create of a machine, top to bottom: intent, disks, a clone or a boot, preparation, its agent's first answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.errors import AgentError, Conflict, CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable
from skerry.host import sparse
from skerry.model.spec import Spec
from skerry.providers.machine import memory, plan
from skerry.providers.machine.boxes import Disk, MachineBox, MachineMeta
from skerry.providers.machine.images import Source, Sources
from skerry.providers.machine.memory import Started
from skerry.providers.machine.snapshots import DiskSnapshots
from skerry.providers.machine.volumes import DiskVolumes
from skerry.providers.shared import loopback, volume_plan
from skerry.providers.shared.dialer import FirstStreams
from skerry.providers.shared.limits import BoxLimits
from skerry.vm import console, guest, templates
from skerry.vm.base import AGENT_PORT, Drive, Hypervisor, Machine, MachineLimits
from skerry.vm.folder import VmFolder
from skerry.vm.templates import Template, TemplateStore

_log = logging.getLogger("skerry.providers")

_DATA = "data"
_DISK = "disk"
_BASE = "base.ext4"
_LEAST_WITH_JOURNAL = 128 << 20
"""Smaller disks have no room for a journal."""
_TRIES = 2
_ANSWER_S = 20.0
"""How long a clone may take to answer before its template counts as broken."""
_SLOT_S = 10.0
"""A machine that takes longer to come up has most likely something to wait for, and keeps no other from it."""


class MachineCreator(msgspec.Struct, frozen=True, kw_only=True):
    """Creates machines. It undoes nothing: the caller destroys what is left of a failure."""

    provider: str
    hypervisor: Hypervisor
    store: TemplateStore | None
    """Without any, each machine boots from its kernel."""
    sources: Sources
    first_streams: FirstStreams
    volumes: DiskVolumes
    snapshots: DiskSnapshots
    timeout_s: float
    flavour: str
    """Tells templates of other settings apart."""
    boot_limit: BootLimit = msgspec.field(default_factory=lambda: BootLimit(len(os.sched_getaffinity(0)), _SLOT_S))

    async def make(self, box: MachineBox, spec: Spec, limits: BoxLimits, data_size: int) -> None:
        """Make a new box. Its disk comes first, so that a later start finds it."""
        taken = None if spec.snapshot is None else self.snapshots.get(spec.snapshot)
        if taken is not None and spec.writable_root != taken.writable_root:
            # a disk holds the box's own folders, or the changes of its whole root, and never both
            was = "could" if taken.writable_root else "could not"
            reason = f"the snapshot {taken.name!r} is of a box that {was} change its root; ask for the same"
            raise InvalidSpec(f"writable_root: {reason}", field="writable_root")
        source = await self.sources.find(spec.image if taken is None else taken.image)
        wanted = next(iter(volume_plan.wanted(self.provider, box.id, spec)), None)
        kept = None if taken is None else self.snapshots.memory(taken)
        is_fresh = taken is not None and self.snapshots.is_fresh(taken)
        data = None if taken is None else await self.snapshots.data(taken)
        if kept is not None and data is None:  # nothing that runs in it knows of a volume
            if spec.data:
                raise InvalidSpec("data: what runs in the snapshot has no volume; leave it out", field="data")
            wanted = None
        labels = {"skerry": self.provider, "skerry.sandbox": box.id, "skerry.project": spec.project}
        meta = MachineMeta(
            created_at=time.time(),
            image=source.image.id,
            asked=source.asked if taken is None else taken.asked,
            writable_root=spec.writable_root if taken is None else taken.writable_root,
            snapshot=spec.snapshot,
            volume=None if wanted is None else wanted.name,
            labels={**spec.labels, **labels},
        )
        with self.volumes.claiming(meta.volume, box.id):
            box.write_meta(meta)
        box.vm.make()
        if wanted is not None:
            blank = data or await self.sources.blank(data_size, journal=True)
            os.link(await self.volumes.make(wanted, blank, anew=kept is not None), box.vm.path / _DATA)
        else:
            await asyncio.to_thread(sparse.copy, data or await self.sources.blank(), box.vm.path / _DATA)
        below = await self._base(box, limits.disk) if taken is None else await self.snapshots.disk(taken)
        drive = await self.hypervisor.make_disk(box.vm, _DISK, base=below, size=limits.disk)
        box.write_disk(Disk(drive=drive, below=str(below), size=limits.disk))
        await self._start(box, meta, spec, limits, source, kept, is_fresh=is_fresh)
        if taken is not None:
            self.snapshots.trust(taken)

    async def _base(self, box: MachineBox, size: int) -> Path:
        """Blank file below a new disk, linked from the cache, where another may be in its place at the next start."""
        blank, below = await self.sources.blank(size, journal=size >= _LEAST_WITH_JOURNAL), box.path / _BASE
        try:
            os.link(blank, below)
        except OSError:  # another file system
            await asyncio.to_thread(sparse.copy, blank, below)
            below.chmod(0o444)
        return below

    async def start(self, box: MachineBox, meta: MachineMeta, spec: Spec, limits: BoxLimits) -> None:
        """Start a box whose disk is there and that does not run. Raises CreateFailed if it has none."""
        await self._start(box, meta, spec, limits, await self.sources.find(meta.image))

    async def _start(
        self,
        box: MachineBox,
        meta: MachineMeta,
        spec: Spec,
        limits: BoxLimits,
        source: Source,
        kept: Path | None = None,
        *,
        is_fresh: bool = False,
    ) -> None:
        """Start it; with a memory that was `kept` it goes on from there."""
        disk = box.read_disk()
        if disk is None:
            raise CreateFailed("the box has no disk: it was never made whole")
        can = await self.hypervisor.probe()
        machine = Machine(
            kernel=source.image.kernel,
            drives=(*source.drives, disk.drive, Drive(name=_DATA, path=_DATA)),
            vcpus=plan.vcpus(limits, can),
            memory_mib=plan.memory_mib(limits),
            network=plan.NETWORKS[spec.network],
            cid=plan.cid(meta),
        )
        host_limits = plan.host_limits(limits, can)
        prepared = plan.preparation(spec, limits, source, meta)
        started = Started(machine=machine, limits=host_limits, prepared=prepared, disk=disk.size)
        if kept is not None:
            before = memory.read(kept).started
            before.refuse_others(started)
            machine = before.with_drives(*machine.drives[-2:])
            started = msgspec.structs.replace(started, machine=machine)
        memory.write(box.started, started)
        name, machine_id = plan.hostname(box.id), plan.machine_id(box.id)
        async with self.boot_limit.slot():
            if kept is not None:
                with contextlib.closing(await self._go_on(box, started, kept, is_fresh=is_fresh)) as client:
                    await guest.reseed_and_thaw(client, name, machine_id)
            else:
                new = await self._clone(box, machine, host_limits, source)
                if new is None:
                    await guest.boot(self.hypervisor, box.vm, machine, host_limits)
                    new = await guest.greet(box.vm, self.timeout_s)
                with contextlib.closing(new) as client:
                    await guest.become(client, name, machine_id, prepared, folder=box.vm)
            stream = await box.vm.dial(AGENT_PORT, CONTROL_TIMEOUT_S)
            async with self.first_streams.first_client(box.id, stream, CONTROL_TIMEOUT_S) as agent:
                if kept is not None:
                    until = {"lifetime_s": prepared.lifetime_s, "idle_s": prepared.idle_s}
                    await agent.call("set_lifetime", until, type=dict[str, Any])
                if spec.env:
                    await agent.call("set_env", {"env": spec.env}, type=dict[str, Any])
                await loopback.check(agent, spec)
        box.mark_whole()

    async def _go_on(self, box: MachineBox, started: Started, kept: Path, *, is_fresh: bool) -> AgentClient:
        """Start it with the memory of another, in which nothing of its user's goes on yet. Raises Conflict."""
        if is_fresh:
            await self.hypervisor.restore(box.vm, started.machine, kept, started.limits)
        else:
            await memory.bring_back(self.hypervisor, box.vm, started.machine, started.limits, kept)
            await self.hypervisor.resume(box.vm)
        return await guest.greet(box.vm, min(_ANSWER_S, self.timeout_s / 2))

    async def _clone(
        self, box: MachineBox, machine: Machine, limits: MachineLimits, source: Source
    ) -> AgentClient | None:
        """Start it as a clone of a template; None where machines cannot be saved, or no template could be restored."""
        can = await self.hypervisor.probe()
        if self.store is None or not can.snapshots:
            return None
        key = templates.key_of(self.hypervisor.name, can, machine, self.flavour, *source.contents)
        for _ in range(_TRIES):
            template = self.store.get(key) or await self._make_template(key, box.template, machine, limits)
            async with self.store.cloning(template, self.hypervisor, box.vm, timeout_s=self.timeout_s):
                await self.hypervisor.restore(box.vm, machine, template.folder, limits)
                return await guest.greet(box.vm, min(_ANSWER_S, self.timeout_s / 2))
        _log.warning("box %s boots from its kernel: no clone of template %s works", box.id, key)
        return None

    async def _make_template(self, key: str, folder: VmFolder, machine: Machine, limits: MachineLimits) -> Template:
        """Boot a machine in the box's own folder, so that who ends the box ends that too, and save it."""
        assert self.store is not None

        async def build(into: Path) -> None:
            await templates.clear(self.hypervisor, folder)
            folder.make()
            blank = await self.sources.blank()  # nothing looks at a template's drives before a clone has its own
            drives = tuple([await self._template_drive(folder, drive, blank) for drive in machine.drives])
            first = msgspec.structs.replace(machine, drives=drives, cid=None, saveable=True)
            await guest.boot(self.hypervisor, folder, first, limits)
            await guest.warm(folder, self.timeout_s)
            await self.hypervisor.save(folder, into)
            await templates.clear(self.hypervisor, folder)

        return await self.store.make(key, build, timeout_s=self.timeout_s)

    async def _template_drive(self, folder: VmFolder, drive: Drive, blank: Path) -> Drive:
        if drive.read_only:
            return drive
        if drive.format == "raw":
            await asyncio.to_thread(sparse.copy, blank, folder.path / drive.name)
            return msgspec.structs.replace(drive, path=drive.name)
        return await self.hypervisor.make_disk(folder, drive.name, base=blank)


class BootLimit:
    """Limit of machines that come up at a time, as each needs a processor for itself. One that takes too long goes on,
    and the next begins all the same."""

    def __init__(self, count: int, longest_s: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._longest_s = longest_s

    @contextlib.asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a slot and hold it; the deadline is the caller's."""
        await self._free.acquire()
        taken = [self._free]

        def give_back() -> None:
            if taken:
                taken.pop().release()

        too_long = asyncio.get_running_loop().call_later(self._longest_s, give_back)
        try:
            yield
        finally:
            too_long.cancel()
            give_back()


@contextlib.asynccontextmanager
async def coming_up(box: MachineBox, timeout_s: float) -> AsyncIterator[None]:
    """Bound the time of a start. Raises CreateFailed with the last words of the machine."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (ProviderUnavailable, Conflict):
        raise
    except (ProviderError, AgentError, OSError) as error:  # a timeout is an OSError too
        words = error.log if isinstance(error, CreateFailed) else ""
        said = f": {error}".removesuffix(f"\n{words}")
        how = f" within {timeout_s:g} s" if isinstance(error, TimeoutError) else said
        last_words = words or console.last_words(box.template if box.template.path.exists() else box.vm)
        raise CreateFailed(f"the box did not come up{how}", log=last_words) from error
