"""What `up` would do, decided without touching anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from skerry.fleet import graph
from skerry.fleet.model import (
    FLEET_LABEL,
    INDEX_LABEL,
    PENDING,
    PHASE_LABEL,
    SETUP_LABEL,
    VERSION_LABEL,
    FleetSpec,
    Phase,
)
from skerry.lifecycle import State
from skerry.records import Record
from skerry.spec import SandboxId


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A sandbox of the registry that is a fleet's."""

    id: SandboxId
    name: str
    phase: str
    index: int
    version: str
    state: State
    pending: bool = False
    """Its files, setup and health check were not done to their end."""
    doomed: bool = False
    """Somebody decided to destroy it, and that is not done yet."""


class Kind(StrEnum):
    CREATE = "create"
    REPLACE = "replace"
    START = "start"
    """It is stopped or paused, and otherwise as it should be."""
    KEEP = "keep"
    DESTROY = "destroy"


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one member, and why."""

    kind: Kind
    phase: str
    index: int
    name: str
    why: str = ""
    id: SandboxId | None = None
    """The sandbox that is there now."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All changes, in the order of the waves; what is only destroyed comes last."""

    changes: tuple[Change, ...]
    waves: tuple[tuple[str, ...], ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return all(change.kind is Kind.KEEP for change in self.changes)

    def of(self, phase: str) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.phase == phase)

    def counts(self) -> dict[Kind, int]:
        """How many changes there are of each kind."""
        return {kind: sum(change.kind is kind for change in self.changes) for kind in Kind}


def member_of(record: Record) -> Member | None:
    """The member that a record is; None if it is no fleet's, or is gone."""
    labels = record.spec.labels
    index = labels.get(INDEX_LABEL, "")
    if not record.is_live or FLEET_LABEL not in labels or PHASE_LABEL not in labels or not index.isdecimal():
        return None
    return Member(
        id=record.id,
        name=record.name or "",
        phase=labels[PHASE_LABEL],
        index=int(index),
        version=labels.get(VERSION_LABEL, ""),
        state=record.state,
        pending=labels.get(SETUP_LABEL) == PENDING,
        doomed=record.doomed,
    )


def order(fleet: FleetSpec) -> tuple[tuple[str, ...], ...]:
    """The waves of phases: those of one wait for nothing but waves before it."""
    return graph.waves(_waits(fleet))


def graph_lines(fleet: FleetSpec) -> list[str]:
    """A drawing of what waits for what, with the number of members of each phase."""
    return graph.draw(_waits(fleet), {phase.name: f"{phase.name} ({phase.count})" for phase in fleet.phases})


def diff(fleet: FleetSpec, members: Iterable[Member]) -> Plan:
    """What makes the members that there are into those that the fleet asks for, and touches nothing else."""
    there = {(member.phase, member.index): member for member in members}
    waves = order(fleet)
    wanted: list[Change] = []
    for name in (name for wave in waves for name in wave):
        phase = fleet.phase(name)
        version = phase.version()
        wanted += [_change(phase, index, version, there.pop((name, index), None)) for index in phase.indexes()]
    return Plan(changes=(*wanted, *_leftovers(fleet, there.values())), waves=waves)


def _waits(fleet: FleetSpec) -> dict[str, set[str]]:
    return {phase.name: set(phase.wait_for) for phase in fleet.phases}


def _change(phase: Phase, index: int, version: str, member: Member | None) -> Change:
    kind, why = (Kind.CREATE, "it is not there") if member is None else _verdict(member, version)
    name = phase.member_name(index)
    return Change(
        kind=kind, phase=phase.name, index=index, name=name, why=why, id=None if member is None else member.id
    )


def _verdict(member: Member, version: str) -> tuple[Kind, str]:
    if member.doomed:
        return Kind.REPLACE, "it is being destroyed"
    if member.version != version:
        return Kind.REPLACE, "its phase was changed"
    if member.state in (State.ERROR, State.LOST):
        return Kind.REPLACE, f"it is {member.state}"
    if member.pending or member.state is State.CREATING:
        return Kind.REPLACE, "its making came to no end"
    if member.state in (State.STOPPED, State.PAUSED):
        return Kind.START, f"it is {member.state}"
    return Kind.KEEP, ""


def _leftovers(fleet: FleetSpec, members: Iterable[Member]) -> Iterator[Change]:
    known = {phase.name for phase in fleet.phases}
    for member in sorted(members, key=lambda member: (member.phase, member.index)):
        why = "there are to be fewer" if member.phase in known else "there is no such phase any more"
        yield Change(kind=Kind.DESTROY, phase=member.phase, index=member.index, name=member.name, why=why, id=member.id)
