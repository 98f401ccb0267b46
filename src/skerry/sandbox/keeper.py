"""What a handle needs of the manager that keeps its sandbox in the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from skerry.agent.client import AgentClient
from skerry.ledger.ledger import Ledger
from skerry.model.records import Record
from skerry.model.spec import SandboxId, Spec
from skerry.providers.base import Provider
from skerry.sandbox.connection import Connection
from skerry.sandbox.network import Decide


class Keeper(Protocol):
    """The side of a manager that handles use: it keeps the registry."""

    def provider(self, name: str) -> Provider: ...

    @property
    def ledger(self) -> Ledger: ...

    async def make(self, id: SandboxId, spec: Spec, *, ephemeral: bool = False) -> Record: ...

    async def live_record(self, reference: str) -> Record: ...

    async def look(self, id: SandboxId) -> Record: ...

    async def wake(self, id: SandboxId) -> Record: ...

    async def destroy(
        self,
        reference: str,
        *,
        volumes: bool = False,
        grace_s: float | None = None,
        connection: Connection | None = None,
    ) -> None: ...

    async def note_lifetime(self, id: SandboxId, lifetime: float | str | None, idle: float | str | None) -> Record: ...

    async def change_rules(self, id: SandboxId, decide: Decide) -> Record: ...

    async def provide(self, id: SandboxId, values: Mapping[str, str]) -> None: ...

    async def note_env(self, id: SandboxId, env: Mapping[str, str]) -> None: ...

    async def known_env(self, id: SandboxId, client: AgentClient, own: Mapping[str, str]) -> dict[str, str]: ...


class Lender(Protocol):
    """Gives a manager to a handle that a program made by itself, for as long as the handle needs one."""

    async def take(self) -> Keeper: ...

    async def give_back(self, *, has_ended: bool = False) -> None:
        """Have no more use of it; for good, if the sandbox `has_ended`."""
