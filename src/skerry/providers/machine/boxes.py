"""Folder of a box: its intent, its disk and its marks, so that any process can find, judge and end it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from skerry.errors import NotFound, ProviderError, SkerryError
from skerry.host import cgroup, folders, locks
from skerry.model.spec import SandboxId
from skerry.providers.base import BoxState, BoxStatus
from skerry.vm import launch, templates
from skerry.vm.base import Drive, Hypervisor
from skerry.vm.folder import VmFolder, read_note, write_note

_log = logging.getLogger("skerry.providers")

_META = "meta.json"
_DISK = "disk.json"
_STARTED = "started.json"
_ASLEEP = "asleep"
_FALLING = ".asleep"
_AWAKE = ".awake"


class Mark(StrEnum):
    """Empty file in the folder of a box."""

    WHOLE = "whole"
    """Its limits held and its agent answered once, and it was not stopped since."""
    STOPPED = "stopped"
    """Its stop was asked for: its end is no accident, and its disk is kept for another start."""
    PAUSED = "paused"
    """Its pause was asked for; whether it is paused, its hypervisor knows."""
    HELD = "held"
    """Nothing of its user's goes on until it is resumed, whether its machine runs or not."""


class MachineMeta(msgspec.Struct, frozen=True, kw_only=True):
    """Intent of a box, written before anything of it exists."""

    created_at: float
    image: str
    """Id of its image."""
    asked: str
    """Name that it asked for, which may mean another image by now."""
    writable_root: bool = False
    snapshot: str | None = None
    """Snapshot that its disk begins as, and may lean on."""
    volume: str | None = None
    """Volume that is its data: no other box may have it at the same time."""
    labels: dict[str, str] = {}


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """Box's own disk, and the file below it: noted here, where no machine can change it."""

    drive: Drive
    below: str
    size: int = 1 << 44
    """Size that was asked for; it is larger only if the file below is."""


class MachineBox:
    """Folder of one box. It belongs to us; the folder of the machine below it is partly the machine's."""

    def __init__(self, state_dir: Path, id: SandboxId) -> None:
        self.id = id
        self.path = state_dir / id
        self.vm = VmFolder(self.path / "vm")
        self.template = VmFolder(self.path / "template")
        """Folder of the template's machine, if this box is the first that needs it: who ends the box ends that too."""
        self.asleep = self.path / _ASLEEP
        """Memory of a box that sleeps: it sleeps as long as this folder is there."""
        self.started = self.path / _STARTED

    def make(self) -> None:
        folders.make_new(self.path, f"a box {self.id}")

    @contextlib.asynccontextmanager
    async def locked(self, timeout_s: float) -> AsyncIterator[bool]:
        """Hold the box against everybody else; False if there is no such box (any more)."""
        try:
            fd = locks.open_folder(self.path)
        except FileNotFoundError:
            yield False
            return
        try:
            await locks.wait_async(fd, timeout_s, f"box {self.id} is held by another process")
            yield locks.is_in_place(fd, self.path)
        finally:
            os.close(fd)

    @contextlib.asynccontextmanager
    async def held(self, timeout_s: float, hypervisor: Hypervisor) -> AsyncIterator[MachineMeta]:
        """Hold a box that is there, and has been made, as all but a destroy does. Raises NotFound, and ProviderError if
        its machine has to be killed first and does not die."""
        async with self.locked(timeout_s) as exists:
            meta = self.read_meta() if exists else None
            if meta is None:
                raise NotFound(f"there is no box {self.id}")
            await self.kill_if_left_alone()
            await self._kill_if_cut_short(hypervisor)
            yield meta

    def write_meta(self, meta: MachineMeta) -> None:
        write_note(self.path / _META, meta)

    def read_meta(self) -> MachineMeta | None:
        return read_note(self.path / _META, MachineMeta)

    def write_disk(self, disk: Disk) -> None:
        write_note(self.path / _DISK, disk)

    def read_disk(self) -> Disk | None:
        return read_note(self.path / _DISK, Disk)

    def has(self, mark: Mark) -> bool:
        return (self.path / mark).exists()

    def mark(self, mark: Mark, there: bool = True) -> None:
        if there:
            (self.path / mark).touch(mode=0o600)
        else:
            (self.path / mark).unlink(missing_ok=True)

    def mark_whole(self) -> None:
        self.mark(Mark.WHOLE)

    def is_asleep(self) -> bool:
        return self.asleep.exists()

    @contextlib.contextmanager
    def falling_asleep(self) -> Iterator[Path]:
        """Folder for its memory, which gets its place once all is in it: from then on the box sleeps."""
        self.clear_memory()
        folder = self.path / _FALLING
        folder.mkdir(mode=0o700)
        try:
            yield folder
            folder.rename(self.asleep)
        except BaseException:
            self.clear_memory()
            raise
        folders.sync(self.path)

    def wake_up(self) -> None:
        """From now on it does not sleep; a machine that runs with these files keeps them open."""
        self.asleep.rename(self.path / _AWAKE)

    def clear_memory(self) -> None:
        """Remove what is left of falling asleep and of waking up; quiet if there is nothing."""
        for name in (_FALLING, _AWAKE):
            folders.remove(self.path / name)

    def forget_memory(self) -> None:
        """Let it sleep no more, without what ran in it."""
        if self.is_asleep():
            self.clear_memory()
            self.wake_up()
            self.clear_memory()

    async def kill_if_asleep(self, hypervisor: Hypervisor) -> None:
        """Kill the machine of a box that sleeps, which somebody began to wake or did not come to kill. One that is
        held is being woken."""
        if self.vm.is_running():
            with contextlib.suppress(ProviderError):
                async with self.locked(0) as exists:
                    if exists and self.is_asleep():
                        await hypervisor.kill(self.vm)

    async def kill_if_left_alone(self) -> None:
        """See `launch`. Raises ProviderError."""
        if self.vm.is_left_alone():
            await asyncio.to_thread(launch.kill_if_left_alone, self.vm)

    async def kill_if_cut_short(self, hypervisor: Hypervisor) -> None:
        """End what a start has left whose starter died: the box counts as stopped. Quiet while somebody holds the box,
        who may be starting it. Raises ProviderError if it does not die."""
        if self._may_be_cut_short():
            async with contextlib.AsyncExitStack() as stack:
                try:
                    exists = await stack.enter_async_context(self.locked(0))
                except ProviderError:
                    return
                if exists:
                    await self._kill_if_cut_short(hypervisor)

    async def _kill_if_cut_short(self, hypervisor: Hypervisor) -> None:
        if self._may_be_cut_short():
            _log.warning("killing the machine of box %s, whose start was cut short", self.id)
            await templates.clear(hypervisor, self.template)
            await hypervisor.kill(self.vm)

    def _may_be_cut_short(self) -> bool:
        is_off = self.has(Mark.STOPPED) and not self.has(Mark.WHOLE)
        return is_off and (self.template.path.exists() or self.vm.may_run())

    async def remove(self) -> None:
        await asyncio.to_thread(folders.remove, self.path)


