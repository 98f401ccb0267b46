"""How each member is: what the registry knows, and what its agent says if it answers in time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

import msgspec

from skerry import lifecycle
from skerry.agent.call import Call
from skerry.errors import SkerryError
from skerry.fleet.model import INDEX_LABEL, PHASE_LABEL
from skerry.fleet.roster import handle_of
from skerry.lifecycle import State
from skerry.managed import ManagedSandbox
from skerry.manager import AsyncSandboxManager
from skerry.records import Record
from skerry.results import Metrics
from skerry.spec import Network, SandboxId

UNREACHABLE = "agent unreachable"
_LOCAL_ADDRESS = re.compile(rb"\|-- ([0-9.]+)\n\s+/32 host LOCAL")


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
    agent: AgentStatus | None = None
    error: str = ""
    """Why there is no agent, if there should be one or the member is not ready."""


class Looker:
    """Asks all agents at once, over streams that stay open, with one deadline for all."""

    def __init__(self, manager: AsyncSandboxManager) -> None:
        self._manager = manager
        self._addresses: dict[SandboxId, str] = {}

    async def look(self, records: Iterable[Record], timeout_s: float) -> dict[str, MemberStatus]:
        found = list(records)
        asked: dict[SandboxId, Call] = {}
        slow: list[asyncio.Task[None]] = []
        answers: dict[SandboxId, AgentStatus] = {}
        waiting: list[tuple[SandboxId, Call]] = []
        try:
            async with asyncio.timeout(timeout_s):
                for record in filter(_is_usable, found):
                    handle = handle_of(self._manager, record)
                    client = handle._client
                    if client is not None and client.is_open and not self._lacks_address(handle):
                        asked[record.id] = client.open("metrics")
                    else:
                        slow.append(asyncio.create_task(self._ask(handle, answers)))
                waiting = list(reversed(asked.items()))
                while waiting:
                    await self._take(*waiting.pop(), answers)
                if slow:
                    await asyncio.wait(slow)
        except TimeoutError:
            for id, call in waiting:  # behind one that is late others may have answered
                if call.done:
                    await self._take(id, call, answers)
        finally:
            for call in asked.values():
                call.abandon()
            for task in slow:
                task.cancel()
            if slow:
                await asyncio.wait(slow)
        return {status.name: status for status in (self._status(record, answers.get(record.id)) for record in found)}

    async def _take(self, id: SandboxId, call: Call, answers: dict[SandboxId, AgentStatus]) -> None:
        with suppress(SkerryError):
            answers[id] = _agent_status(await call.result(Metrics))

    async def _ask(self, sandbox: ManagedSandbox, answers: dict[SandboxId, AgentStatus]) -> None:
        """One whose stream is to be opened first, or whose address is not known yet."""
        with suppress(SkerryError, OSError):
            answers[sandbox.id] = _agent_status(await sandbox.metrics())
            if self._lacks_address(sandbox):
                self._addresses[sandbox.id] = await _address(sandbox)

    def _lacks_address(self, sandbox: ManagedSandbox) -> bool:
        return sandbox.spec.network is Network.BRIDGE and not self._addresses.get(sandbox.id)

    def _status(self, record: Record, agent: AgentStatus | None) -> MemberStatus:
        error = ""
        if record.doomed:
            error = "it is being destroyed"
        elif not _is_usable(record):
            error = record.detail or lifecycle.unusable(record.state)
        elif agent is None:
            error = UNREACHABLE
            self._addresses.pop(record.id, None)  # it may come back with another
        return MemberStatus(
            name=record.name or "",
            id=record.id,
            phase=record.spec.labels[PHASE_LABEL],
            index=int(record.spec.labels[INDEX_LABEL]),
            state=_state(record),
            ip=self._addresses.get(record.id, ""),
            created_at=record.created_at,
            agent=agent,
            error=error,
        )


def is_ready(record: Record) -> bool:
    """Whether it is a member to work with: set up, and its phase is decided."""
    return _state(record) is State.READY and not record.doomed


def _is_usable(record: Record) -> bool:
    """Whether an agent should answer, also before the setup is done."""
    return record.state is State.READY and not record.doomed


def _state(record: Record) -> State:
    return State.CREATING if record.ephemeral and record.state is State.READY else record.state


def _agent_status(metrics: Metrics) -> AgentStatus:
    return AgentStatus(
        uptime_s=metrics.uptime_s, cpu_percent=metrics.cpu_percent, memory_mb=round(metrics.memory_mb, 1)
    )


async def _address(sandbox: ManagedSandbox) -> str:
    """What the box's own kernel calls its address; the provider need not be asked."""
    try:
        table = await sandbox.files.read("/proc/net/fib_trie")
    except SkerryError:
        return ""
    found = [address.decode() for address in _LOCAL_ADDRESS.findall(table)]
    return next((address for address in found if not address.startswith("127.")), "")


def by_phase(records: Mapping[str, Record], phase: str) -> list[Record]:
    return [record for record in records.values() if record.spec.labels.get(PHASE_LABEL) == phase]
