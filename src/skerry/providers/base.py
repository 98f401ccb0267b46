"""The seam: what a provider must do, and nothing else."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from enum import IntEnum, StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from skerry.errors import InvalidSpec
from skerry.model.results import OnProgress as OnProgress
from skerry.model.results import Progress as Progress
from skerry.model.spec import Network, SandboxId, Spec
from skerry.net.stream import Stream

if TYPE_CHECKING:
    from skerry.vm.images.kernels import KernelStore

log = logging.getLogger("skerry.providers")

CID_LABEL = "skerry.cid"
"""Label with the number that the registry has given a sandbox: a machine has it on the vsock bus."""


class Isolation(IntEnum):
    """Wall between the code in a box and the host; a higher grade holds more."""

    NONE = 0
    NAMESPACE = 1
    CONTAINER = 2
    VM = 3


class Capability(StrEnum):
    """A verb that not every provider has. Exec, files, terminals and ports are the agent's, so they are not here."""

    STOP = "stop"
    PAUSE = "pause"
    MEMORY = "memory"
    SNAPSHOT = "snapshot"
    WATCH = "watch"
    VOLUMES = "volumes"
    IMAGES = "images"
    LOGS = "logs"
    USERS = "users"


VERBS: Mapping[Capability, tuple[str, ...]] = {
    Capability.STOP: ("stop", "start"),
    Capability.PAUSE: ("pause", "resume"),
    Capability.MEMORY: ("sleep", "snapshot_memory"),
    Capability.SNAPSHOT: ("snapshot", "snapshots", "remove_snapshot"),
    Capability.WATCH: ("watch",),
    Capability.VOLUMES: ("volumes", "remove_volume"),
    Capability.IMAGES: ("images", "build_image", "pull_image", "import_image", "remove_image"),
    Capability.LOGS: ("logs",),
    Capability.USERS: ("dial_as",),
}

OPTIONAL_FIELDS = frozenset(
    {"image", "root", "runtime", "target", "group", "writable_root", "data", "cache", "cache_paths", "snapshot"}
    | {"admin", "sleep_after_s"}
)
"""Fields of a spec that only some providers honour; the others refuse them."""


class Enforcement(msgspec.Struct, frozen=True):
    """Means by which a limit is held on this host, or the reason why it is not."""

    by: str = ""
    why_not: str = ""


class BoxState(StrEnum):
    RUNNING = "running"
    """It is whole: its limits hold, and its agent has answered once; or it is on its way from or to that."""
    PAUSED = "paused"
    ASLEEP = "asleep"
    """Its memory is kept in files, and no process of it is left; it goes on where it was."""
    STOPPED = "stopped"
    DEAD = "dead"
    """It has ended and cannot be started again, or was never made whole: whoever sees that removes what is left."""
    REMAINS = "remains"
    """Only its files are left: somebody removed the rest, or is about to; or it was never made."""


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A box as the host holds it."""

    state: BoxState
    created_at: float | None = None
    labels: dict[str, str] = {}
    out_of_memory: bool = False
    """It is dead, and the kernel had to kill something in it for want of memory."""
    image: str = ""
    """The id of the image that it was made from."""
    outdated: bool = False
    """The name that it asked for means another image by now."""


class BoxChange(msgspec.Struct, frozen=True, kw_only=True):
    """Change of a box, as `watch` tells it; without a status it is gone."""

    id: SandboxId
    status: BoxStatus | None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a box as they once were, under a name; `Spec.snapshot` makes a box of it."""

    name: str
    id: str
    sandbox: str
    """The id of the box that it was taken from."""
    size: int
    created_at: float
    memory: bool = False
    """Whether all that ran in it is kept too: a box made of it goes on from there."""


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """Volume that outlives a box: its data, or a cache of its project."""

    name: str
    kind: str
    """`data` or `cache`"""
    project: str
    sandbox: str | None = None
    """The id of the sandbox that it was made for, if it is one's data."""
    label: str = ""
    """The sandbox's name, or the cache's."""
    instance: str = ""
    """The registry that it belongs to."""
    size: int | None = None
    """None where the engine does not tell."""
    in_use: bool = False
    created_at: float | None = None


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """Image that boxes are made of; `id` changes with every byte of it."""

    id: str
    names: tuple[str, ...] = ()
    size: int = 0
    created_at: float | None = None
    digests: tuple[str, ...] = ()
    """Under which digests a registry has it."""
    used_by: int = 0
    """How many boxes of this installation are made of it."""