def all_boxes(state_dir: Path) -> list[MachineBox]:
    return [MachineBox(state_dir, id) for id in folders.ids_in(state_dir)]


def all_metas(state_dir: Path) -> list[tuple[SandboxId, MachineMeta]]:
    return [(box.id, meta) for box in all_boxes(state_dir) if (meta := box.read_meta()) is not None]


async def status_of(box: MachineBox, hypervisor: Hypervisor, images: Mapping[str, str]) -> BoxStatus | None:
    """Status of a box by its folder and its hypervisor; None if it is gone. `images` maps names to ids. Nothing that
    one machine does keeps us from telling of the others."""
    meta = box.read_meta()
    if meta is None:
        return BoxStatus(state=BoxState.REMAINS) if box.path.exists() else None
    is_asleep = box.is_asleep()
    try:
        await box.kill_if_left_alone()
        await box.kill_if_cut_short(hypervisor)
        if is_asleep:
            await box.kill_if_asleep(hypervisor)
        state = await _state_of(box, hypervisor)
    except (SkerryError, OSError) as error:
        _log.warning("box %s counts as running, as something of it does: %s", box.id, error)
        state = BoxState.RUNNING
    vm = box.vm.read()
    is_up = is_asleep or state is BoxState.RUNNING or box.vm.is_running()
    groups = [] if vm is None or is_up else vm.groups
    out_of_memory = bool(groups) and cgroup.ran_out_of_memory(map(Path, groups))
    return BoxStatus(
        state=BoxState.DEAD if out_of_memory else state,
        created_at=meta.created_at,
        labels=meta.labels,
        out_of_memory=out_of_memory,
        image=meta.image,
        outdated=meta.snapshot is None and images.get(meta.asked, meta.image) != meta.image,
    )


async def _state_of(box: MachineBox, hypervisor: Hypervisor) -> BoxState:
    if box.is_asleep():
        return BoxState.ASLEEP
    if box.has(Mark.WHOLE) and box.vm.is_running():
        if box.has(Mark.HELD):
            return BoxState.PAUSED
        try:
            is_paused = box.has(Mark.PAUSED) and await hypervisor.is_paused(box.vm)
        except SkerryError as error:
            _log.debug("box %s counts as paused, its hypervisor does not say: %s", box.id, error)
            is_paused = True
        return BoxState.PAUSED if is_paused else BoxState.RUNNING
    end = box.vm.read_end()
    # its time was over or its kernel failed; one that was killed, or went down with the host, can be started
    ended_by_itself = end is not None and end.signal is None
    if box.has(Mark.STOPPED) or (box.has(Mark.WHOLE) and not ended_by_itself):
        return BoxState.STOPPED
    return BoxState.DEAD if box.has(Mark.WHOLE) else BoxState.REMAINS  # never made, or somebody is removing it
