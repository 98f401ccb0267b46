"""Boxes as containers in a virtual machine that their project has for itself: two boundaries, one Docker a project."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from skerry.agent.stream import Stream
from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, Unsupported
from skerry.progress import OnProgress
from skerry.providers import volume_plan
from skerry.providers.base import (
    BoxState,
    BoxStatus,
    Capability,
    Enforcement,
    Image,
    ImageBuild,
    Isolation,
    Provider,
    Snapshot,
    Volume,
)
from skerry.providers.engine import EngineConfig
from skerry.providers.vmdocker import archives
from skerry.providers.vmdocker.archives import Archives
from skerry.providers.vmdocker.engine import NAME, ProjectEngine, assumed
from skerry.providers.vmdocker.keeper import Keeper
from skerry.providers.vmdocker.machines import SOCKET, Machines
from skerry.providers.vmdocker.projects import Box, Project, Projects
from skerry.providers.vmdocker.settings import VmDockerConfig
from skerry.spec import Network, SandboxId, Spec
from skerry.units import format_size

T = TypeVar("T")

_NOBODYS = "default"
"""The project of whoever names none."""
_PATIENCE_TIMES = 10
"""How many times as long as a machine may take to start others may be at it."""
_DOCKER_NEEDS = 200 << 20
"""What a machine's kernel and Docker have of its memory."""


