"""Members of a fleet as their peers reach them: by which names, and through the agent of whoever is ready, whatever its
provider. The registry is asked for every connection, so that a member which was replaced is found anew."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping

import msgspec

from skerry.agent.call import Call
from skerry.agent.client import AgentClient
from skerry.agent.tunnel import AsyncTunnel
from skerry.errors import AgentError, AgentUnreachable, NotFound, SkerryError
from skerry.gate.base import Policy
from skerry.gate.decide import is_member
from skerry.model.records import ASIDE, ASIDE_LABEL, FLEET_LABEL, PHASE_LABEL, Record, member_stem
from skerry.model.rules import Reach
from skerry.model.spec import SandboxId
from skerry.model.states import State
from skerry.providers.base import Provider
from skerry.sandbox import service
from skerry.store import Store

_ANSWER_S = 10.0
"""For one member to answer, its stream included; then the next is tried."""
_DIAL_S = 25.0
"""For all of it: an agent gives up a connection that nobody takes for 30 s."""
_UNUSED_S = 15.0
_MOST_STREAMS = 256
_MOST_LINKS = 512
"""Connections at once to one member. A peer that has as many as there is room for more may have no more, so that there
always is some room for one that has fewer."""
_WINDOW = 1 << 18
_log = logging.getLogger("skerry.gate")


class FleetMembers:
    """Connections between members of fleets, over one stream to the agent of each that is connected to."""

    def __init__(self, store: Store, provider_of: Callable[[str], Awaitable[Provider]]) -> None:
        self._store = store
        self._provider_of = provider_of
        self._records: Mapping[SandboxId, Record] = {}
        self._last_event = -1
        self._lines: dict[SandboxId, _Line] = {}
        self._turn = 0
        self._sweeper: asyncio.TimerHandle | None = None

    async def dial(self, policy: Policy, name: str, port: int) -> tuple[AsyncTunnel, SandboxId]:
        """Connect to a port of the member that a name stands for, and tell which it is; of several that are ready, to
        the one whose last connection is the oldest. Raises NotFound if the record of the sandbox does not let it,
        nobody is ready, or nothing listens, else AgentError."""
        now = asyncio.get_running_loop().time
        deadline = now() + _DIAL_S
        error: SkerryError = AgentUnreachable(f"{name}: nobody answers")
        for member in await self._choose(policy, name, port):
            if now() >= deadline:
                break
            try:
                async with asyncio.timeout_at(min(deadline, now() + _ANSWER_S)):
                    return await self._connect(policy.id, member, port), member.id
            except (NotFound, AgentError) as failure:
                error = failure
            except TimeoutError:
                error = AgentUnreachable(f"{_name_of(member)} does not answer")
            except (SkerryError, OSError) as failure:
                error = AgentUnreachable(f"{_name_of(member)} cannot be reached: {failure}")
                error.__cause__ = failure
            _log.debug("sandbox %s: port %d of %s: %s", policy.id, port, member.id, error)
        raise error

    def close(self) -> None:
        """End all connections."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweeper = None
        while self._lines:
            self._lines.popitem()[1].close()

    async def _choose(self, policy: Policy, name: str, port: int) -> list[Record]:
        """Members to try, in their turn. Raises NotFound with the reason if there is none."""
        records = await self._current()
        record = records.get(policy.id)
        if record is None or record.doomed:
            raise NotFound(f"sandbox {policy.id} has ended")
        if not is_member(msgspec.structs.replace(policy, reach=reach_of(record)), name, port):
            raise NotFound(f"its `reach` does not name {name}:{port}")
        wanted = [each for each in map(Reach.parse, record.spec.reach) if each.port == port]
        meant = [each for each in _peers_of(record, records.values()) if any(_is_meant(r, name, each) for r in wanted)]
        usable = [each for each in meant if each.state is State.READY and not each.doomed]
        if not usable:
            how = ", ".join(f"{_name_of(each)} is {'ending' if each.doomed else each.state}" for each in meant)
            raise NotFound(f"{name}: no member is ready{how and ': ' + how}")
        best = min(map(_rank, usable))
        lines = self._lines
        return sorted(
            (each for each in usable if _rank(each) == best),
            key=lambda each: lines[each.id].turn if each.id in lines else 0,
        )

    async def _current(self) -> Mapping[SandboxId, Record]:
        """All live records, read again if anything happened since."""
        last_event = await self._store.last_event()
        if last_event != self._last_event:
            self._records = {record.id: record for record in await self._store.list()}
            self._last_event = last_event
        return self._records

    async def _connect(self, peer: SandboxId, member: Record, port: int) -> AsyncTunnel:
        line = self._line(member.id)
        self._turn += 1
        line.turn = self._turn
        line.callers += 1
        try:
            async with line.dialling:
                if line.client is None or not line.client.is_open:
                    line.client = await self._greet(member)
                client = line.client
            line.calls = {call: whose for call, whose in line.calls.items() if not call.done}
            if [*line.calls.values()].count(peer) >= _MOST_LINKS - len(line.calls):
                raise AgentUnreachable(f"{_name_of(member)} has {len(line.calls)} connections already; try again")
            call = client.open("connect", {"port": port}, window=_WINDOW)
            line.calls[call] = peer
        finally:
            line.callers -= 1
        try:
            await client.call("ping", type=dict[str, object], timeout_s=_ANSWER_S)
            if call.done:  # the agent has refused it before it answered us
                await call.result(dict[str, object])
        except BaseException:
            call.abandon()
            raise
        return AsyncTunnel(call)

    async def _greet(self, member: Record) -> AgentClient:
        provider = await self._provider_of(member.spec.provider)
        stream = await provider.dial(member.id)
        client = await AgentClient.greet(stream, timeout_s=_ANSWER_S)
        try:
            if not member.is_being_set_up:  # an engine or a person may have started it again
                await service.begin(client, member.spec)
        except BaseException:
            client.close()
            raise
        return client

    def _line(self, id: SandboxId) -> _Line:
        line = self._lines.get(id)
        if line is None:
            if len(self._lines) >= _MOST_STREAMS:
                self._close_unused()
            if len(self._lines) >= _MOST_STREAMS:
                raise AgentUnreachable(f"{_MOST_STREAMS} members are connected to already; try again")
            line = self._lines[id] = _Line()
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_UNUSED_S, self._sweep)
        return line

    def _sweep(self) -> None:
        """Close what nobody uses: some providers pay for a stream with a process."""
        self._sweeper = None
        self._close_unused()
        if self._lines:
            self._sweeper = asyncio.get_running_loop().call_later(_UNUSED_S, self._sweep)

    def _close_unused(self) -> None:
        for id, line in list(self._lines.items()):
            if not line.is_used:
                line.close()
                del self._lines[id]


