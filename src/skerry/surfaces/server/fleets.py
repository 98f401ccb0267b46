"""Fleets of a server: one object for each that was used, and the shapes of all, which outlive it.

The registry has their members; what a fleet's file says else, such as the values of variables, is kept nowhere. So
after a restart a fleet can be seen, commanded and ended, and to change it takes its file again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec

from skerry.errors import Conflict, NotFound
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FleetSpec, OnFailure
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import FLEET_LABEL, Record
from skerry.store import Store

KIND = "fleet"
_MOST_OPEN = 1000


class PhaseShape(msgspec.Struct, frozen=True, kw_only=True):
    """A phase, as much of it as is shown."""

    name: str
    count: int
    wait_for: tuple[str, ...] = ()
    on_failure: OnFailure = OnFailure.FAIL_FAST


class FleetShape(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for what in a fleet."""

    name: str
    project: str
    phases: tuple[PhaseShape, ...]

    @classmethod
    def of(cls, spec: FleetSpec) -> FleetShape:
        phases = tuple(
            PhaseShape(name=each.name, count=each.count, wait_for=each.wait_for, on_failure=each.on_failure)
            for each in spec.phases
        )
        return cls(name=spec.name, project=spec.project, phases=phases)


class Fleets:
    """Fleets that were used through this server. `manager` is that of whoever asks."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, str, str], tuple[AsyncSandboxManager, AsyncFleet]] = {}

    async def get(
        self, manager: AsyncSandboxManager, project: str, name: str, spec: FleetSpec | None = None
    ) -> AsyncFleet:
        """The one object of a fleet, so that an end of it stops its start; with `spec` it is to be that from now on."""
        key = id(manager), project, name
        known = self._open.get(key)
        if known is None:
            if len(self._open) >= _MOST_OPEN:
                del self._open[next(iter(self._open))]
            known = self._open[key] = manager, await AsyncFleet.open(manager, name, project)
        if spec is not None:
            known[1].spec = spec
        return known[1]

    async def find(self, manager: AsyncSandboxManager, project: str, name: str) -> AsyncFleet:
        """A fleet that there is. Raises NotFound."""
        fleet = await self.get(manager, project, name)
        if not await fleet.records() and await self.shape(manager.store, project, name) is None:
            self._open.pop((id(manager), project, name), None)
            raise NotFound(f"there is no fleet {name!r}")
        return fleet

    async def project_of(self, manager: AsyncSandboxManager, name: str, own: str | None, given: str | None) -> str:
        """The project of a fleet: that of whoever asks, or the one that is given, or the only one that has a fleet of
        that name. Raises NotFound, and Conflict if several have one."""
        if own is not None:
            if given not in (None, own):
                raise NotFound(f"there is no fleet {name!r}")
            return own
        if given is not None:
            return given
        known = {each.project for each in await self.shapes(manager.store) if each.name == name}
        known |= {project for project, each in by_fleet(await manager.list()) if each == name}
        if len(known) > 1:
            raise Conflict(f"there are fleets named {name!r} in {', '.join(sorted(known))}: say in which project")
        if not known:
            raise NotFound(f"there is no fleet {name!r}")
        return known.pop()

    async def refuse_taken(self, manager: AsyncSandboxManager, spec: FleetSpec) -> None:
        """Raise Conflict if others of the project have the names of sandboxes that it is to have."""
        wanted = {phase.sandbox_name(spec.name, index) for phase in spec.phases for index in phase.indexes()}
        for record in await manager.list():
            other = record.spec.labels.get(FLEET_LABEL)
            if record.name in wanted and record.spec.project == spec.project and other != spec.name:
                whose = f"fleet {other!r}" if other else "a sandbox"
                raise Conflict(f"{record.name} is the name of {whose} already: call the phase something else")

    async def shape(self, store: Store, project: str, name: str) -> FleetShape | None:
        try:
            return (await store.documents(KIND, FleetShape).get(_id(project, name))).body
        except NotFound:
            return None

    async def shapes(self, store: Store) -> Sequence[FleetShape]:
        """The shapes of all fleets that were started and not ended, by project and name."""
        return [each.body for each in await store.documents(KIND, FleetShape).list(limit=10_000)]

    async def keep(self, store: Store, spec: FleetSpec) -> None:
        """Note the shape of a fleet that is about to be started."""
        documents, shape = store.documents(KIND, FleetShape), FleetShape.of(spec)
        try:
            await documents.replace(_id(spec.project, spec.name), shape)
        except NotFound:
            with suppress(Conflict):  # another was quicker
                await documents.add(_id(spec.project, spec.name), shape, project=spec.project)

    async def forget(self, manager: AsyncSandboxManager, project: str, name: str) -> None:
        """Forget a fleet that has ended."""
        self._open.pop((id(manager), project, name), None)
        with suppress(NotFound):
            await manager.store.documents(KIND, FleetShape).remove(_id(project, name))


async def forget_shapes(store: Store, project: str) -> None:
    """Forget the fleets of a project, which is a tenant's no more."""
    documents = store.documents(KIND, FleetShape)
    for each in await documents.list(limit=10_000):
        if each.project == project:
            with suppress(NotFound):
                await documents.remove(each.id)


def by_fleet(records: Sequence[Record]) -> Mapping[tuple[str, str], list[Record]]:
    """The members of each fleet, by its project and name."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if (name := record.spec.labels.get(FLEET_LABEL)) is not None:
            found.setdefault((record.spec.project, name), []).append(record)
    return found


def _id(project: str, name: str) -> str:
    return f"{project}/{name}"