class VmDocker(Provider):
    name = NAME
    isolation = Isolation.VM
    capabilities = frozenset(Capability) - {Capability.WATCH}
    honours = frozenset({"image", "writable_root", "data", "cache", "cache_paths", "snapshot"})
    Config = VmDockerConfig

    def __init__(self, config: VmDockerConfig | None = None, *, machines: Machines | None = None) -> None:
        """`machines` takes the place of the ones that the configuration means."""
        self._config = config or VmDockerConfig()
        self._defaults = self._config.limits(NAME)
        self._vm_memory = self._config.size("vm_memory")
        state_dir = self._config.state()
        self._projects = Projects(state_dir)
        self._archives = Archives(state_dir / "images")
        self._given_machines = machines

    @cached_property
    def _machines(self) -> Machines:
        if self._given_machines is not None:
            return self._given_machines
        from skerry.providers.vmdocker.hosting import HostedMachines

        return HostedMachines(self._config, self._engine_at)

    @cached_property
    def _keeper(self) -> Keeper:
        return Keeper(
            self._projects,
            self._machines,
            lambda project: self._engine_at(project.vm),
            idle_s=self._config.idle_s,
            patience_s=_PATIENCE_TIMES * self._config.ready_timeout_s,
            answer_s=self._config.timeout_s,
        )

    def _engine_at(self, vm: Path) -> ProjectEngine:
        ours = self._config
        config = EngineConfig(
            host=f"unix://{vm / SOCKET}",
            state_dir=str(vm.parent / "engine"),
            cache_dir=ours.cache_dir,
            memory=ours.memory,
            pids=ours.pids,
            cpus=ours.cpus,
            disk=ours.disk,
            tmp=ours.tmp,
            shm=ours.shm,
            start_timeout_s=ours.start_timeout_s,
            timeout_s=ours.timeout_s,
        )
        return ProjectEngine(config)

    # the five verbs

    async def check(self) -> None:
        await self._machines.check()

    async def describe(self) -> Mapping[str, Enforcement]:
        held = assumed().enforcement(Spec(provider=NAME), None, self._defaults, ProjectEngine.habits)
        return {**await self._machines.describe(), **held}

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        self._refuse(spec)
        limits = self._defaults.of(spec)
        held = assumed().enforcement(spec, None, limits, ProjectEngine.habits)
        return {**held, **await self._machines.describe(), **await self._origin(spec)}

    def _refuse(self, spec: Spec) -> None:
        if spec.project == _NOBODYS:
            reason = "project: a machine is a project's own, so name one: --project NAME, or project= in the settings"
            raise InvalidSpec(reason, field="project")
        if spec.mounts or (spec.workspace is not None and spec.workspace.path is not None and not spec.workspace.copy):
            field = "mounts" if spec.mounts else "workspace"
            reason = "a machine sees no folder of the host; copy it: `skerry cp`, or a workspace with --copy"
            raise Unsupported(field, NAME, reason)
        if spec.network is not Network.NONE:
            raise Unsupported("network", NAME, "its machines have no network card; leave the network at none")
        if spec.snapshot is None and spec.image is None:
            raise InvalidSpec("image: a container needs one; give image= or --image", field="image")
        room = self._vm_memory - _DOCKER_NEEDS
        if self._defaults.of(spec).memory > room:
            asked, there = format_size(self._defaults.of(spec).memory), format_size(max(room, 0))
            reason = f"{asked} is more than the {there} its machine has for boxes; raise providers.{NAME}.vm_memory"
            raise Unsupported("memory", NAME, reason)

    async def _origin(self, spec: Spec) -> dict[str, Enforcement]:
        """What it is made of, as far as that can be told without starting a machine."""
        project = self._projects.get(spec.project)
        if spec.snapshot is not None:
            where = [each.name for each in self._projects.all() if _has_snapshot(each, spec.snapshot)]
            if project.name not in where:
                other = f"; project {where[0]} has one of that name" if where else ""
                raise NotFound(f"project {project.name!r} has no snapshot {spec.snapshot!r}{other}")
            return {"image": Enforcement(by=f"snapshot {spec.snapshot}")}
        assert spec.image is not None
        archive = self._archives.get(spec.image)
        if archive is not None:
            return {"image": Enforcement(by=f"{spec.image} at {archive.id}")}
        id = await self._keeper.engine(project).image_id(spec.image) if self._keeper.is_up(project) else None
        if id is None and (self._keeper.is_up(project) or not project.holdings.was_lent):
            raise ImageNotFound(archives.missing(spec.image))
        return {"image": Enforcement(by=f"{spec.image} at {id}" if id else f"{spec.image} of the project's own")}

    async def create(self, id: SandboxId, spec: Spec) -> None:
        self._refuse(spec)
        project = self._projects.get(spec.project)
        volumes = volume_plan.wanted(NAME, id, spec)
        labels = {**spec.labels, "skerry.project": spec.project}
        image = "" if spec.image is None or spec.snapshot is not None else spec.image
        box = Box(project=project.name, created_at=time.time(), labels=labels, image=image, ends_at=_end_of(spec))
        self._projects.note(id, box)
        async with self._keeper.awake(project) as engine:
            project.hold_volumes(
                volume_plan.as_volume(each.name, each.labels, in_use=True, size=None, created_at=None)
                for each in volumes
            )
            await self._bring(engine, image)
        await engine.create(id, spec)
        self._projects.change(id, is_whole=True)

    async def _bring(self, engine: ProjectEngine, image: str) -> None:
        """Have the image there, as its name means it now."""
        archive = self._archives.get(image) if image else None
        if archive is not None and await engine.image_id(archive.name) != archive.id:
            await engine.load(self._archives.path(archive), archive.name)

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        project = self._place_of(id, volumes=volumes)
        if project is None:
            return
        if self._keeper.is_up(project):
            engine = self._keeper.engine(project)
            await engine.destroy(id, volumes=volumes)
            async with self._keeper.held(project):
                self._projects.forget(id)
                if volumes:
                    self._hold(project, await engine.volumes_of(project.name))
            return
        async with self._keeper.held(project):
            self._projects.forget(id)
            if volumes:
                _doom(project, {each.name for each in project.holdings.volumes if each.sandbox == id})

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        found: dict[SandboxId, BoxStatus] = {}
        for statuses in await self._each(self._keeper.look):
            found |= statuses
        for id, box in self._projects.boxes().items():
            if id not in found:  # its maker did not come further than the note
                found[id] = BoxStatus(state=BoxState.REMAINS, created_at=box.created_at, labels=box.labels)
        return found

    async def dial(self, id: SandboxId) -> Stream:
        return await self._running(id).dial(id)

    async def aclose(self) -> None:
        if "_keeper" in self.__dict__:
            self._keeper.close()

    # the optional verbs

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._running(id).dial_as(id, user)

    async def stop(self, id: SandboxId) -> None:
        project = self._project_of(id)
        if self._keeper.is_up(project):
            await self._keeper.engine(project).stop(id)
        async with self._keeper.held(project):
            self._projects.change(id, is_off=True)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        project = self._project_of(id)
        self._projects.change(id, is_off=False, has_ended=False, ends_at=_end_of(spec))
        async with self._keeper.awake(project, id) as engine:
            pass
        await engine.start(id, spec)

    async def pause(self, id: SandboxId) -> None:
        await self._running(id).pause(id)

    async def resume(self, id: SandboxId) -> None:
        await self._running(id).resume(id)

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        project = self._project_of(id)
        if not self._keeper.is_up(project):
            yield self._machines.last_words(project.vm).encode()
            return
        async for piece in self._keeper.engine(project).logs(id, follow=follow, tail=tail):
            yield piece

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        engine, project = self._running(id), self._project_of(id)
        if any(_has_snapshot(each, name) for each in self._projects.all()):
            raise Conflict(f"there is a snapshot {name!r} already; remove it, or choose another name")
        taken = await engine.snapshot(id, name)
        async with self._keeper.held(project):
            project.hold(snapshots=(*project.holdings.snapshots, taken))
        return taken

    async def snapshots(self) -> Sequence[Snapshot]:
        return [each for found in await self._each(self._snapshots_of) for each in found]

    async def _snapshots_of(self, project: Project) -> Sequence[Snapshot]:
        if not self._keeper.is_up(project) or self._keeper.is_quiet(project):
            return project.holdings.snapshots
        found = tuple(await self._keeper.engine(project).snapshots())
        if {each.name for each in found} != {each.name for each in project.holdings.snapshots}:
            async with self._keeper.held(project):
                project.hold(snapshots=found)
        return found

    async def remove_snapshot(self, name: str) -> None:
        for project in self._projects.all():
            if _has_snapshot(project, name):
                async with self._keeper.awake(project) as engine:
                    await engine.remove_snapshot(name)
                    project.hold(snapshots=tuple(each for each in project.holdings.snapshots if each.name != name))
                return
        raise NotFound(f"there is no snapshot {name!r}")

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        """Those of machines that are off without their sizes: nobody starts a machine to look at it."""
        found = await self._each(lambda project: self._volumes_of(project, sizes=sizes))
        return [each for volumes in found for each in volumes]

    async def _volumes_of(self, project: Project, *, sizes: bool = False) -> Sequence[Volume]:
        if not self._keeper.is_up(project) or (self._keeper.is_quiet(project) and not sizes):
            return project.holdings.volumes
        found = await self._keeper.engine(project).volumes_of(project.name, sizes=sizes)
        if {each.name for each in found} != {each.name for each in project.holdings.volumes}:
            async with self._keeper.held(project):
                self._hold(project, found)
        return found

    def _hold(self, project: Project, found: Sequence[Volume]) -> None:
        """Those that a machine has, and those that another is about to make."""
        names = {each.name for each in found}
        announced = [each for each in project.holdings.volumes if each.created_at is None and each.name not in names]
        is_making = any(not box.is_whole for box in self._projects.boxes(project).values())
        project.hold(volumes=(*found, *(announced if is_making else ())))

    async def remove_volume(self, name: str) -> None:
        for project in self._projects.all():
            if any(volume.name == name for volume in project.holdings.volumes):
                return await self._remove_volume(project, name)
        raise NotFound(f"volume {name!r} is not one of skerry's")

    async def _remove_volume(self, project: Project, name: str) -> None:
        if not self._keeper.is_up(project) and not self._projects.boxes(project):
            async with self._keeper.held(project):
                _doom(project, {name})
            return
        async with self._keeper.awake(project) as engine:
            await engine.remove_volume(name)
            project.hold(volumes=tuple(each for each in project.holdings.volumes if each.name != name))

    async def images(self) -> Sequence[Image]:
        return self._archives.all(self._used())

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        reason = (
            "its images are archives that every project shares; build it elsewhere and import it, or build it for one "
            'project alone: eval "$(skerry docker-env PROJECT --start)" && docker build'
        )
        raise Unsupported("image build", NAME, reason)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        reason = f"its machines have no network; `docker save {name}` elsewhere, and `skerry image import` it"
        raise Unsupported("image pull", NAME, reason)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        return await self._archives.take(source, name, on_progress)

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        self._archives.remove(name, self._used())

    async def docker_host(self, project_name: str, *, start: bool = False) -> str:
        """The address of a project's Docker, for other programs. What they leave there keeps the machine's disk."""
        project = self._projects.get(project_name)
        if start:
            self._refuse(Spec(provider=NAME, project=project_name, image="none"))
            async with self._keeper.awake(project):
                project.hold(was_lent=True)
        elif not self._keeper.is_up(project):
            raise NotFound(f"project {project_name!r} has no machine that is up: start one with --start")
        else:
            async with self._keeper.held(project):
                project.hold(was_lent=True)
        return f"unix://{project.vm / SOCKET}"

    # how they are done

    def _project_of(self, id: SandboxId) -> Project:
        return self._projects.get(self._projects.box(id).project)

    def _place_of(self, id: SandboxId, *, volumes: bool) -> Project | None:
        """Where there is something of a box, if only its volumes."""
        with suppress(NotFound):
            return self._project_of(id)
        for project in self._projects.all() if volumes else ():
            if any(volume.sandbox == id for volume in project.holdings.volumes):
                return project
        return None

    def _running(self, id: SandboxId) -> ProjectEngine:
        return self._keeper.running(self._project_of(id))

    def _used(self) -> Counter[str]:
        from skerry.providers.engine.image_config import full_name

        return Counter(full_name(box.image) for box in self._projects.boxes().values() if box.image)

    async def _each(self, ask: Callable[[Project], Awaitable[T]]) -> list[T]:
        """Ask all projects at once; what one of them cannot tell, nobody knows."""
        answers = await asyncio.gather(*(ask(project) for project in self._projects.all()), return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found


def _end_of(spec: Spec) -> float | None:
    return time.time() + spec.lifetime_s if spec.lifetime_s else None


def _has_snapshot(project: Project, name: str) -> bool:
    return any(snapshot.name == name for snapshot in project.holdings.snapshots)


def _doom(project: Project, names: set[str]) -> None:
    """Volumes of a machine that is off: they go when it is on again, or with all of it."""
    if not names:
        return
    held = project.holdings
    left = tuple(volume for volume in held.volumes if volume.name not in names)
    project.hold(volumes=left, doomed=(*held.doomed, *sorted(names)))
