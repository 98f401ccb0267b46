"""The members of a fleet: what the registry knows of each, and what its agent says if it answers in time."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec

from skerry.agent.call import Call
from skerry.errors import Conflict, SkerryError
from skerry.fleet.model import FLEET_LABEL, INDEX_LABEL, PHASE_LABEL
from skerry.fleet.plan import Member, member_of
from skerry.manager.manager import AsyncSandboxManager
from skerry.model import states
from skerry.model.records import Filter, Record
from skerry.model.results import Metrics
from skerry.model.spec import Network, SandboxId
from skerry.model.states import State
from skerry.sandbox.files import AsyncFiles
from skerry.sandbox.sandbox import AsyncSandbox

_log = logging.getLogger("skerry.fleet")
UNREACHABLE = "agent unreachable"
_LOCAL_ADDRESS = re.compile(rb"\|-- ([0-9.]{7,15})\n\s+/32 host LOCAL")


class Roster(msgspec.Struct):
    """The members in the registry, read at once, and not again while nothing happened in it."""

    _manager: AsyncSandboxManager
    _fleet: str
    _project: str | None
    _last_event: int = -1
    _known: dict[str, Record] = {}

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


class AgentStatus(msgspec.Struct, frozen=True, kw_only=True):
    uptime_s: float
    cpu_percent: float
    """Since the agent was last asked, by anybody; 100 is one whole processor."""
    memory_mb: float


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    id: SandboxId
    phase: str
    index: int
    state: State
    """`creating` until it is set up and its phase is decided."""
    ip: str
    """Its address on the provider's bridge; empty if it has none, or none yet."""
    created_at: float
    addresses: dict[int, str] = {}
    """Addresses on this host of its ports."""
    reach: tuple[str, ...] = ()
    """Other members that it may reach, each with a port."""
    agent: AgentStatus | None = None
    error: str = ""
    """Why there is no agent, if there should be one or the member is not ready."""


class StatusReader(msgspec.Struct):
    """Status of many members: all agents are asked at once, over streams that stay open, with one deadline."""

    _manager: AsyncSandboxManager
    _addresses: dict[SandboxId, str] = {}

    async def read(self, records: Iterable[Record], timeout_s: float) -> dict[str, MemberStatus]:
        found = list(records)
        asked: dict[SandboxId, Call] = {}
        slow: list[asyncio.Task[None]] = []
        answers: dict[SandboxId, AgentStatus] = {}
        waiting: list[tuple[SandboxId, Call]] = []
        try:
            async with asyncio.timeout(timeout_s):
                for record in filter(_is_usable, found):
                    handle = self._manager.handles.of(record)
                    client = handle.connection.client
                    if client is not None and not self._lacks_address(handle):
                        asked[record.id] = client.open("metrics")
                    else:
                        slow.append(asyncio.create_task(self._ask(handle, answers)))
                waiting = list(reversed(asked.items()))
                while waiting:
                    await _take(*waiting.pop(), answers)
                if slow:
                    await asyncio.wait(slow)
        except TimeoutError:
            for id, call in waiting:  # behind one that is late others may have answered
                if call.done:
                    await _take(id, call, answers)
        finally:
            for call in asked.values():
                call.abandon()
            for task in slow:
                task.cancel()
            if slow:
                await asyncio.wait(slow)
        return {status.name: status for status in (self._status(record, answers.get(record.id)) for record in found)}

    async def _ask(self, sandbox: AsyncSandbox, answers: dict[SandboxId, AgentStatus]) -> None:
        """Ask one whose stream is to be opened first, or whose address is not known yet."""
        try:
            answers[sandbox.id] = _agent_status(await sandbox.metrics())
            if self._lacks_address(sandbox):
                self._addresses[sandbox.id] = await _address(sandbox)
        except (SkerryError, OSError) as error:
            _log.debug("sandbox %s does not tell its status: %s", sandbox.id, error)

    def _lacks_address(self, sandbox: AsyncSandbox) -> bool:
        without = (Network.NONE, Network.HOST, Network.RULES)
        return sandbox.spec.network not in without and not self._addresses.get(sandbox.id)

    def _status(self, record: Record, agent: AgentStatus | None) -> MemberStatus:
        error = ""
        if record.doomed:
            error = "it is being destroyed"
        elif not _is_usable(record):
            error = record.detail or states.unusable(record.state)
        elif agent is None:
            error = UNREACHABLE
            self._addresses.pop(record.id, None)  # it may come back with another
        return MemberStatus(
            name=record.member_name or "",
            id=record.id,
            phase=record.spec.labels[PHASE_LABEL],
            index=int(record.spec.labels[INDEX_LABEL]),
            state=_state(record),
            ip=self._addresses.get(record.id, ""),
            created_at=record.created_at,
            addresses={port.port: port.address for port in record.spec.ports if port.address is not None},
            reach=record.spec.reach,
            agent=agent,
            error=error,
        )


def is_ready(record: Record) -> bool:
    """Whether it can be worked with: it is set up, and its phase is decided."""
    return _state(record) is State.READY and not record.doomed


def _is_usable(record: Record) -> bool:
    """Whether an agent should answer, also before the setup is done."""
    return record.state is State.READY and not record.doomed


def _state(record: Record) -> State:
    return State.CREATING if record.ephemeral and record.state is State.READY else record.state


async def _take(id: SandboxId, call: Call, answers: dict[SandboxId, AgentStatus]) -> None:
    try:
        answers[id] = _agent_status(await call.result(Metrics))
    except SkerryError as error:
        _log.debug("sandbox %s does not tell its status: %s", id, error)


def _agent_status(metrics: Metrics) -> AgentStatus:
    return AgentStatus(
        uptime_s=metrics.uptime_s, cpu_percent=metrics.cpu_percent, memory_mb=round(metrics.memory_mb, 1)
    )


async def _address(sandbox: AsyncSandbox) -> str:
    """Address by the box's own kernel; the provider need not be asked."""
    with suppress(SkerryError):
        files = AsyncFiles(sandbox.connection.connect)  # what only we look at is no line of the ledger
        table = await files.read("/proc/net/fib_trie", max_bytes=1 << 20)
        found = [address.decode() for address in _LOCAL_ADDRESS.findall(table)]
        return next((address for address in found if not address.startswith("127.")), "")
    return ""


def by_phase(records: Mapping[str, Record], phase: str) -> list[Record]:
    return [record for record in records.values() if record.spec.labels.get(PHASE_LABEL) == phase]