class _Line(msgspec.Struct):
    """The stream to the agent of a member, and the connections on it."""

    client: AgentClient | None = None
    calls: dict[Call, SandboxId] = {}
    """By whose they are."""
    callers: int = 0
    """Those that are about to have one."""
    turn: int = 0
    dialling: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)

    @property
    def is_used(self) -> bool:
        return self.callers > 0 or not all(call.done for call in self.calls)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


def reach_of(record: Record) -> dict[str, frozenset[int]]:
    """Ports that a member may reach in its fleet, by all names that they have, whoever is there now. Empty outside of
    a fleet."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for reach in map(Reach.parse, record.spec.reach if FLEET_LABEL in record.spec.labels else ()):
        found[reach.name].add(reach.port)
        if not reach.is_alias:
            found[f"{member_stem(reach.member)}*"].add(reach.port)
    return {name: frozenset(ports) for name, ports in found.items()}


def _peers_of(record: Record, records: Iterable[Record]) -> list[Record]:
    """All live members of its fleet, which is of one project, itself too."""
    fleet, project = record.spec.labels.get(FLEET_LABEL), record.spec.project
    return [
        each
        for each in records
        if fleet is not None
        and each.is_live
        and each.spec.project == project
        and each.spec.labels.get(FLEET_LABEL) == fleet
        and PHASE_LABEL in each.spec.labels
    ]


def _is_meant(reach: Reach, name: str, member: Record) -> bool:
    """Whether a name stands for that member, among others, by what may be reached."""
    own = _name_of(member)
    if reach.member not in (own, member.spec.labels[PHASE_LABEL]):
        return False
    return name == reach.name or (name == own and not reach.is_alias)


def _name_of(member: Record) -> str:
    """Its name; one that is to be replaced goes by it until its successor is ready."""
    name = member.member_name or ""
    return name.removesuffix(ASIDE) if ASIDE_LABEL in member.spec.labels else name


def _rank(member: Record) -> int:
    """Those come first that are whole, then those that are to be replaced, then those whose phase is not decided."""
    return 2 if member.ephemeral else 1 if ASIDE_LABEL in member.spec.labels else 0
