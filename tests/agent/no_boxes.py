"""A provider that makes no boxes: for tests that only want a stream to an agent."""

from __future__ import annotations

from collections.abc import Mapping

from skerry.model.spec import SandboxId, Spec
from skerry.providers.base import BoxStatus, Enforcement, Isolation, Provider


class NoBoxes(Provider):
    isolation = Isolation.NONE

    async def check(self) -> None:
        return None

    async def enforcement(self, spec: Spec) -> Mapping[str, Enforcement]:
        return {}

    async def create(self, id: SandboxId, spec: Spec) -> None:
        return None

    async def destroy(self, id: SandboxId, *, volumes: bool = False) -> None:
        return None

    async def discover(self) -> Mapping[SandboxId, BoxStatus]:
        return {}
