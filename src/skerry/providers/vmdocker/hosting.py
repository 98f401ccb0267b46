"""The machines of projects on a hypervisor: as clones of one whose Docker is up already, else booted."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from skerry.errors import (
    AgentError,
    Conflict,
    CreateFailed,
    ImageNotFound,
    NotFound,
    ProviderError,
    ProviderUnavailable,
)
from skerry.providers.base import Enforcement
from skerry.providers.limits import Limits
from skerry.providers.machine import guest, logs, plan
from skerry.providers.machine.guest import Preparation
from skerry.providers.machine.sources import Source, Sources
from skerry.providers.vmdocker.engine import NAME, ProjectEngine
from skerry.providers.vmdocker.machines import SOCKET, Machines
from skerry.providers.vmdocker.settings import VmDockerConfig
from skerry.units import format_size
from skerry.vm import sparse, templates
from skerry.vm.base import Capabilities, Drive, Hypervisor, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.templates import Template, TemplateStore

IMAGE = "docker"
_PORT = 2375
_GUEST_SOCKET = "/run/docker.sock"
_DISK, _DATA = "disk", "data"
_SHELL = "/bin/sh"
_SERVICE = (
    # Some versions keep a key of their own in a folder that is part of the root, which nobody can write to.
    "mount -t tmpfs -o size=1m none /etc/docker && exec dockerd -H unix:///run/docker.sock --data-root /.data/docker"
    " --exec-root /run/docker --pidfile /run/docker.pid --storage-driver overlay2"
    " --exec-opt native.cgroupdriver=cgroupfs --shutdown-timeout 5 --log-level warn"
    # Boxes have no network, so it needs none of what it would set up for them.
    " --bridge none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false --userland-proxy=false"
)
_LAYOUT = "1"
"""Counted up when a machine of before is not like one of now."""
_EMULATED_TIMES = 4
"""How much longer what is emulated may take."""
_LOOK_S = 0.2
_CONTROL_S = 30.0
_MACHINE_NEEDS = 64 << 20
_MIB = 1 << 20


class HostedMachines(Machines):
    def __init__(self, config: VmDockerConfig, engine_at: Callable[[Path], ProjectEngine]) -> None:
        self._config = config
        self._engine_at = engine_at
        self._cache = config.cache() / "vm"
        self._sources = Sources(self._cache)
        self._store = TemplateStore(self._cache)
        self._chosen: Hypervisor | None = None
        processes = config.size("vm_memory") - _MACHINE_NEEDS
        self._limits = Limits(memory=processes, pids=0, cpus=config.vm_cpus, disk=0, tmp=0, shm=0)

    async def check(self) -> None:
        await self._can()
        try:
            await self._source()
        except ImageNotFound:
            reason = "there is no image for machines with Docker"
            raise ProviderUnavailable(NAME, reason, fix=f"skerry image build --vm --recipe {IMAGE}") from None

    async def describe(self) -> Mapping[str, Enforcement]:
        hypervisor, can = await self._can()
        size, cpus = format_size(plan.memory_mib(self._limits) * _MIB), plan.vcpus(self._limits, can)
        return {
            "hypervisor": Enforcement(by=f"{hypervisor.name} {can.version}, {can.accelerator}"),
            "isolation": plan.isolation(can),
            "machine": Enforcement(by=f"one for each project, of {size} and {cpus} virtual CPUs"),
        }

    def is_running(self, folder: Path) -> bool:
        return VmFolder(folder).is_running()

    async def tell(self, folder: Path, *, lifetime_s: float | None, idle_s: float | None) -> None:
        async with guest.control(VmFolder(folder), _CONTROL_S) as client:
            await client.call("set_lifetime", {"lifetime_s": lifetime_s, "idle_s": idle_s}, type=dict[str, Any])

    async def wait(self, folder: Path, timeout_s: float) -> bool:
        return await VmFolder(folder).wait(timeout_s)

    async def kill(self, folder: Path) -> None:
        hypervisor = await self._hypervisor()
        if folder.exists():
            await hypervisor.kill(VmFolder(folder))
        await self._clear(hypervisor, _template_folder(folder))

    async def _clear(self, hypervisor: Hypervisor, folder: VmFolder) -> None:
        if folder.path.exists():
            await hypervisor.kill(folder)
            await asyncio.to_thread(folder.remove)

    def last_words(self, folder: Path) -> str:
        return logs.last_words(VmFolder(folder))

    async def start(self, folder: Path, name: str) -> None:
        vm = VmFolder(folder)
        hypervisor, can = await self._can()
        source = await self._source()
        machine = self._machine(source, can)
        is_new = not vm.file(_DATA).exists()  # else only a Docker that comes up with the disk knows what is on it
        if is_new and self._config.template and can.snapshots:
            key = self._key(hypervisor, can, machine, source)
            template = self._store.get(key) or await self._make_template(key, hypervisor, vm, machine, can)
            async with self._coming_up(vm, can):
                if await self._clone(hypervisor, vm, machine, can, template, name):
                    return
        async with self._coming_up(vm, can):
            if is_new:
                await self._make_folder(hypervisor, vm, await self._blank())
            await self._boot(hypervisor, vm, machine, can, name)

    @asynccontextmanager
    async def _coming_up(self, folder: VmFolder, can: Capabilities) -> AsyncIterator[None]:
        """One that does not come up in time, or not at all, is told with its last words."""
        timeout_s = self._timeout_s(can)
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            message = f"Docker did not answer in the machine within {timeout_s:g} s"
            raise CreateFailed(message, log=logs.last_words(folder)) from None
        except (ProviderUnavailable, CreateFailed):
            raise
        except (ProviderError, AgentError, OSError) as error:
            raise CreateFailed(f"the machine did not come up: {error}", log=logs.last_words(folder)) from error

    def _timeout_s(self, can: Capabilities) -> float:
        return self._config.ready_timeout_s * (1 if can.is_boundary else _EMULATED_TIMES)

    # booting

    async def _boot(
        self, hypervisor: Hypervisor, folder: VmFolder, machine: Machine, can: Capabilities, name: str
    ) -> None:
        earlier_ends = _ends_of_docker(folder)
        await guest.boot(hypervisor, folder, machine, plan.host_limits(self._limits, can))
        async with guest.control(folder, _CONTROL_S) as client:
            await guest.reseed(client, _hostname(name), _machine_id(folder))
            await guest.prepare(client, _preparation(), timeout_s=self._timeout_s(can))
        await self._docker_answers(folder, earlier_ends)

    async def _docker_answers(self, folder: VmFolder, earlier_ends: int) -> None:
        """Nobody tells when Docker listens, so it is asked. The deadline is the caller's."""
        engine = self._engine_at(folder.path)
        while True:
            try:
                return await engine.ping(_CONTROL_S)
            except ProviderError as error:
                if not folder.is_running():
                    raise CreateFailed("the machine ended", log=logs.last_words(folder)) from error
                if _ends_of_docker(folder) > earlier_ends:
                    raise CreateFailed("Docker ended as it started", log=logs.last_words(folder)) from error
                await asyncio.sleep(_LOOK_S)

    async def _make_folder(self, hypervisor: Hypervisor, folder: VmFolder, disk: Path) -> None:
        """A new one, whose disk begins as that; what was begun before is gone."""
        await self._clear(hypervisor, folder)
        folder.make()
        await asyncio.to_thread(sparse.copy, await self._sources.blank(), folder.file(_DISK))
        draft = folder.file(f"{_DATA}.new")
        await asyncio.to_thread(sparse.copy, disk, draft)
        draft.rename(folder.file(_DATA))

    # cloning

    def _key(self, hypervisor: Hypervisor, can: Capabilities, machine: Machine, source: Source) -> str:
        contents = (*source.contents, NAME, _LAYOUT, _SERVICE, str(self._config.size("vm_disk")))
        return templates.key_of(hypervisor.name, can, machine, *contents)

    async def _clone(
        self,
        hypervisor: Hypervisor,
        folder: VmFolder,
        machine: Machine,
        can: Capabilities,
        template: Template,
        name: str,
    ) -> bool:
        """Whether that could be done; where not, what was saved is of no use any more."""
        try:
            await self._make_folder(hypervisor, folder, template.folder / _DATA)
            await hypervisor.restore(folder, machine, template.folder, plan.host_limits(self._limits, can))
            async with guest.control(folder, _CONTROL_S) as client:
                await guest.reseed(client, _hostname(name), _machine_id(folder))
            await self._docker_answers(folder, 0)
        except (Conflict, AgentError, FileNotFoundError):
            await hypervisor.kill(folder)
            await self._store.discard(template, timeout_s=self._config.ready_timeout_s)
            return False
        return True

    async def _make_template(
        self, key: str, hypervisor: Hypervisor, folder: VmFolder, machine: Machine, can: Capabilities
    ) -> Template:
        """In a folder beside the machine's: whoever ends that ends this too."""
        first = msgspec.structs.replace(machine, saveable=True)

        aside = _template_folder(folder.path)

        async def build(into: Path) -> None:
            try:
                async with self._coming_up(aside, can):
                    await self._make_folder(hypervisor, aside, await self._blank())
                    await self._boot(hypervisor, aside, first, can, "template")
                    await self._engine_at(aside.path).warm()
                    await hypervisor.save(aside, into)
                await asyncio.to_thread(sparse.copy, aside.file(_DATA), into / _DATA)
            finally:
                await self._clear(hypervisor, aside)

        return await self._store.make(key, build, timeout_s=2 * self._timeout_s(can))

    # what they are made of

    async def _hypervisor(self) -> Hypervisor:
        if self._chosen is None:
            await self._sources.find_kernel()
            self._chosen = await self._choose()
        return self._chosen

    async def _choose(self) -> Hypervisor:
        """What is there and runs. Whoever is told of none is told of QEMU, which runs everywhere."""
        if self._config.hypervisor in ("", "firecracker"):
            from skerry.vm.firecracker import Firecracker

            firecracker = Firecracker(self._cache, kernel=self._sources.kernel)
            if self._config.hypervisor:
                return firecracker
            with suppress(ProviderUnavailable, NotFound):
                await firecracker.probe()
                return firecracker
        from skerry.vm.qemu.hypervisor import Qemu

        return Qemu(self._cache, kernel=self._sources.kernel)

    async def _can(self) -> tuple[Hypervisor, Capabilities]:
        hypervisor = await self._hypervisor()
        return hypervisor, await hypervisor.probe()

    async def _source(self) -> Source:
        return await self._sources.find(IMAGE)

    async def _blank(self) -> Path:
        return await self._sources.blank(self._config.size("vm_disk"), journal=True)

    def _machine(self, source: Source, can: Capabilities) -> Machine:
        return Machine(
            kernel=source.image.kernel,
            drives=(*source.drives, Drive(name=_DISK, path=_DISK), Drive(name=_DATA, path=_DATA)),
            vcpus=plan.vcpus(self._limits, can),
            memory_mib=plan.memory_mib(self._limits),
            publish={SOCKET: _PORT},
        )


def _preparation() -> Preparation:
    return Preparation(
        home="/tmp",
        cwd="/",
        mount_disk=False,
        mount_data=True,
        services=[[_SHELL, "-c", _SERVICE]],
        forwards={str(_PORT): _GUEST_SOCKET},
    )


def _ends_of_docker(folder: VmFolder) -> int:
    """How often the console, which is kept from start to start, says that it ended."""
    return folder.read_console().count(f"skerry: service {_SHELL} ended")


def _template_folder(folder: Path) -> VmFolder:
    return VmFolder(folder.with_name("template"))


def _hostname(name: str) -> str:
    return f"{NAME}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _machine_id(folder: VmFolder) -> str:
    return hashlib.sha256(str(folder.path).encode()).hexdigest()[:32]
