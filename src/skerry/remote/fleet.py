"""Fleets of a server: started, scaled and ended by operations of it, seen and commanded as any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from skerry.errors import NotFound
from skerry.fleet import events
from skerry.fleet.events import FleetEvent, Notifier, OnEvent, Report
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import FLEET_LABEL, FleetSpec
from skerry.fleet.plan import Plan
from skerry.fleet.status import MemberStatus, Roster
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter, Record
from skerry.remote.api import LONG_S, segment
from skerry.remote.operations import Operation, Step, follow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.remote.manager import AsyncRemoteManager

_Event = (
    events.PhaseStarted
    | events.MemberCreating
    | events.MemberReady
    | events.MemberFailed
    | events.MemberDestroyed
    | events.PhaseReady
    | events.PhaseFailed
)


class _Members(msgspec.Struct):
    members: dict[str, MemberStatus]


class _Planned(msgspec.Struct):
    plan: Plan


class _Gone(msgspec.Struct):
    destroyed: list[str]


class _Who(msgspec.Struct):
    tenant: str | None = None


class RemoteRoster(Roster):
    """The members in a server's registry. To a tenant all are of its own project, whatever the file says."""

    _is_tenant: bool | None = None

    async def records(self) -> Mapping[str, Record]:
        found = await self._manager.list(Filter(project=await self.project(), labels={FLEET_LABEL: self._fleet}))
        return self._by_name(found)

    async def project(self) -> str | None:
        """The project to name in a call; None for a tenant, who has one."""
        if self._is_tenant is None:
            api = self._manager.api  # type: ignore[attr-defined]
            self._is_tenant = (await api.get("/whoami", _Who)).tenant is not None
        return None if self._is_tenant else self._project


class AsyncRemoteFleet(AsyncFleet):
    """A fleet of a server."""

    _manager: AsyncRemoteManager

    def _bind(self, manager: AsyncSandboxManager, name: str, project: str | None, spec: FleetSpec | None) -> None:
        super()._bind(manager, name, project, spec)
        self._roster: RemoteRoster = RemoteRoster(manager, name, project)

    @property
    def _path(self) -> str:
        return f"/fleets/{segment(self.name)}"

    async def plan(self) -> Plan:
        asked = {"project": await self._roster.project()}
        found = self._manager.api.send("POST", f"{self._path}/plan", _Planned, self._body(), query=asked)
        return (await found).plan

    async def up(self, *, on_event: OnEvent | None = None) -> Report:
        return await self._report("PUT", self._path, self._body(), on_event)

    async def start_phase(self, phase: str, *, on_event: OnEvent | None = None) -> Report:
        path = f"{self._path}/phases/{segment(self._spec().phase(phase).name)}/start"
        return await self._report("POST", path, self._body(), on_event)

    async def scale(
        self, phases: Mapping[str, int] | None = None, /, *, on_event: OnEvent | None = None, **counts: int
    ) -> Report:
        counts = {**(phases or {}), **counts}
        spec = self._spec().scaled(counts)
        report = await self._report("POST", f"{self._path}/scale", {**self._body(), "counts": counts}, on_event)
        self.spec = spec
        return report

    async def status(self, *, timeout_s: float = 2.0) -> dict[str, MemberStatus]:
        asked = {"project": await self._roster.project(), "timeout_s": timeout_s}
        try:
            return (await self._manager.api.get(self._path, _Members, asked)).members
        except NotFound:
            return {}

    async def _end(
        self, phases: set[str] | None, volumes: bool, grace_s: float | None, on_event: OnEvent | None
    ) -> Sequence[str]:
        api, query = self._manager.api, {"project": await self._roster.project()}
        told = {"volumes": volumes, "grace_s": grace_s}
        try:
            if phases is None:
                begun = api.send("DELETE", self._path, Operation, query={**query, **told})
                return (await follow(api, begun, _Gone, self._steps(on_event))).destroyed
            gone: list[str] = []
            for phase in sorted(phases):
                path = f"{self._path}/phases/{segment(phase)}/stop"
                begun = api.send("POST", path, Operation, told, query=query)
                gone += (await follow(api, begun, _Gone, self._steps(on_event))).destroyed
            return gone
        except NotFound:
            return []

    async def _report(self, method: str, path: str, body: dict[str, Any], on_event: OnEvent | None) -> Report:
        """The report of a start, also of one that did not come to all that it should."""
        query = {"project": await self._roster.project()}
        begun = self._manager.api.send(method, path, Operation, body, query=query, timeout_s=LONG_S)
        return await follow(self._manager.api, begun, Report, self._steps(on_event))

    def _body(self) -> dict[str, Any]:
        return {"spec": msgspec.to_builtins(self._spec())}

    def _steps(self, on_event: OnEvent | None) -> Any:
        notifier = Notifier(self.name, on_event)

        def tell(step: Step) -> None:
            try:
                event: FleetEvent = msgspec.convert(step.data, _Event)
            except msgspec.ValidationError:  # one of a newer server
                return
            notifier.notify(event)

        return tell
