"""Machines of projects: clones of one whose Docker is up already, else booted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from skerry.aio import backoff
from skerry.errors import AgentError, CreateFailed, ImageNotFound, NotFound, ProviderError, ProviderUnavailable
from skerry.host import sparse
from skerry.providers.base import Enforcement
from skerry.providers.machine import plan
from skerry.providers.machine.images import Source, Sources
from skerry.providers.shared.limits import BoxLimits
from skerry.providers.vmdocker.engine import NAME, SOCKET, ProjectEngine, VmDockerConfig
from skerry.units import format_size
from skerry.vm import console, guest, launch, templates
from skerry.vm.base import Capabilities, Drive, Hypervisor, Machine
from skerry.vm.folder import VmFolder
from skerry.vm.guest import Preparation
from skerry.vm.templates import Template, TemplateStore

_log = logging.getLogger("skerry.providers")

IMAGE = "docker"
_PORT = 2375
_GUEST_SOCKET = "/run/docker.sock"
_DISK, _DATA, _TEMPLATE = "disk", "data", "template"
_SHELL = "/bin/sh"
_CONTAINERD = "/run/docker/containerd.sock"
_SERVICE = (
    # Some versions keep a key of their own in a folder that is part of the root, which nobody can write to.
    "mount -t tmpfs -o size=1m none /etc/docker && mkdir -p /run/docker"
    """ && printf 'version = 2\\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\\n' >/run/docker/containerd.toml"""
    # Docker would give one that it starts itself 15 seconds, which is too short for an emulated machine of a busy host.
    f" && {{ containerd --config /run/docker/containerd.toml --address {_CONTAINERD} --log-level warn"
    " --root /.data/docker/containerd/daemon --state /run/docker/containerd & }"
    f" && exec dockerd --containerd {_CONTAINERD} -H unix:///run/docker.sock --data-root /.data/docker"
    " --exec-root /run/docker --pidfile /run/docker.pid --storage-driver overlay2"
    " --exec-opt native.cgroupdriver=cgroupfs --shutdown-timeout 5 --log-level warn"
    # A box that has a network has one of ours.
    " --bridge none --ip6tables=false --userland-proxy=false"
)
_WITHOUT_NETWORK = " --iptables=false --ip-forward=false --ip-masq=false"
_LAYOUT = "1"
"""Counted up when a machine of before is not like one of now."""
_EMULATED_TIMES = 4
"""How much longer what is emulated may take."""
_LOOK_S = 0.2
_CONTROL_S = 30.0
_MACHINE_NEEDS = 64 << 20
_MIB = 1 << 20


class ProjectMachines:
    """Machines with Docker in them, each in a folder that tells all there is to know of it."""

    def __init__(self, config: VmDockerConfig, engine_at: Callable[[Path], ProjectEngine]) -> None:
        self._config = config
        self._engine_at = engine_at
        self._cache = config.cache() / "vm"
        self._sources = Sources(self._cache)
        self._store = TemplateStore(self._cache)
        self._chosen: Hypervisor | None = None
        processes = config.size("vm_memory") - _MACHINE_NEEDS
        self._limits = BoxLimits(memory=processes, pids=0, cpus=config.vm_cpus, disk=0, tmp=0, shm=0)

    async def check(self) -> None:
        """Raises ProviderUnavailable, with the one-line fix, if this host runs no such machines."""
        await self._can()
        try:
            await self._source()
        except ImageNotFound:
            reason = "there is no image for machines with Docker"
            fix = f"skerry image build --vm --recipe {IMAGE}"
            if self._config.is_on_vfkit:
                fix += ", on Linux: docs/howto/macos.md"
            raise ProviderUnavailable(NAME, reason, fix=fix) from None

    async def describe(self) -> Mapping[str, Enforcement]:
        """Boundary between a machine and the host, and the machine's size."""
        hypervisor, can = await self._can()
        size, cpus = format_size(plan.memory_mib(self._limits) * _MIB), plan.vcpus(self._limits, can)
        return {
            "hypervisor": Enforcement(by=f"{hypervisor.name} {can.version}, {can.accelerator}"),
            "isolation": plan.isolation(can),
            "machine": Enforcement(by=f"one for each project, of {size} and {cpus} virtual CPUs"),
        }

    def is_running(self, folder: Path) -> bool:
        """Whether it runs. Raises ProviderError if one that has lost its warden does not die."""
        vm = self._folder(folder)
        launch.kill_if_left_alone(vm)
        return vm.is_running()

    async def tell(self, folder: Path, *, lifetime_s: float | None, idle_s: float | None) -> None:
        """Have it power itself off after so long, or so long after its last user. Raises AgentError."""
        until = {"lifetime_s": lifetime_s, "idle_s": idle_s}
        await guest.call(self._folder(folder), _CONTROL_S, "set_lifetime", until)

    async def wait(self, folder: Path, timeout_s: float) -> bool:
        """Wait until one that ends has ended; False if it has not by then."""
        return await self._folder(folder).wait(timeout_s)

    async def kill(self, folder: Path) -> None:
        """End it at once; its disk and its console stay. Quiet if there is nothing."""
        hypervisor = await self._hypervisor()
        if folder.exists():
            await hypervisor.kill(self._folder(folder))
        await templates.clear(hypervisor, self._folder(folder.with_name(_TEMPLATE)))

    def last_words(self, folder: Path) -> str:
        return console.last_words(self._folder(folder))

    async def why_no_network(self) -> str | None:
        """Reason why a machine can have no network that leads out and not to the host; None where it can."""
        return (await self._hypervisor()).why_no_network()

    async def start(self, folder: Path, name: str, *, network: bool) -> None:
        """Start one with the disk that its folder has, or with a new one, and wait until its Docker answers. Raises
        CreateFailed with the last words of its console; what is left then is for `kill`."""
        vm = self._folder(folder)
        hypervisor, can = await self._can()
        source = await self._source()
        machine = self._machine(source, can, network=network)
        is_new = not vm.file(_DATA).exists()  # else only a Docker that comes up with the disk knows what is on it
        if is_new and self._config.template and can.snapshots:
            contents = (*source.contents, NAME, _LAYOUT, _service(machine), str(self._config.size("vm_disk")))
            key = templates.key_of(hypervisor.name, can, machine, *contents)
            template = self._store.get(key) or await self._make_template(key, hypervisor, vm, machine, can)
            cloning = self._store.cloning(template, hypervisor, vm, timeout_s=self._config.ready_timeout_s)
            async with self._coming_up(vm, can), cloning:
                await self._make_folder(hypervisor, vm, template.folder / _DATA)
                await hypervisor.restore(vm, machine, template.folder, plan.host_limits(self._limits, can))
                async with guest.control(vm, _CONTROL_S) as client:
                    await guest.reseed(client, _hostname(name), _machine_id(vm))
                await self._docker_answers(vm, 0)
                return
        async with self._coming_up(vm, can):
            if is_new:
                await self._make_folder(hypervisor, vm, await self._blank())
            await self._boot(hypervisor, vm, machine, can, name)

    @asynccontextmanager
    async def _coming_up(self, folder: VmFolder, can: Capabilities) -> AsyncIterator[None]:
        """Bound the time of a start. Raises CreateFailed with the last words of the machine."""
        timeout_s = self._timeout_s(can)
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            message = f"Docker did not answer in the machine within {timeout_s:g} s"
            raise CreateFailed(message, log=console.last_words(folder)) from None
        except (ProviderUnavailable, CreateFailed):
            raise
        except (ProviderError, AgentError, OSError) as error:
            raise CreateFailed(f"the machine did not come up: {error}", log=console.last_words(folder)) from error

    def _timeout_s(self, can: Capabilities) -> float:
        return self._config.ready_timeout_s * (1 if can.is_boundary else _EMULATED_TIMES)

    async def _boot(
        self, hypervisor: Hypervisor, folder: VmFolder, machine: Machine, can: Capabilities, name: str
    ) -> None:
        await guest.boot(hypervisor, folder, machine, plan.host_limits(self._limits, can))
        earlier_ends = _ends_of_docker(folder)  # of earlier starts: in this one there is no Docker yet
        async with guest.control(folder, _CONTROL_S) as client:
            timeout_s = self._timeout_s(can)
            await guest.become(client, _hostname(name), _machine_id(folder), _preparation(machine), timeout_s)
        await self._docker_answers(folder, earlier_ends)

    async def _docker_answers(self, folder: VmFolder, earlier_ends: int) -> None:
        """Wait until Docker listens. Raises CreateFailed if it or the machine ended; the deadline is the caller's."""
        engine = self._engine_at(folder.path)
        for delay_s in backoff(_LOOK_S, _LOOK_S):
            try:
                await engine.ping(_CONTROL_S)
                return
            except ProviderError as error:
                if not folder.is_running():
                    raise CreateFailed("the machine ended", log=console.last_words(folder)) from error
                if _ends_of_docker(folder) > earlier_ends:
                    raise CreateFailed("Docker ended as it started", log=console.last_words(folder)) from error
                await asyncio.sleep(delay_s)

    async def _make_folder(self, hypervisor: Hypervisor, folder: VmFolder, disk: Path) -> None:
        """Make the folder of a new machine, whose disk begins as `disk`; one that was there is removed."""
        await templates.clear(hypervisor, folder)
        folder.make()
        await asyncio.to_thread(sparse.copy, await self._sources.blank(), folder.file(_DISK))
        draft = folder.file(f"{_DATA}.new")
        await asyncio.to_thread(sparse.copy, disk, draft)
        draft.rename(folder.file(_DATA))

    async def _make_template(
        self, key: str, hypervisor: Hypervisor, folder: VmFolder, machine: Machine, can: Capabilities
    ) -> Template:
        """Make one in a folder beside the machine's: who ends that ends this too."""
        first = msgspec.structs.replace(machine, saveable=True)
        aside = self._folder(folder.path.with_name(_TEMPLATE))

        async def build(into: Path) -> None:
            try:
                async with self._coming_up(aside, can):
                    await self._make_folder(hypervisor, aside, await self._blank())
                    await self._boot(hypervisor, aside, first, can, "template")
                    await self._engine_at(aside.path).warm()
                    await hypervisor.save(aside, into)
                await asyncio.to_thread(sparse.copy, aside.file(_DATA), into / _DATA)
            finally:
                await templates.clear(hypervisor, aside)

        return await self._store.make(key, build, timeout_s=2 * self._timeout_s(can))

    async def _source(self) -> Source:
        """Image of machines. A host that is no Linux has no interpreter for them: theirs is the image's own."""
        return await self._sources.find(IMAGE, has_python=not self._config.is_on_vfkit)

    def _folder(self, path: Path) -> VmFolder:
        if not self._config.is_on_vfkit:
            return VmFolder(path)
        from skerry.vm.vfkit.folder import VfkitFolder

        return VfkitFolder(path)

    async def _hypervisor(self) -> Hypervisor:
        if self._chosen is None:
            await self._sources.find_kernel()
            self._chosen = await self._choose()
        return self._chosen

    async def _choose(self) -> Hypervisor:
        """Choose vfkit on a Mac, Firecracker where it runs, else QEMU."""
        if self._config.is_on_vfkit:
            from skerry.vm.vfkit.hypervisor import VfkitHypervisor

            return VfkitHypervisor()
        if self._config.hypervisor in ("", "firecracker"):
            from skerry.vm.firecracker import FirecrackerHypervisor

            firecracker = FirecrackerHypervisor(
                self._cache, self._sources.kernel, program=self._config.program, jailer=self._config.jailer
            )
            if self._config.hypervisor:
                return firecracker
            try:
                await firecracker.probe()
                return firecracker
            except (ProviderUnavailable, NotFound) as error:
                _log.debug("vmdocker runs on QEMU: %s", error)
        from skerry.vm.qemu.hypervisor import QemuHypervisor

        return QemuHypervisor(self._cache, kernel=self._sources.kernel)

    async def _can(self) -> tuple[Hypervisor, Capabilities]:
        hypervisor = await self._hypervisor()
        return hypervisor, await hypervisor.probe()

    async def _blank(self) -> Path:
        return await self._sources.blank(self._config.size("vm_disk"), journal=True)

    def _machine(self, source: Source, can: Capabilities, *, network: bool) -> Machine:
        return Machine(
            kernel=source.image.kernel,
            drives=(*source.drives, Drive(name=_DISK, path=_DISK), Drive(name=_DATA, path=_DATA)),
            vcpus=plan.vcpus(self._limits, can),
            memory_mib=plan.memory_mib(self._limits),
            network="user" if network else "none",
            publish={SOCKET: _PORT},
        )


def _service(machine: Machine) -> str:
    return _SERVICE + (_WITHOUT_NETWORK if machine.network == "none" else "")


def _preparation(machine: Machine) -> Preparation:
    return Preparation(
        home="/tmp",
        cwd="/",
        mount_disk=False,
        mount_data=True,
        network=None if machine.network == "none" else plan.USER_NETWORK,
        services=[[_SHELL, "-c", _service(machine)]],
        forwards={str(_PORT): _GUEST_SOCKET},
    )


def _ends_of_docker(folder: VmFolder) -> int:
    """Number of ends of Docker on the console, which is kept from start to start."""
    return folder.read_console().count(f"skerry: service {_SHELL} ended")


def _hostname(name: str) -> str:
    return f"{NAME}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _machine_id(folder: VmFolder) -> str:
    return hashlib.sha256(str(folder.path).encode()).hexdigest()[:32]
