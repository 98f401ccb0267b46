"""Boxes as containers in a virtual machine that their project has for itself: two boundaries, one Docker a project."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from skerry import clock
from skerry.clock import End
from skerry.errors import Conflict, ImageNotFound, InvalidSpec, NotFound, Unsupported
from skerry.model.results import OnProgress
from skerry.model.spec import Network, SandboxId, Spec
from skerry.net.stream import Stream
from skerry.providers.base import (
    BoxChange,
    BoxState,
    BoxStatus,
    Capability,
    Enforcement,
    ImageBuild,
    ImageVerbs,
    Isolation,
    Provider,
    Snapshot,
    Volume,
)
from skerry.providers.dockerapi import EngineConfig
from skerry.providers.shared import loopback, polling, volume_plan
from skerry.providers.shared.limits import DaemonConfig
from skerry.providers.vmdocker import archives
from skerry.providers.vmdocker.archives import Archives, ProjectImages
from skerry.providers.vmdocker.engine import NAME, SOCKET, ProjectEngine, VmDockerConfig, assumed
from skerry.providers.vmdocker.lifecycle import MachineLifecycle
from skerry.providers.vmdocker.projects import BoxNote, Project, Projects

if TYPE_CHECKING:
    from skerry.providers.vmdocker.machines import ProjectMachines

T = TypeVar("T")

_NOBODYS = "default"
"""Project of those who name none."""
_CARDLESS = (Network.NONE, Network.RULES)
"""Networks for which a machine needs no card."""
_BRIDGED: Mapping[Network | str, Mapping[str, Enforcement]] = {
    Network.BRIDGE: {
        "network": Enforcement(by="a bridge in the machine, whose network leads out but not to the host; boxes apart")
    }
}


class VmDocker(ImageVerbs, Provider):
    name = NAME
    isolation = Isolation.VM
    capabilities = frozenset(Capability) - {Capability.MEMORY}
    honours = frozenset({"image", "writable_root", "admin", "data", "cache", "cache_paths", "snapshot"})
    needs_image = True
    Config = VmDockerConfig

    def __init__(self, config: VmDockerConfig | None = None, *, machines: ProjectMachines | None = None) -> None:
        """`machines` replaces those of the configuration."""
        self._config = config or VmDockerConfig()
        self._defaults = self._config.limits(NAME)
        state_dir = self._config.state()
        self._projects = Projects(state_dir)
        self._archives = Archives(state_dir / "images")
        self._given_machines = machines

    @cached_property
    def _machines(self) -> ProjectMachines:
        if self._given_machines is not None:
            return self._given_machines
        from skerry.providers.vmdocker.machines import ProjectMachines

        return ProjectMachines(self._config, self._engine_at)

    @cached_property
    def _lifecycle(self) -> MachineLifecycle:
        return MachineLifecycle(self._projects, self._machines, self._engine_at, self._config)

    @cached_property
    def _images(self) -> ProjectImages:
        return ProjectImages(self._archives, self._projects, self._machines, self._lifecycle, self._config)

    def _engine_at(self, vm: Path) -> ProjectEngine:
        ours = {field: getattr(self._config, field) for field in DaemonConfig.__struct_fields__}
        host, state_dir = f"unix://{vm / SOCKET}", str(vm.parent / "engine")
        config = EngineConfig(**ours, host=host, state_dir=state_dir, max_root=self._config.vm_disk)
        return ProjectEngine(config, shares_runtime=self._config.is_on_vfkit)

    async def check(self) -> None:
        await self._machines.check()

    async def describe(self) -> Mapping[str, Enforcement]:
        held = assumed().enforcement(Spec(provider=NAME), None, self._defaults, ProjectEngine.quirks)
        return {**await self._machines.describe(), **held, "rules": Enforcement(by=loopback.BY_RULES)}

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        self._refuse(spec)
        await self._refuse_network(spec)
        limits = self._defaults.of(spec)
        held = assumed().enforcement(spec, None, limits, ProjectEngine.quirks)
        return {**held, **_BRIDGED.get(spec.network, {}), **await self._machines.describe(), **await self._origin(spec)}

    async def _refuse_network(self, spec: Spec) -> None:
        """Raise Unsupported for a network that no machine of ours has, Conflict if the project's runs without one."""
        if spec.network in _CARDLESS:
            return
        why: str | None = "there are none, rules and bridge"
        if spec.network is Network.BRIDGE and self._config.vm_network:
            why = await self._machines.why_no_network()
        elif spec.network is Network.BRIDGE:
            why = "its machines have no network card; set providers.vmdocker.vm_network = true, or leave it at none"
        if why is not None:
            raise Unsupported("network", NAME, why)
        self._check_card(self._projects.get(spec.project), spec)

    def _check_card(self, project: Project, spec: Spec) -> None:
        if spec.network not in _CARDLESS and self._lifecycle.is_up(project) and not project.has_network:
            raise Conflict(
                f"the machine of project {project.name!r} was started without a network: end or stop its sandboxes, "
                "and wait until it has powered off"
            )

    def _refuse(self, spec: Spec) -> None:
        if spec.project == _NOBODYS:
            reason = "project: a machine is a project's own, so name one: --project NAME, or project= in the settings"
            raise InvalidSpec(reason, field="project")
        if spec.mounts or (spec.workspace is not None and spec.workspace.path is not None and not spec.workspace.copy):
            field = "mounts" if spec.mounts else "workspace"
            reason = "a machine sees no folder of the host; copy it: `skerry cp`, or a workspace with --copy"
            raise Unsupported(field, NAME, reason)
        if spec.snapshot is None and spec.image is None:
            raise InvalidSpec("image: a container needs one; give image= or --image", field="image")
        self._config.check_memory(self._defaults.of(spec).memory)

    async def _origin(self, spec: Spec) -> dict[str, Enforcement]:
        """Image or snapshot that it is made of, as far as that is known without starting a machine. Raises NotFound."""
        project = self._projects.get(spec.project)
        if spec.snapshot is not None:
            where = [each.name for each in self._projects.all() if spec.snapshot in _names(each.holdings.snapshots)]
            if project.name not in where:
                other = f"; project {where[0]} has one of that name" if where else ""
                raise NotFound(f"project {project.name!r} has no snapshot {spec.snapshot!r}{other}")
            return {"image": Enforcement(by=f"snapshot {spec.snapshot}")}
        assert spec.image is not None
        archive = self._archives.get(spec.image)
        if archive is not None:
            return {"image": Enforcement(by=f"{spec.image} at {archive.id}")}
        id = await self._lifecycle.engine(project).image_id(spec.image) if self._lifecycle.is_up(project) else None
        if id is None and (self._lifecycle.is_up(project) or not project.holdings.was_lent):
            raise ImageNotFound(archives.missing(spec.image))
        return {"image": Enforcement(by=f"{spec.image} at {id}" if id else f"{spec.image} of the project's own")}

    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement]:
        self._refuse(spec)
        await self._refuse_network(spec)
        project = self._projects.get(spec.project)
        volumes = volume_plan.wanted(NAME, id, spec)
        labels = {**spec.labels, "skerry.project": spec.project}
        image = "" if spec.image is None or spec.snapshot is not None else spec.image
        box = BoxNote(project=project.name, created_at=time.time(), labels=labels, image=image, end=_end_of(spec))
        self._projects.note(id, box)
        async with self._lifecycle.awake(project) as engine:
            self._check_card(project, spec)
            known = project.holdings.volumes
            announced = [
                volume_plan.as_volume(each.name, each.labels, in_use=True, size=None, created_at=None)
                for each in volumes
                if each.name not in _names(known)
            ]
            if announced:
                project.hold(volumes=(*known, *announced))
            await self._archives.bring(engine, image)
        held = await engine.create(id, spec)
        self._projects.change(id, is_whole=True)
        return {**held, **_BRIDGED.get(spec.network, {})}

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        project = self._place_of(id, volumes=volumes)
        if project is None:
            return
        if self._lifecycle.is_up(project):
            engine = self._lifecycle.engine(project)
            await engine.destroy(id, volumes=volumes)
            async with self._lifecycle.held(project):
                self._projects.forget(id)
                if volumes:
                    self._hold(project, await engine.volumes_of(project.name))
            return
        async with self._lifecycle.held(project):
            self._projects.forget(id)
            if volumes:
                _mark_for_removal(project, {each.name for each in project.holdings.volumes if each.sandbox == id})

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        found: dict[SandboxId, BoxStatus] = {}
        for statuses in await self._each(self._lifecycle.look):
            found |= statuses
        for id, box in self._projects.boxes().items():
            if id not in found:  # its maker did not come further than the note
                found[id] = BoxStatus(state=BoxState.REMAINS, created_at=box.created_at, labels=box.labels)
        return found

    async def dial(self, id: SandboxId) -> Stream:
        return await self._running(id).dial(id)

    async def aclose(self) -> None:
        if "_lifecycle" in self.__dict__:
            self._lifecycle.close()

    def holds(self, spec: Spec) -> int | None:
        on_disk = self._config.size("vm_disk") if spec.writable_root or volume_plan.has_data(spec) else 0
        return self._defaults.of(spec).written + on_disk

    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        return await self._running(id).dial_as(id, user)

    async def stop(self, id: SandboxId) -> None:
        project = self._project_of(id)
        if self._lifecycle.is_up(project):
            await self._lifecycle.engine(project).stop(id)
        async with self._lifecycle.held(project):
            self._projects.change(id, is_off=True)

    async def start(self, id: SandboxId, spec: Spec) -> None:
        project = self._project_of(id)
        await self._refuse_network(spec)
        self._projects.change(id, is_off=False, has_ended=False, end=_end_of(spec))
        async with self._lifecycle.awake(project, id) as engine:
            self._check_card(project, spec)
        await engine.start(id, spec)

    async def pause(self, id: SandboxId) -> None:
        await self._running(id).pause(id)

    async def resume(self, id: SandboxId) -> None:
        await self._running(id).resume(id)

    async def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        project = self._project_of(id)
        if not self._lifecycle.is_up(project):
            yield self._machines.last_words(project.vm).encode()
            return
        async for piece in self._lifecycle.engine(project).logs(id, follow=follow, tail=tail):
            yield piece

    def watch(self) -> AsyncIterator[BoxChange]:
        return polling.watch(self.discover)

    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        engine, project = self._running(id), self._project_of(id)
        if any(name in _names(each.holdings.snapshots) for each in self._projects.all()):
            raise Conflict(f"there is a snapshot {name!r} already; remove it, or choose another name")
        taken = await engine.snapshot(id, name)
        async with self._lifecycle.held(project):
            project.hold(snapshots=(*project.holdings.snapshots, taken))
        return taken

    async def snapshots(self) -> Sequence[Snapshot]:
        return [each for found in await self._each(self._snapshots_of) for each in found]

    async def _snapshots_of(self, project: Project) -> Sequence[Snapshot]:
        if not self._lifecycle.is_up(project) or self._lifecycle.is_quiet(project):
            return project.holdings.snapshots
        found = tuple(await self._lifecycle.engine(project).snapshots())
        if _names(found) != _names(project.holdings.snapshots):
            async with self._lifecycle.held(project):
                project.hold(snapshots=found)
        return found

    async def remove_snapshot(self, name: str) -> None:
        project = next((each for each in self._projects.all() if name in _names(each.holdings.snapshots)), None)
        if project is None:
            raise NotFound(f"there is no snapshot {name!r}")
        async with self._lifecycle.awake(project) as engine:
            await engine.remove_snapshot(name)
            project.hold(snapshots=tuple(each for each in project.holdings.snapshots if each.name != name))

    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        """Volumes of all machines; of those that are off without their sizes."""
        found = await self._each(lambda project: self._volumes_of(project, sizes=sizes))
        return [each for volumes in found for each in volumes]

    async def _volumes_of(self, project: Project, *, sizes: bool) -> Sequence[Volume]:
        if not self._lifecycle.is_up(project) or (self._lifecycle.is_quiet(project) and not sizes):
            return project.holdings.volumes
        found = await self._lifecycle.engine(project).volumes_of(project.name, sizes=sizes)
        if _names(found) != _names(project.holdings.volumes):
            async with self._lifecycle.held(project):
                self._hold(project, found)
        return found

    def _hold(self, project: Project, found: Sequence[Volume]) -> None:
        """Note the volumes that a machine has, and those that another is about to make."""
        names = _names(found)
        announced = [each for each in project.holdings.volumes if each.created_at is None and each.name not in names]
        is_making = any(not box.is_whole for box in self._projects.boxes(project).values())
        project.hold(volumes=(*found, *(announced if is_making else ())))

    async def remove_volume(self, name: str) -> None:
        project = next((each for each in self._projects.all() if name in _names(each.holdings.volumes)), None)
        if project is None:
            raise NotFound(f"volume {name!r} is not one of skerry's")
        if not self._lifecycle.is_up(project) and not self._projects.boxes(project):
            async with self._lifecycle.held(project):
                _mark_for_removal(project, {name})
            return
        async with self._lifecycle.awake(project) as engine:
            await engine.remove_volume(name)
            project.hold(volumes=tuple(each for each in project.holdings.volumes if each.name != name))

    async def check_builder(self) -> None:
        await self.check()

    async def build_archive(self, build: ImageBuild, target: Path, on_progress: OnProgress) -> None:
        await self._images.build_archive(build, target, on_progress)

    async def docker_host(self, project_name: str, *, start: bool = False) -> str:
        """Address of a project's Docker, for other programs; what they leave keeps its disk. Raises NotFound."""
        project = self._projects.get(project_name)
        if start:
            self._refuse(Spec(provider=NAME, project=project_name, image="none"))
        elif not self._lifecycle.is_up(project):
            raise NotFound(f"project {project_name!r} has no machine that is up: start one with --start")
        async with self._lifecycle.awake(project) if start else self._lifecycle.held(project):
            project.hold(was_lent=True)
        return f"unix://{project.vm / SOCKET}"

    def _project_of(self, id: SandboxId) -> Project:
        return self._projects.get(self._projects.box(id).project)

    def _place_of(self, id: SandboxId, *, volumes: bool) -> Project | None:
        """Project that has something of a box, if only its volumes."""
        with suppress(NotFound):
            return self._project_of(id)
        places = self._projects.all() if volumes else []
        return next((each for each in places if any(volume.sandbox == id for volume in each.holdings.volumes)), None)

    def _running(self, id: SandboxId) -> ProjectEngine:
        return self._lifecycle.running(self._project_of(id))

    async def _each(self, ask: Callable[[Project], Awaitable[T]]) -> list[T]:
        """Ask all projects at once, and wait for all of them; raises the first error of any."""
        answers = await asyncio.gather(*(ask(project) for project in self._projects.all()), return_exceptions=True)
        found = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            found.append(answer)
        return found


def _end_of(spec: Spec) -> End | None:
    return End(clock.now(), spec.lifetime_s) if spec.lifetime_s else None


def _names(held: Iterable[Snapshot | Volume]) -> set[str]:
    return {each.name for each in held}


def _mark_for_removal(project: Project, names: set[str]) -> None:
    """Have volumes of a machine that is off removed when it is on again, or with all of it."""
    if not names:
        return
    held = project.holdings
    left = tuple(volume for volume in held.volumes if volume.name not in names)
    project.hold(volumes=left, doomed=(*held.doomed, *sorted(names)))
