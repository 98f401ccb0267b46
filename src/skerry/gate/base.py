"""What the parts of the gate know of each other."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec

from skerry.model.rules import Rules
from skerry.model.secrets import Secret
from skerry.model.spec import SandboxId


class Duplex(Protocol):
    """Bytes both ways: a connection of a box, or one that the gate dialled for it."""

    async def read(self) -> bytes:
        """The next bytes; empty at the end. Raises OSError or SkerryError when it breaks."""

    async def write(self, data: bytes) -> None:
        """Send, as fast as the other side takes it."""

    async def close_write(self) -> None:
        """Say that no more will be written."""

    async def close(self) -> None:
        """End it, both ways."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """All that decides what one sandbox may reach, from its record and the configuration."""

    id: SandboxId
    rules: Rules
    hosts: Mapping[str, tuple[str, ...]] = {}
    """Addresses of names that the configuration knows, private ones included."""
    reach: Mapping[str, frozenset[int]] = {}
    """Ports of members of its fleet, by every name that they have; `agent-db-*` stands for each of a phase."""
    secrets: Mapping[str, Secret] = {}
    labels: Mapping[str, str] = {}
    """Labels of the sandbox, for hooks."""
    egress: int | None = None
    """Bytes that it may send in a second."""


class Meter(msgspec.Struct):
    """Bytes of a connection, for the ledger and the bounds, and the names of secrets that were put in. What a `Dial`
    gives counts its bytes itself; an opener adds the names."""

    up: int = 0
    down: int = 0
    secrets: set[str] = msgspec.field(default_factory=set)


Dial = Callable[[], Awaitable[Duplex]]
"""Connect to the checked address of the host that was asked for, and write that down. Raises Refused."""


class Opener(Protocol):
    """Opens connections to hosts of secrets and changes requests on their way."""

    def is_for(self, policy: Policy, name: str, port: int) -> bool:
        """Whether a connection to that host has to be opened."""

    async def serve(self, policy: Policy, name: str, port: int, client: Duplex, dial: Dial, meter: Meter) -> None:
        """Serve a connection to its end. Raises Refused for what is no request that could be sent on."""


class Members(Protocol):
    """Other members of a sandbox's fleet."""

    async def dial(self, policy: Policy, name: str, port: int) -> tuple[Duplex, SandboxId]:
        """Connect to a port of a member through its agent; which member that is. Raises NotFound or AgentError."""


class Recorder(Protocol):
    """The ledger, as the gate uses it."""

    def append(self, kind: str, sandbox: SandboxId | None = None, **facts: Any) -> object: ...

    def note(self, kind: str, sandbox: SandboxId | None = None, **facts: Any) -> object:
        """Write a line of what is over already; one that cannot be written is kept."""


class Refused(Exception):
    """A connection that is not let through; its text is the reason, for the ledger and, where that can be told, the
    box."""


class Unreachable(Refused):
    """A connection to a host that is allowed, and could not be made."""


class Late(Unreachable):
    """A connection that took too long to make."""
