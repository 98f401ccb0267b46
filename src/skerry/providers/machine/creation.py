"""Making one box, from the intent on disk to the first answer of its agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from skerry.errors import AgentError, Conflict, CreateFailed, InvalidSpec, ProviderError, ProviderUnavailable
from skerry.providers import volume_plan
from skerry.providers.limits import Limits
from skerry.providers.machine import guest, logs, plan
from skerry.providers.machine.boxes import Box, Disk, Meta
from skerry.providers.machine.machinery import Kind, Machinery
from skerry.providers.machine.reach import Reach
from skerry.providers.machine.snapshots import Snapshots, Taken
from skerry.providers.machine.sources import Source, Sources
from skerry.providers.machine.turns import Turns
from skerry.providers.machine.volumes import Volumes
from skerry.providers.volume_plan import Wanted
from skerry.spec import SandboxId, Spec
from skerry.vm import sparse
from skerry.vm.base import Capabilities, Drive, Hypervisor, Machine

_DATA = "data"
_DISK = "disk"
_BASE = "base.ext4"
_LEAST_WITH_JOURNAL = 128 << 20
"""Smaller disks have no room for one."""
_TURN_S = 10.0
"""A machine that takes longer to come up has most likely something to wait for, and keeps no other from it."""


class Creator:
    """Makes machines. It undoes nothing: whoever asked for one destroys what is left of it."""

    def __init__(
        self,
        provider: str,
        hypervisor: Hypervisor,
        machinery: Machinery,
        sources: Sources,
        reach: Reach,
        volumes: Volumes,
        snapshots: Snapshots,
    ) -> None:
        self._provider = provider
        self._hypervisor = hypervisor
        self._machinery = machinery
        self._sources = sources
        self._reach = reach
        self._volumes = volumes
        self._snapshots = snapshots
        self._turns = Turns(len(os.sched_getaffinity(0)), _TURN_S)

    async def make(self, box: Box, spec: Spec, limits: Limits, data_size: int) -> None:
        """A box that was never there. Its disk is made first, so that a later start finds it."""
        taken = None if spec.snapshot is None else self._snapshots.get(spec.snapshot)
        _refuse_another_layout(spec, taken)
        source = await self._sources.find(spec.image if taken is None else taken.image)
        wanted = next(iter(volume_plan.wanted(self._provider, box.id, spec)), None)
        meta = _intent(self._provider, box.id, spec, source, taken, wanted)
        with self._volumes.claiming(meta.volume, box.id):
            box.write_meta(meta)
        box.vm.make()
        if wanted is not None:
            volume = await self._volumes.make(wanted, await self._sources.blank(data_size, journal=True))
            os.link(volume, box.vm.path / _DATA)
        else:
            await asyncio.to_thread(sparse.copy, await self._sources.blank(), box.vm.path / _DATA)
        base = await self._base(box, taken, limits.disk)
        drive = await self._hypervisor.make_disk(box.vm, _DISK, base=base, size=limits.disk)
        box.write_disk(Disk(drive=drive, below=str(base)))
        await self._start(box, meta, spec, limits, source)

    async def start(self, box: Box, meta: Meta, spec: Spec, limits: Limits) -> None:
        """A box whose disk is there and that does not run."""
        await self._start(box, meta, spec, limits, await self._sources.find(meta.image))

    async def _start(self, box: Box, meta: Meta, spec: Spec, limits: Limits, source: Source) -> None:
        disk = box.read_disk()
        if disk is None:
            raise CreateFailed("the box has no disk: it was never made whole")
        can = await self._hypervisor.probe()
        machine = _machine(source, disk.drive, limits, can, spec)
        kind = Kind(contents=source.contents, blank=await self._sources.blank(), folder=box.template)
        prepared = plan.preparation(spec, limits, source, meta)
        async with self._turns.one():
            async with self._machinery.started(box.vm, machine, plan.host_limits(limits, can), kind) as client:
                await guest.become(client, plan.hostname(box.id), plan.machine_id(box.id), prepared)
            async with self._reach.first_client(box) as agent:
                if spec.env:
                    await agent.call("set_env", {"env": spec.env}, type=dict[str, Any])
        box.mark_whole()

    async def _base(self, box: Box, taken: Taken | None, size: int) -> Path:
        """What the disk begins as. One from the cache is linked: another may be in its place when the box starts again,
        and the disk would lean on something else."""
        if taken is not None:
            return await self._snapshots.disk(taken)
        blank, base = await self._sources.blank(size, journal=size >= _LEAST_WITH_JOURNAL), box.path / _BASE
        try:
            os.link(blank, base)
        except OSError:  # another file system
            await asyncio.to_thread(sparse.copy, blank, base)
            base.chmod(0o444)
        return base


@contextlib.asynccontextmanager
async def coming_up(box: Box, timeout_s: float) -> AsyncIterator[None]:
    """What keeps a box from coming up is told with the last words of its machine."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise CreateFailed(f"the box did not come up within {timeout_s:g} s", log=_last_words(box)) from error
    except (ProviderUnavailable, Conflict):
        raise
    except (ProviderError, AgentError, OSError) as error:
        words = error.log if isinstance(error, CreateFailed) else ""
        said = str(error).removesuffix(f"\n{words}")
        raise CreateFailed(f"the box did not come up: {said}", log=words or _last_words(box)) from error


def _last_words(box: Box) -> str:
    return logs.last_words(box.template if box.template.path.exists() else box.vm)


def _intent(
    provider: str, id: SandboxId, spec: Spec, source: Source, taken: Taken | None, wanted: Wanted | None
) -> Meta:
    return Meta(
        created_at=time.time(),
        image=source.image.id,
        asked=source.asked if taken is None else taken.asked,
        writable_root=spec.writable_root if taken is None else taken.writable_root,
        snapshot=spec.snapshot,
        volume=None if wanted is None else wanted.name,
        labels={**spec.labels, "skerry": provider, "skerry.sandbox": id, "skerry.project": spec.project},
    )


def _refuse_another_layout(spec: Spec, taken: Taken | None) -> None:
    """The disk of a box holds its own folders, or the changes of its whole root: the one is not the other."""
    if taken is not None and spec.writable_root != taken.writable_root:
        was = "could" if taken.writable_root else "could not"
        raise InvalidSpec(
            f"writable_root: the snapshot {taken.name!r} is of a box that {was} change its root; ask for the same",
            field="writable_root",
        )


def _machine(source: Source, disk: Drive, limits: Limits, can: Capabilities, spec: Spec) -> Machine:
    return Machine(
        kernel=source.image.kernel,
        drives=(*source.drives, disk, Drive(name=_DATA, path=_DATA)),
        vcpus=plan.vcpus(limits, can),
        memory_mib=plan.memory_mib(limits),
        network=plan.NETWORKS[spec.network],
    )
