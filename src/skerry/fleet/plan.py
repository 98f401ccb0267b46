"""The plan of `up`: the changes of each member and the waves of phases, decided without touching anything."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from skerry.fleet import model
from skerry.fleet.model import FleetSpec, Waits
from skerry.model.records import Record
from skerry.model.spec import SandboxId
from skerry.model.states import State


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
    is_aside: bool = False
    """Its successor is in the making, or was."""
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
    """Change of one member, and the reason."""

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
    index = labels.get(model.INDEX_LABEL, "")
    is_member = record.is_live and {model.FLEET_LABEL, model.PHASE_LABEL} <= labels.keys() and index.isdecimal()
    if not is_member:
        return None
    return Member(
        id=record.id,
        name=record.member_name or "",
        phase=labels[model.PHASE_LABEL],
        index=int(index),
        version=labels.get(model.VERSION_LABEL, ""),
        state=record.state,
        pending=labels.get(model.SETUP_LABEL) == model.PENDING,
        is_aside=model.ASIDE_LABEL in labels,
        doomed=record.doomed,
    )


def order(fleet: FleetSpec) -> tuple[tuple[str, ...], ...]:
    """The waves of phases: those of one wait for nothing but waves before it."""
    return waves(_waits(fleet))


def ends(fleet: FleetSpec | None, began: Mapping[str, float]) -> tuple[tuple[str, ...], ...]:
    """The phases of `began`, which tells when each had its first member, as they end: the reverse of their start. What
    the file does not have goes first. Without a file the one that began last does."""
    if fleet is None:
        return tuple((name,) for name in sorted(began, key=began.__getitem__, reverse=True))
    waves = order(fleet)
    gone = tuple(sorted(began.keys() - {name for wave in waves for name in wave}))
    there = (tuple(name for name in wave if name in began) for wave in reversed(waves))
    return tuple(wave for wave in (gone, *there) if wave)


def diff(fleet: FleetSpec, members: Iterable[Member]) -> Plan:
    """Plan the changes that turn the existing members into those of the fleet; all others stay untouched."""
    there = {(member.phase, member.index): member for member in members if not member.is_aside}
    waves = order(fleet)
    changes: list[Change] = []
    for phase in (fleet.phase(name) for wave in waves for name in wave):
        for index in phase.indexes():
            member = there.pop((phase.name, index), None)
            kind, why = (Kind.CREATE, "it is not there") if member is None else _verdict(member, phase.version())
            id, name = None if member is None else member.id, phase.member_name(index)
            changes.append(Change(kind=kind, phase=phase.name, index=index, name=name, why=why, id=id))
    known = {phase.name for phase in fleet.phases}
    for (phase_name, index), member in sorted(there.items()):
        why = "there are to be fewer" if phase_name in known else "there is no such phase any more"
        gone = Change(kind=Kind.DESTROY, phase=phase_name, index=index, name=member.name, why=why, id=member.id)
        changes.append(gone)
    return Plan(changes=tuple(changes), waves=waves)


def _waits(fleet: FleetSpec) -> dict[str, set[str]]:
    return {phase.name: set(phase.wait_for) for phase in fleet.phases}


def _verdict(member: Member, version: str) -> tuple[Kind, str]:
    if member.doomed:
        return Kind.REPLACE, "it is being destroyed"
    if member.version != version:
        return Kind.REPLACE, "its phase was changed"
    if member.state is State.LOST:
        return Kind.REPLACE, f"it is {member.state}"
    if member.pending or member.state is State.CREATING:
        return Kind.REPLACE, "its making came to no end"
    if member.state in (State.STOPPED, State.PAUSED, State.ASLEEP):
        return Kind.START, f"it is {member.state}"
    return Kind.KEEP, ""


def waves(waits: Waits) -> tuple[tuple[str, ...], ...]:
    """Phases that can start together, after all of the waves before; each wave in the order of the mapping."""
    sorter = graphlib.TopologicalSorter(waits)
    sorter.prepare()
    place = {name: at for at, name in enumerate(waits)}
    found = []
    while sorter.is_active():
        wave = sorter.get_ready()
        found.append(tuple(sorted(wave, key=place.__getitem__)))
        sorter.done(*wave)
    return tuple(found)


def graph_lines(fleet: FleetSpec) -> list[str]:
    """A tree in which each phase hangs below the last that it waits for; the others are written to it."""
    waits = _waits(fleet)
    order = {name: at for at, name in enumerate(name for wave in waves(waits) for name in wave)}
    parents = {name: max(others, key=order.__getitem__, default=None) for name, others in waits.items()}
    below: dict[str | None, list[str]] = {}
    for name in order:
        below.setdefault(parents[name], []).append(name)
    lines = []
    left = [(root, "", "") for root in reversed(below.get(None, []))]
    while left:
        name, branch, indent = left.pop()
        others = sorted(waits[name] - {parents[name]}, key=order.__getitem__)
        after = f", also after {' and '.join(others)}" if others else ""
        lines.append(f"{branch}{name} ({fleet.phase(name).count}){after}")
        children = below.get(name, [])
        for child in reversed(children):
            is_last = child == children[-1]
            left.append((child, f"{indent}{'└─' if is_last else '├─'} ", indent + ("   " if is_last else "│  ")))
    return lines
