"""How a box is, told by its folder and its hypervisor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from skerry.errors import ProviderError
from skerry.host import cgroup
from skerry.providers.base import BoxState, BoxStatus
from skerry.providers.machine.boxes import Box
from skerry.vm.base import Hypervisor


async def status_of(box: Box, hypervisor: Hypervisor, images: Mapping[str, str]) -> BoxStatus | None:
    """None if it is gone. `images` are the ids that names mean now."""
    meta = box.read_meta()
    if meta is None:
        return BoxStatus(state=BoxState.REMAINS) if box.path.exists() else None
    out_of_memory = not box.vm.is_running() and _ran_out_of_memory(box)
    return BoxStatus(
        state=BoxState.DEAD if out_of_memory else await _state_of(box, hypervisor),
        created_at=meta.created_at,
        labels=meta.labels,
        out_of_memory=out_of_memory,
        image=meta.image,
        outdated=meta.snapshot is None and images.get(meta.asked, meta.image) != meta.image,
    )


async def _state_of(box: Box, hypervisor: Hypervisor) -> BoxState:
    if box.is_whole and box.vm.is_running():
        is_paused = box.may_be_paused and await _is_paused(box, hypervisor)
        return BoxState.PAUSED if is_paused else BoxState.RUNNING
    if box.is_stopped or (box.is_whole and not _ended_by_itself(box)):
        return BoxState.STOPPED
    return BoxState.DEAD


def _ended_by_itself(box: Box) -> bool:
    """Its time was over, or its kernel failed. What was killed, or went down with the host, can be started again."""
    end = box.vm.read_end()
    return end is not None and end.signal is None


async def _is_paused(box: Box, hypervisor: Hypervisor) -> bool:
    try:
        return await hypervisor.is_paused(box.vm)
    except ProviderError:
        return True  # it was to be, and nothing else can be heard of it


def _ran_out_of_memory(box: Box) -> bool:
    vm = box.vm.read()
    return vm is not None and cgroup.ran_out_of_memory(map(Path, vm.groups))