class ImageBuild(msgspec.Struct, frozen=True, kw_only=True):
    """Sources of an image: a Dockerfile, or for machines a recipe."""

    dockerfile: str = ""
    """The text of it, not its path."""
    recipe: str = ""
    """One of skerry's own: what a machine's root file system consists of."""
    name: str
    context: Path | None = None
    """The folder that COPY takes from; none for a Dockerfile that copies nothing."""
    args: dict[str, str] = {}
    target: str | None = None
    no_cache: bool = False
    network: Network = Network.NONE
    """What its RUN steps have; the host's they never have."""
    memory: int | None = None
    """The most that a step may take, without swap; none: as the provider thinks fit."""

    def __post_init__(self) -> None:
        if self.network not in (Network.NONE, Network.BRIDGE):
            reason = "network: a build gets none, or with bridge its own address, never the host's network, nor rules"
            raise InvalidSpec(reason, field="network")
        if self.recipe and (self.network is not Network.NONE or self.memory):
            raise InvalidSpec("recipe: it has no steps that could be given a network or memory", field="recipe")


class ProviderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider's own settings; each provider subclasses it in its own file."""

    from_environment: ClassVar[Mapping[str, str]] = {}
    """Settings that may also come from variables that other programs share, such as the address of a daemon."""


class Provider(ABC):
    """Makes boxes and gives a byte stream to the agent inside.

    A box bears its sandbox's id as its name, so a provider keeps no state of its own and any process can `destroy` or
    `dial` what another has made. A provider has no undo code: whoever calls `create` destroys what it left.
    """

    name: ClassVar[str]
    isolation: ClassVar[Isolation]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
    honours: ClassVar[frozenset[str]] = frozenset()
    """Which of OPTIONAL_FIELDS it takes."""
    needs_builder: ClassVar[bool] = False
    """Whether its images are built from a Dockerfile by another, and imported."""
    needs_image: ClassVar[bool] = False
    """Whether a box is made of an image or snapshot that the spec must name."""
    takes_memory_here: bool = False
    """Whether its boxes are made of the memory of this host, so that this one has to have some; known once
    `enforcement` has answered."""
    Config: ClassVar[type[ProviderConfig]] = ProviderConfig

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for capability, verbs in VERBS.items():
            written = [verb for verb in verbs if callable(getattr(cls, verb, None))]
            declared = capability in cls.capabilities
            if declared and len(written) < len(verbs):
                missing = ", ".join(sorted(set(verbs) - set(written)))
                raise TypeError(f"{cls.__name__} declares {capability!r} but does not write {missing}")
            if written and not declared:
                raise TypeError(f"{cls.__name__} writes {', '.join(written)} but does not declare {capability!r}")

    def __init__(self, config: Any) -> None:
        """`config` is an object of this class's `Config`."""
        super().__init__()

    @abstractmethod
    async def check(self) -> None:
        """Raise ProviderUnavailable, with the one-line fix, if this host cannot run boxes."""

    @abstractmethod
    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        """For each limit: how it would be held for this spec on this host. Raises Unsupported for a field that
        this provider never honours, and changes nothing."""

    async def describe(self) -> Mapping[str, Enforcement]:
        """For `skerry doctor`: how limits are held for a box that asks for none, and what else to know of this host."""
        return await self.enforcement(Spec(provider=self.name))

    @abstractmethod
    async def create(self, id: SandboxId, spec: Spec) -> Mapping[str, Enforcement] | None:
        """Make the box; returns once its agent answers, within a deadline of the provider's own. What comes back is
        how limits are held, as read back from the box that was made: it takes the place of what `enforcement` said."""

    @abstractmethod
    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        """Remove however much of the box there is; quiet if there is none. Volumes are kept unless asked."""

    @abstractmethod
    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        """Every box of this installation, asked from the host, not from memory."""

    @abstractmethod
    async def dial(self, id: SandboxId) -> Stream:
        """A byte stream to the agent, from any process, at any time. Raises NotFound or AgentUnreachable."""

    def holds(self, spec: Spec) -> int | None:
        """The most bytes that a box of this spec can have written, and that are taken from it; None: no known bound."""
        return spec.disk

    def memory_of(self, spec: Spec) -> int:
        """The most bytes of its host's memory that a box of this spec can take; 0: no known bound."""
        return spec.memory or 0

    def runs_nothing(self, id: SandboxId) -> bool:
        """Whether it is seen at a glance that nothing but its agent runs in a box, so that nothing is asked to end."""
        return False

    async def aclose(self) -> None:
        """Let go of what this object holds; boxes live on."""
        return


