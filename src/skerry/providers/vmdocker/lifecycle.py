"""Lifecycle of a project's machine: started when a box needs it, told when to power off, swept after a crash."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from skerry import clock
from skerry.aio import run_to_end
from skerry.errors import AgentError, AgentUnreachable, NotFound, ProviderUnavailable, SkerryError
from skerry.model.spec import SandboxId
from skerry.providers.base import BoxState, BoxStatus
from skerry.providers.vmdocker.engine import NAME, ProjectEngine, VmDockerConfig
from skerry.providers.vmdocker.projects import BoxNote, Project, Projects

if TYPE_CHECKING:
    from skerry.providers.vmdocker.machines import ProjectMachines

_log = logging.getLogger("skerry.providers")

_LEAVING_S = 20.0
"""How long a machine that powers itself off may take for it."""
_PATIENCE_TIMES = 10
"""How many times as long as a machine may take to start others may be at it."""
_SWEEP_S = 1.0
"""How long another may take to sweep or tell a machine that nobody starts."""
_LATE_S = 60.0
"""How much longer than it was told to a machine may run that nobody needs."""


class MachineLifecycle:
    """Starts, holds and ends the machines of projects."""

    def __init__(
        self,
        projects: Projects,
        machines: ProjectMachines,
        engine_at: Callable[[Path], ProjectEngine],
        config: VmDockerConfig,
    ) -> None:
        self._projects = projects
        self._machines = machines
        self._engine_at = engine_at
        self._idle_s = config.idle_s
        self._patience_s = _PATIENCE_TIMES * config.ready_timeout_s
        self._answer_s = config.timeout_s
        self._has_network = config.vm_network
        self._engines: dict[str, tuple[int, ProjectEngine]] = {}

    def engine(self, project: Project) -> ProjectEngine:
        """Docker of a project's machine: a new object for each start of it."""
        up_at = project.up_at
        known = self._engines.get(project.key)
        if known is None or known[0] != up_at:
            if known is not None:
                known[1].close()
            known = self._engines[project.key] = (up_at, self._engine_at(project.vm))
        return known[1]

    def is_up(self, project: Project) -> bool:
        return project.is_up and self._machines.is_running(project.vm)

    def is_quiet(self, project: Project) -> bool:
        """Whether nobody needs it, so that all of it is known: to ask it would keep it up."""
        return project.is_idle and not project.holdings.was_lent

    def running(self, project: Project) -> ProjectEngine:
        """Docker of a machine that is up. Raises AgentUnreachable."""
        if not self.is_up(project):
            raise AgentUnreachable(f"the machine of project {project.name!r} is off; starting a sandbox starts it")
        return self.engine(project)

    def close(self) -> None:
        for _, engine in self._engines.values():
            engine.close()

    @asynccontextmanager
    async def awake(self, project: Project, box: SandboxId | None = None) -> AsyncIterator[ProjectEngine]:
        """Have its machine up, and hold it against all others while something is noted of it. How long it stays up is
        decided by the boxes noted before, also by the one that is about to be started."""
        async with project.locked(self._patience_s):
            project.make()
            if not await self._is_staying(project):
                await self._start(project, box, network=self._has_network)
            yield self.engine(project)

    @asynccontextmanager
    async def for_once(self, project: Project, *, network: bool) -> AsyncIterator[ProjectEngine]:
        """Have a new machine for a while. If its user dies it powers itself off, as idle ones do."""
        async with project.locked(self._patience_s):
            await self._remove(project)
            try:
                project.make()
                await self._start(project, None, network=network)
                yield self.engine(project)
            finally:
                await self._remove(project)

    @asynccontextmanager
    async def held(self, project: Project) -> AsyncIterator[None]:
        """Hold it as it is; then tell its machine how long it is needed, or remove one that has nothing."""
        async with project.locked(self._patience_s):
            yield
            await self._settle(project)

    async def _is_staying(self, project: Project) -> bool:
        """Whether it is up, and has been told not to go."""
        if not self.is_up(project):
            return False
        try:
            await self._tell(project)
        except AgentError as error:
            if not await self._machines.wait(project.vm, _LEAVING_S):  # else it was just going
                raise self._no_answer(project) from error
            return False
        return True

    async def _start(self, project: Project, to_be_started: SandboxId | None, *, network: bool) -> None:
        project.mark_up(False)
        await self._machines.kill(project.vm)  # what the last one left
        boxes = self._projects.boxes(project)
        if not any(box.is_whole for box in boxes.values()) and not project.holdings.is_worth_keeping:
            await asyncio.to_thread(project.empty)  # a new one is quicker
        for id, box in boxes.items():
            if box.is_whole and id != to_be_started:
                self._projects.change(id, is_off=True, has_ended=_is_over(box))
        try:
            await self._machines.start(project.vm, project.name, network=network)
        except BaseException:
            with suppress(SkerryError):  # a sweep tries again
                await run_to_end(self._machines.kill(project.vm))
            raise
        project.mark_up(True, network=network)
        if project.holdings.doomed:
            await self._catch_up(project)
        await self._tell(project)

    async def _catch_up(self, project: Project) -> None:
        """Remove what was removed while its machine was off: containers first, as they hold volumes."""
        engine = self.engine(project)
        await self._remove_orphans(project, await engine.discover(), self._projects.boxes(project))
        for name in project.holdings.doomed:
            with suppress(NotFound):
                await engine.remove_volume(name)
        project.hold(doomed=())

    async def _tell(self, project: Project) -> None:
        """Tell it how long it is needed."""
        boxes = [box for box in self._projects.boxes(project).values() if not box.is_off]
        known_s = [left_s for box in boxes if (left_s := _left_s(box)) is not None]
        lifetime_s = max(known_s) + self._idle_s if boxes and len(known_s) == len(boxes) else None
        await self._machines.tell(project.vm, lifetime_s=lifetime_s, idle_s=None if boxes else self._idle_s)
        project.mark_idle(not boxes)

    async def _settle(self, project: Project) -> None:
        if self.is_up(project):
            try:
                await self._tell(project)
            except AgentError as error:
                _log.debug("the machine of project %s is powering off: %s", project.name, error)
        elif not self._projects.boxes(project) and not project.holdings.is_worth_keeping:
            await self._remove(project)

    async def _remove(self, project: Project) -> None:
        await self._machines.kill(project.vm)
        await asyncio.to_thread(project.remove)

    async def look(self, project: Project) -> dict[SandboxId, BoxStatus]:
        """Boxes of a project. Raises ProviderUnavailable if its machine is up and silent: they are not gone."""
        if not self.is_up(project) or self.is_quiet(project):
            await self._sweep(project)
            return {id: _status_without(box) for id, box in self._projects.boxes(project).items()}
        try:
            async with asyncio.timeout(self._answer_s):
                found = await self.engine(project).discover()
        except (TimeoutError, ProviderUnavailable) as error:
            if not self._machines.is_running(project.vm):  # it ended while we asked
                return {id: _status_without(box) for id, box in self._projects.boxes(project).items()}
            raise self._no_answer(project) from error
        boxes = self._projects.boxes(project)
        await self._remove_orphans(project, found, boxes)
        seen = {id: _known(box, found.get(id)) for id, box in boxes.items()}
        for id, box in boxes.items():  # one that has ended needs no machine; it is noted for when that is off
            has_ended, is_stopped = (seen[id].state is state for state in (BoxState.DEAD, BoxState.STOPPED))
            if box.is_whole and (has_ended > box.has_ended or (is_stopped and not box.is_off)):
                self._projects.change(id, is_off=True, has_ended=has_ended)
        await self._sweep(project)
        return seen

    async def _remove_orphans(
        self, project: Project, found: Mapping[SandboxId, BoxStatus], boxes: Mapping[SandboxId, BoxNote]
    ) -> None:
        """Remove containers of boxes that were destroyed while the machine was off: a note comes before its box."""
        for id, status in found.items():
            if id not in boxes and status.labels.get("skerry.project") == project.name:
                _log.info("removing container of %s: it was destroyed while its machine was off", id)
                await self.engine(project).destroy(id)

    async def _sweep(self, project: Project) -> None:
        """Repair what a crash left: a machine that nobody ended, that was never told, or that has nothing."""
        boxes = self._projects.boxes(project).values()
        is_needed = any(not box.is_off for box in boxes)
        is_running = self._machines.is_running(project.vm)
        is_late = self.is_quiet(project) and project.idle_s > self._idle_s + _LATE_S
        is_untold = not is_needed and not project.is_idle
        is_half_started = is_running and not project.is_up
        is_empty = not is_running and not boxes and not project.holdings.is_worth_keeping
        if not (is_half_started or is_empty or (is_running and (is_late or is_untold))):
            return
        try:
            async with project.locked(0 if is_half_started else _SWEEP_S):
                if self._machines.is_running(project.vm) and (not project.is_up or is_late):
                    _log.info("killing the machine of project %s, which nobody ended", project.name)
                    await self._machines.kill(project.vm)
                await self._settle(project)
        except SkerryError as error:  # somebody is at it, so it is no leftover
            _log.debug("the machine of project %s is not swept: %s", project.name, error)

    def _no_answer(self, project: Project) -> ProviderUnavailable:
        return ProviderUnavailable(
            NAME,
            f"the machine of project {project.name!r} runs and does not answer",
            fix=f"wait, or end it: its process is noted in {project.vm}, and its boxes are stopped then",
        )


def _left_s(box: BoxNote) -> float | None:
    """Time until it has ended by itself; None: nobody knows."""
    return None if box.end is None else box.end.left_at(clock.now())


def _is_over(box: BoxNote) -> bool:
    left_s = _left_s(box)
    return box.has_ended or (not box.is_off and left_s is not None and left_s <= 0)


def _status_without(box: BoxNote) -> BoxStatus:
    """Status of a box while its machine is off: as Docker will say when it is on again."""
    whole = BoxState.DEAD if _is_over(box) else BoxState.STOPPED
    state = whole if box.is_whole else BoxState.REMAINS
    return BoxStatus(state=state, created_at=box.created_at, labels=box.labels)


def _known(box: BoxNote, status: BoxStatus | None) -> BoxStatus:
    """Status from a machine, with our own labels: it is not believed whose a box is."""
    if status is None:
        return BoxStatus(state=BoxState.REMAINS, created_at=box.created_at, labels=box.labels)
    return msgspec.structs.replace(status, labels={**status.labels, **box.labels})
