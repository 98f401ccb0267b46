"""What the tests of running fleets stand on: small fleets, and looks at what they left."""

from __future__ import annotations

import msgspec

from skerry.fleet.events import FleetEvent
from skerry.fleet.model import FleetSpec, Phase
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec
from skerry.providers.mock import Mock


def phase(name: str, count: int = 1, *wait_for: str, spec: Spec | None = None, **options: object) -> Phase:
    made = Phase(name=name, count=count, wait_for=wait_for, spec=spec or Spec(provider="mock"))
    return msgspec.structs.replace(made, **options)


def fleet_of(*phases: Phase, name: str = "crew", **options: object) -> FleetSpec:
    return msgspec.structs.replace(FleetSpec(name=name, phases=phases), **options)


class Told(list[FleetEvent]):
    """All events of a start, in their order."""

    def __call__(self, event: FleetEvent) -> None:
        self.append(event)

    def kinds(self, phase: str) -> list[str]:
        return [type(event).__name__ for event in self if event.phase == phase]

    def at(self, kind: type[FleetEvent], phase: str) -> int:
        return next(n for n, event in enumerate(self) if isinstance(event, kind) and event.phase == phase)


async def names(manager: AsyncSandboxManager) -> list[str]:
    return sorted(record.name or "" for record in await manager.list())


async def nothing_left(manager: AsyncSandboxManager, mock: Mock) -> bool:
    return not await manager.list() and not mock.host.boxes


async def agree(manager: AsyncSandboxManager, mock: Mock) -> None:
    """The registry is what the host holds, and nothing in it is on trial."""
    records = await manager.list()
    assert {record.id for record in records} == set(mock.host.boxes)
    assert not [record.name for record in records if record.ephemeral or record.doomed]