# The optional verbs. A provider that declares a capability has its verbs as they stand here.


class CanStop(Protocol):
    async def stop(self, id: SandboxId) -> None:
        """End its processes and keep its files; quiet if it is stopped. Its manager has asked them to end before."""

    async def start(self, id: SandboxId, spec: Spec) -> None:
        """Start it again; returns once its agent answers. `spec` says the environment and the time it has left."""


class CanPause(Protocol):
    async def pause(self, id: SandboxId) -> None:
        """Freeze it; quiet if it is frozen."""

    async def resume(self, id: SandboxId) -> None:
        """Let it go on; where it sleeps it comes back from its files, and its agent answers when this returns."""


class KeepsMemory(Protocol):
    """Boxes that can be paused too: `resume` wakes one that sleeps."""

    async def sleep(self, id: SandboxId) -> None:
        """Keep its memory in files and end its processes, whole or not at all; quiet if it sleeps. One that is paused
        sleeps as well. Streams to it end."""

    async def snapshot_memory(self, id: SandboxId, name: str) -> Snapshot:
        """Keep its files and all that runs in it as they are now, and let it go on. What is made of it is another box:
        with random numbers, names, a clock and a way to its agent of its own. Raises Conflict if the name is taken."""


class CanSnapshot(Protocol):
    async def snapshot(self, id: SandboxId, name: str) -> Snapshot:
        """Keep its files as they are now. Raises Conflict if the name is taken."""

    async def snapshots(self) -> Sequence[Snapshot]:
        """All of this installation."""

    async def remove_snapshot(self, name: str) -> None:
        """Raises NotFound, or Conflict while a box is made of it."""


class CanWatch(Protocol):
    def watch(self) -> AsyncIterator[BoxChange]:
        """Every box there is, then every change of one, whoever made it. Ends with ProviderUnavailable."""


class HasVolumes(Protocol):
    async def volumes(self, *, sizes: bool = False) -> Sequence[Volume]:
        """All of this installation; their sizes take longer."""

    async def remove_volume(self, name: str) -> None:
        """Raises NotFound, or Conflict while a box uses it."""


class HasImages(Protocol):
    async def images(self) -> Sequence[Image]: ...

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image: ...

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        """Raises ImageNotFound if no registry that is reachable has it."""

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        """From an image archive, an OCI layout (folder or tar), or a root file system (folder or tar)."""

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        """Raises ImageNotFound, or Conflict while a box is made of it."""


class ImageVerbs:
    """Verbs of images, for providers that have a part of their own which does them."""

    @cached_property
    def _images(self) -> HasImages:
        raise NotImplementedError

    async def images(self) -> Sequence[Image]:
        return await self._images.images()

    async def build_image(self, build: ImageBuild, on_progress: OnProgress) -> Image:
        return await self._images.build_image(build, on_progress)

    async def pull_image(self, name: str, on_progress: OnProgress) -> Image:
        return await self._images.pull_image(name, on_progress)

    async def import_image(self, source: Path, name: str, on_progress: OnProgress) -> Image:
        return await self._images.import_image(source, name, on_progress)

    async def remove_image(self, name: str, *, force: bool = False) -> None:
        await self._images.remove_image(name, force=force)


class BuildsArchives(Protocol):
    async def check_builder(self) -> None:
        """Raise ProviderUnavailable if it cannot build on this host."""

    async def build_archive(self, build: ImageBuild, target: Path, on_progress: OnProgress) -> None:
        """Build, and write what came of it as an image archive, for a provider that makes its own of it."""


class HasKernels(Protocol):
    """Boxes with a kernel of their own, which has to come from somewhere."""

    @property
    def kernels(self) -> KernelStore: ...


class HasLogs(Protocol):
    def logs(self, id: SandboxId, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[bytes]:
        """What the box itself said, such as its agent's last words."""


class HasUsers(Protocol):
    async def dial_as(self, id: SandboxId, user: str) -> Stream:
        """A byte stream to an agent that runs as that user and ends with the stream."""
