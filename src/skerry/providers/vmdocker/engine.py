"""Docker of a project's machine, an engine like others but never one of this host; and the settings of machines."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Literal

from skerry.agent import bundle
from skerry.errors import ConfigError, InvalidSpec, NotFound, Unsupported
from skerry.model.results import OnProgress
from skerry.providers.base import Volume
from skerry.providers.dockerapi import EngineConfig, EngineProvider, Quirks, image_config
from skerry.providers.dockerapi.api import Engine
from skerry.providers.dockerapi.containers import Inspected, folder_tar, pieces_of
from skerry.providers.dockerapi.image_config import full_name
from skerry.providers.dockerapi.info import EngineInfo
from skerry.providers.dockerapi.progress import EngineWork, follow
from skerry.providers.dockerapi.volumes import EngineAgentVolume
from skerry.providers.shared import layout
from skerry.providers.shared.limits import DaemonConfig
from skerry.units import format_size, parse_size

NAME = "vmdocker"
_NOTHING = "skerry-nothing"
"""Image without a file, for containers that never run."""
SOCKET = "docker.sock"
"""Socket in a machine's folder that leads to the Docker in it."""
_DOCKER_NEEDS = 200 << 20
"""Memory of a machine's kernel and Docker."""


class VmDockerConfig(DaemonConfig, frozen=True):
    """Settings of the provider."""

    hypervisor: Literal["", "qemu", "firecracker", "vfkit"] = ""
    """Empty: Firecracker where it runs, else QEMU; vfkit on a Mac."""
    program: str = "firecracker"
    """Firecracker: a name in PATH, or a path."""
    jailer: str = "jailer"
    """Its jailer, the same; empty: machines have a uid of their own but no jail."""
    state_dir: str = ""
    """A folder for each project; empty: /var/lib/skerry/vmdocker for root, else ~/.local/state/skerry/vmdocker."""
    vm_memory: int | str = "1G"
    """Of a project's machine: what all its boxes have together, and Docker some 200M of it."""
    vm_cpus: int | None = None
    """Virtual processors of a machine; none: two, or one where they are emulated."""
    vm_disk: int | str = "8G"
    """Limit of what the images, volumes and snapshots of a project can hold; it takes the room of what is written."""
    vm_network: bool = False
    """Whether machines have a network card, for boxes that ask for a bridge. It leads out, and not to the host."""
    idle_s: float = 1800.0
    """How long a machine waits for somebody to come before it powers itself off."""
    ready_timeout_s: float = 60.0
    """How long a machine may take from its start until Docker answers in it; four times as long where it is
    emulated."""
    template: bool = True
    """Boot a machine with Docker once, keep it with its memory, and begin those of new projects as clones of it."""
    memory: int | str = "256M"
    disk: int | str = "128M"
    """Work folder, which is in the memory of the box."""
    tmp: int | str = "64M"

    @property
    def is_on_vfkit(self) -> bool:
        return self.hypervisor == "vfkit" or (not self.hypervisor and sys.platform == "darwin")

    def size(self, field: Literal["vm_memory", "vm_disk"]) -> int:
        try:
            return parse_size(getattr(self, field), field)
        except InvalidSpec as error:
            raise ConfigError(f"providers.vmdocker.{error}") from None

    @property
    def room(self) -> int:
        """Memory of a machine that is left for boxes, or for a build."""
        return self.size("vm_memory") - _DOCKER_NEEDS

    def check_memory(self, asked: int) -> None:
        """Raise Unsupported if no machine has as much."""
        if asked > self.room:
            there = format_size(max(self.room, 0))
            reason = f"{format_size(asked)} is more than the {there} a machine has; raise providers.vmdocker.vm_memory"
            raise Unsupported("memory", NAME, reason)

    def state(self) -> Path:
        default = "/var/lib/skerry/vmdocker" if os.geteuid() == 0 else "~/.local/state/skerry/vmdocker"
        return Path(self.state_dir or default).expanduser().absolute()


class MachineRuntime(EngineAgentVolume):
    """The agent and its interpreter as the machine itself runs them: its boxes mount the same folder."""

    def __init__(self, engine: Engine, cache: Path) -> None:
        super().__init__(engine, cache)
        self.volume = layout.RUNTIME

    async def prepare(self, image: str) -> None:
        """Nothing is to be filled."""

    async def look(self) -> bool:
        return True

    @property
    def argv(self) -> list[str]:
        return bundle.portable_argv(layout.PYTHON)


class ProjectEngine(EngineProvider):
    name = NAME
    Config = EngineConfig
    fix = "see the console of the project's machine; `skerry reconcile` clears one that has ended"
    quirks = Quirks(may_be_here=False)

    def __init__(self, config: EngineConfig, *, shares_runtime: bool = False) -> None:
        """`shares_runtime`: its boxes have the agent of the machine, with the interpreter that the image brings."""
        self._shares_runtime = shares_runtime
        super().__init__(config)

    def _agent_volume(self) -> EngineAgentVolume:
        return MachineRuntime(self._engine, self._cache) if self._shares_runtime else super()._agent_volume()

    def disk_of(self, box: Inspected) -> int:
        """A machine that was taken over answers for its Docker: no folder is larger than the machine's own disk."""
        return min(super().disk_of(box), self._config.root_size(NAME))

    def close(self) -> None:
        self._dialer.close()

    async def ping(self, timeout_s: float) -> None:
        """Raises ProviderUnavailable if it does not answer."""
        async with self._engine.stream("GET", "/_ping", timeout_s=timeout_s, whole_s=timeout_s) as answer:
            await answer.whole()

    async def volumes_of(self, project: str, *, sizes: bool = False) -> tuple[Volume, ...]:
        """Volumes of its project; a machine is not believed about those of others."""
        return tuple(volume for volume in await self.volumes(sizes=sizes) if volume.project == project)

    async def image_id(self, name: str) -> str | None:
        """Id of the image that a name means there now; None if there is none."""
        try:
            return (await image_config.resolve(self._engine, full_name(name))).id
        except NotFound:
            return None

    async def load(self, archive: Path, name: str) -> None:
        await follow(self._engine, "/images/load", {}, EngineWork(f"the loading of {name}"), pieces_of(archive))

    async def pull_archive(self, name: str, target: Path, on_progress: OnProgress, *, most: int) -> None:
        """Pull an image from its registry, and save it as `docker save` does."""
        await self._images.pull_archive(name, target, on_progress, most=most)

    async def warm(self) -> None:
        """Make the agent's volume, which every box needs, before there is a box."""
        content = folder_tar("tmp", mode=0o1777)
        await self._engine.post("/images/create", query={"fromSrc": "-", "repo": _NOTHING}, body=content)
        await self._agent.prepare(_NOTHING)


def assumed() -> EngineInfo:
    """Account that it will give of itself, before it runs."""
    return EngineInfo(elsewhere=True, default_runtime="runc")
