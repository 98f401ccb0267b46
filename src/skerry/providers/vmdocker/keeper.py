"""Keeps the machine of a project up while somebody needs it, and lets it go after."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

import msgspec

from skerry.errors import AgentError, AgentUnreachable, NotFound, ProviderUnavailable, SkerryError
from skerry.providers.base import BoxState, BoxStatus
from skerry.providers.vmdocker.engine import NAME, ProjectEngine
from skerry.providers.vmdocker.machines import Machines
from skerry.providers.vmdocker.projects import Box, Project, Projects
from skerry.spec import SandboxId

_LEAVING_S = 20.0
"""How long a machine that powers itself off may take for it."""
_LATE_S = 60.0
"""How much longer than it was told to a machine may run that nobody needs."""


class Keeper:
    def __init__(
        self,
        projects: Projects,
        machines: Machines,
        engine_of: Callable[[Project], ProjectEngine],
        *,
        idle_s: float,
        patience_s: float,
        answer_s: float,
    ) -> None:
        self._projects = projects
        self._machines = machines
        self._engine_of = engine_of
        self._idle_s = idle_s
        self._patience_s = patience_s
        """How long another process may be at a machine."""
        self._answer_s = answer_s
        self._engines: dict[str, tuple[int, ProjectEngine]] = {}

    def engine(self, project: Project) -> ProjectEngine:
        """The Docker of a project's machine; what is known of one does not hold for the one after it."""
        up_at = project.up_at
        known = self._engines.get(project.key)
        if known is None or known[0] != up_at:
            if known is not None:
                known[1].close()
            known = self._engines[project.key] = (up_at, self._engine_of(project))
        return known[1]

    def is_up(self, project: Project) -> bool:
        return project.is_up and self._machines.is_running(project.vm)

    def is_quiet(self, project: Project) -> bool:
        """Nobody needs it, so all of it is known: whoever asked it would keep it up."""
        return project.idle_since is not None and not project.holdings.was_lent

    def running(self, project: Project) -> ProjectEngine:
        """The Docker of a machine that is up. Raises AgentUnreachable."""
        if not self.is_up(project):
            raise AgentUnreachable(f"the machine of project {project.name!r} is off; starting a sandbox starts it")
        return self.engine(project)

    def close(self) -> None:
        for _, engine in self._engines.values():
            engine.close()

    @asynccontextmanager
    async def awake(self, project: Project, box: SandboxId | None = None) -> AsyncIterator[ProjectEngine]:
        """Have its machine up, and hold it against all others while something is noted of it. The boxes that were noted
        before, also the one that is about to be started, decide how long it stays up."""
        async with project.locked(self._patience_s):
            project.make()
            if not await self._is_staying(project):
                await self._start(project, box)
            yield self.engine(project)

    @asynccontextmanager
    async def held(self, project: Project) -> AsyncIterator[None]:
        """Hold it as it is; after that its machine is told for how long it is needed, or removed if it has nothing."""
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

    async def _start(self, project: Project, to_be_started: SandboxId | None) -> None:
        project.mark_up(False)
        await self._machines.kill(project.vm)  # what the last one left
        boxes = self._projects.boxes(project)
        if not any(box.is_whole for box in boxes.values()) and not project.holdings.is_worth_keeping:
            await asyncio.to_thread(project.empty)  # a new one is quicker
        for id, box in boxes.items():
            if box.is_whole and id != to_be_started:
                self._projects.change(id, is_off=True, has_ended=_is_over(box))
        await self._machines.start(project.vm, project.name)
        project.mark_up(True)
        if project.holdings.doomed:
            await self._catch_up(project)
        await self._tell(project)

    async def _catch_up(self, project: Project) -> None:
        """Remove what was removed while its machine was off: containers first, as they hold volumes."""
        engine = self.engine(project)
        await self._remove_strays(project, engine, await engine.discover(), self._projects.boxes(project))
        for name in project.holdings.doomed:
            with suppress(NotFound):
                await engine.remove_volume(name)
        project.hold(doomed=())

    async def _tell(self, project: Project) -> None:
        """How long it is needed."""
        boxes = [box for box in self._projects.boxes(project).values() if not box.is_off]
        left_s = _longest_s(boxes)
        lifetime_s = None if left_s is None else left_s + self._idle_s
        if boxes:
            await self._machines.tell(project.vm, lifetime_s=lifetime_s, idle_s=None)
        else:
            await self._machines.tell(project.vm, lifetime_s=None, idle_s=self._idle_s)
        project.mark_idle(not boxes)

    async def _settle(self, project: Project) -> None:
        if self.is_up(project):
            with suppress(AgentError):  # it is just going
                await self._tell(project)
        elif not self._projects.boxes(project) and not project.holdings.is_worth_keeping:
            await self._machines.kill(project.vm)
            await asyncio.to_thread(project.remove)

    # what there is

    async def look(self, project: Project) -> dict[SandboxId, BoxStatus]:
        """The boxes of a project. A machine that is up and does not answer raises ProviderUnavailable: its boxes are
        not gone."""
        if not self.is_up(project) or self.is_quiet(project):
            await self._sweep(project)
            return {id: _status_without(box) for id, box in self._projects.boxes(project).items()}
        try:
            async with asyncio.timeout(self._answer_s):
                engine = self.engine(project)
                found = await engine.discover()
        except (TimeoutError, ProviderUnavailable) as error:
            if not self._machines.is_running(project.vm):  # it ended while we asked
                return {id: _status_without(box) for id, box in self._projects.boxes(project).items()}
            raise self._no_answer(project) from error
        boxes = self._projects.boxes(project)
        await self._remove_strays(project, engine, found, boxes)
        seen = {id: _known(box, found.get(id)) for id, box in boxes.items()}
        for id, status in seen.items():
            self._note_end(id, boxes[id], status)
        await self._sweep(project)
        return seen

    def _note_end(self, id: SandboxId, box: Box, status: BoxStatus) -> None:
        """A box that has ended needs no machine, and is known to have when its machine is off."""
        has_ended = status.state is BoxState.DEAD
        if box.is_whole and (has_ended > box.has_ended or (status.state is BoxState.STOPPED and not box.is_off)):
            self._projects.change(id, is_off=True, has_ended=has_ended)

    async def _remove_strays(
        self,
        project: Project,
        engine: ProjectEngine,
        found: Mapping[SandboxId, BoxStatus],
        boxes: Mapping[SandboxId, Box],
    ) -> None:
        """Containers of boxes that were destroyed while the machine was off: a note comes before its box."""
        for id, status in found.items():
            if id not in boxes and status.labels.get("skerry.project") == project.name:
                await engine.destroy(id)

    async def _sweep(self, project: Project) -> None:
        """Put right what a crash left: a machine that nobody ended, that was never told, or that has nothing."""
        boxes = self._projects.boxes(project).values()
        is_needed = any(not box.is_off for box in boxes)
        is_running = self._machines.is_running(project.vm)
        since = project.idle_since
        is_late = since is not None and self.is_quiet(project) and time.time() > since + self._idle_s + _LATE_S
        is_untold = not is_needed and since is None
        is_half_started = is_running and not project.is_up
        is_empty = not is_running and not boxes and not project.holdings.is_worth_keeping
        if not (is_half_started or is_empty or (is_running and (is_late or is_untold))):
            return
        with suppress(SkerryError):  # somebody is at it, so it is no leftover
            async with project.locked(0):
                if self._machines.is_running(project.vm) and (not project.is_up or is_late):
                    await self._machines.kill(project.vm)
                await self._settle(project)

    def _no_answer(self, project: Project) -> ProviderUnavailable:
        return ProviderUnavailable(
            NAME,
            f"the machine of project {project.name!r} runs and does not answer",
            fix=f"wait, or end it: its process is noted in {project.vm}, and its boxes are stopped then",
        )


def _longest_s(boxes: list[Box]) -> float | None:
    """Until the last box has ended by itself; None: nobody knows."""
    left_s = 0.0
    for box in boxes:
        if box.ends_at is None:
            return None
        left_s = max(left_s, box.ends_at - time.time())
    return left_s


def _status_without(box: Box) -> BoxStatus:
    """What a box is while its machine is off: as Docker will say when it is on again."""
    if not box.is_whole:
        return _remains(box)
    state = BoxState.DEAD if _is_over(box) else BoxState.STOPPED
    return BoxStatus(state=state, created_at=box.created_at, labels=box.labels)


def _is_over(box: Box) -> bool:
    return box.has_ended or (not box.is_off and box.ends_at is not None and time.time() >= box.ends_at)


def _known(box: Box, status: BoxStatus | None) -> BoxStatus:
    """A machine is not believed whose a box is."""
    return _remains(box) if status is None else msgspec.structs.replace(status, labels={**status.labels, **box.labels})


def _remains(box: Box) -> BoxStatus:
    return BoxStatus(state=BoxState.REMAINS, created_at=box.created_at, labels=box.labels)
