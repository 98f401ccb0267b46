"""The members of a fleet, as the registry has them."""

from __future__ import annotations

from collections.abc import Mapping

from skerry.errors import Conflict
from skerry.fleet.model import FLEET_LABEL
from skerry.fleet.plan import Member, member_of
from skerry.managed import ManagedSandbox
from skerry.manager import AsyncSandboxManager
from skerry.records import Filter, Record


class Roster:
    """Asks the registry for all members at once, and not at all while nothing happened in it."""

    def __init__(self, manager: AsyncSandboxManager, fleet: str, project: str | None) -> None:
        self._manager = manager
        self._fleet = fleet
        self._project = project
        self._last_event = -1
        self._known: dict[str, Record] = {}

    async def records(self) -> Mapping[str, Record]:
        """The live ones by name, in the order of their phases' names and indexes."""
        store = self._manager.store
        last_event = await store.last_event()
        if last_event != self._last_event:
            found = await store.list(Filter(project=self._project, labels={FLEET_LABEL: self._fleet}))
            self._known = self._by_name(found)
            self._last_event = last_event
        return self._known

    async def members(self) -> list[Member]:
        return [member for record in (await self.records()).values() if (member := member_of(record)) is not None]

    def _by_name(self, records: list[Record]) -> dict[str, Record]:
        projects = sorted({record.spec.project for record in records})
        if len(projects) > 1:
            raise Conflict(f"there are fleets named {self._fleet!r} in {', '.join(projects)}: say in which project")
        members = [(member, record) for record in records if (member := member_of(record)) is not None]
        members.sort(key=lambda each: (each[0].phase, each[0].index))
        return {member.name: record for member, record in members}


def handle_of(manager: AsyncSandboxManager, record: Record) -> ManagedSandbox:
    """The member to speak with, over the stream that is open if there is one."""
    handle = manager._handles.get(record.id)
    if handle is None:
        return manager._handle(record)
    handle._state = record.state
    return handle
