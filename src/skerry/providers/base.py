"""The seam: what a provider must do, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Any, ClassVar

import msgspec

from skerry.agent.stream import Stream
from skerry.spec import SandboxId, Spec


class Isolation(IntEnum):
    """What stands between the code in a box and the host; a higher grade holds more."""

    NONE = 0
    NAMESPACE = 1
    CONTAINER = 2
    VM = 3


class Capability(StrEnum):
    """A verb that not every provider has. Exec, files, terminals and ports are the agent's, so they are not here."""

    STOP = "stop"
    PAUSE = "pause"
    SNAPSHOT = "snapshot"
    WATCH = "watch"
    VOLUMES = "volumes"
    BUILD_IMAGE = "build_image"
    LOGS = "logs"


VERBS: Mapping[Capability, tuple[str, ...]] = {
    Capability.STOP: ("stop", "start"),
    Capability.PAUSE: ("pause", "resume"),
    Capability.SNAPSHOT: ("snapshot", "restore", "fork"),
    Capability.WATCH: ("watch",),
    Capability.VOLUMES: ("volumes",),
    Capability.BUILD_IMAGE: ("build_image",),
    Capability.LOGS: ("logs",),
}


class Enforcement(msgspec.Struct, frozen=True):
    """How a limit is held on this host, or why it is not."""

    by: str = ""
    why_not: str = ""


class BoxState(StrEnum):
    RUNNING = "running"
    """It is whole: its limits hold, and its agent has answered once."""
    PAUSED = "paused"
    STOPPED = "stopped"
    DEAD = "dead"
    """Something of it is left, but it is no box any more, or was never made whole."""


class BoxStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A box as the host holds it."""

    state: BoxState
    created_at: float | None = None
    labels: dict[str, str] = {}
    out_of_memory: bool = False
    """It is dead, and the kernel had to kill something in it for want of memory."""


class ProviderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A provider's own settings; each provider subclasses it in its own file."""


class Provider(ABC):
    """Makes boxes and gives a byte stream to the agent inside.

    A box bears its sandbox's id as its name, so a provider keeps no state of its own and any process can `destroy` or
    `dial` what another has made. A provider has no undo code: whoever calls `create` destroys what it left.
    """

    name: ClassVar[str]
    isolation: ClassVar[Isolation]
    capabilities: ClassVar[frozenset[Capability]] = frozenset()
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

    @abstractmethod
    async def create(self, id: SandboxId, spec: Spec) -> None:
        """Make the box; returns once its agent answers, within a deadline of the provider's own."""

    @abstractmethod
    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        """Remove however much of the box there is; quiet if there is none. Volumes are kept unless asked."""

    @abstractmethod
    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        """Every box of this installation, asked from the host, not from memory."""

    @abstractmethod
    async def dial(self, id: SandboxId) -> Stream:
        """A byte stream to the agent, from any process, at any time. Raises NotFound or AgentUnreachable."""

    async def aclose(self) -> None:
        """Let go of what this object holds; boxes live on."""
        return
