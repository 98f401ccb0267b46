from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import InvalidFleet
from skerry.fleet.model import SETUP_LABEL, FleetSpec, Phase, cycles
from skerry.fleet.plan import Change, Kind, Member, diff, graph_lines, member_of, order, waves
from skerry.model.records import Owner, Record
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import State


@st.composite
def fleets(draw: st.DrawFn) -> FleetSpec:
    """Up to 50 phases, each of which may wait for any that stand before it in a random order."""
    names = [f"p{number}" for number in draw(st.permutations(range(draw(st.integers(1, 50)))))]
    phases = []
    for at, name in enumerate(names):
        waits = draw(st.lists(st.sampled_from(names[:at]), max_size=4, unique=True)) if at else []
        spec = Spec.of(env={"V": draw(st.sampled_from("abc"))})
        phases.append(Phase(name=name, count=draw(st.integers(0, 4)), wait_for=tuple(waits), spec=spec))
    return FleetSpec(name="demo", phases=tuple(draw(st.permutations(phases))))


graphs = st.integers(1, 50).flatmap(
    lambda size: st.dictionaries(
        st.integers(0, size - 1).map(str),
        st.sets(st.integers(0, size - 1).map(str), max_size=4),
        min_size=1,
        max_size=size,
    ).map(lambda waits: {name: {each for each in others if each in waits} for name, others in waits.items()})
)


def applied(fleet: FleetSpec, members: Sequence[Member] = ()) -> list[Member]:
    """The members that there are once a plan was carried out."""
    plan = diff(fleet, members)
    there = {member.id: member for member in members}
    for change in plan.changes:
        if change.kind is not Kind.KEEP and change.id is not None:
            there.pop(change.id)
        if change.kind in (Kind.CREATE, Kind.REPLACE, Kind.START):
            made = member(fleet.phase(change.phase), change.index)
            there[made.id] = made
    return list(there.values())


def member(phase: Phase, index: int, state: State = State.READY) -> Member:
    return Member(
        id=SandboxId(new_id()),
        name=phase.member_name(index),
        phase=phase.name,
        index=index,
        version=phase.version(),
        state=state,
    )


def touched(changes: Sequence[Change]) -> dict[Kind, set[str]]:
    found: dict[Kind, set[str]] = {}
    for change in changes:
        if change.kind is not Kind.KEEP:
            found.setdefault(change.kind, set()).add(change.name)
    return found


@given(fleets())
def test_every_phase_comes_once_and_after_all_that_it_waits_for(fleet: FleetSpec) -> None:
    found = order(fleet)
    wave_of = {name: at for at, wave in enumerate(found) for name in wave}
    assert sorted(name for wave in found for name in wave) == sorted(phase.name for phase in fleet.phases)
    for phase in fleet.phases:
        assert wave_of[phase.name] == max((wave_of[name] + 1 for name in phase.wait_for), default=0)


@given(graphs)
def test_circles_are_always_found_and_shown(waits: dict[str, set[str]]) -> None:
    found = list(cycles(waits))
    cut = {name: set(others) for name, others in waits.items()}
    for circle in found:
        assert circle[0] == circle[-1]
        assert all(later in waits[name] for name, later in pairwise(circle))
        cut[circle[0]].discard(circle[1])
    waves(cut)  # raises if a circle is left
    others = {name: tuple(sorted(each - {name})) for name, each in waits.items()}
    phases = tuple(Phase(name=name, wait_for=waiting) for name, waiting in others.items())
    if any(len(circle) > 2 for circle in found):
        with pytest.raises(InvalidFleet, match=r"in a circle.*: \d+ -> \d+"):
            FleetSpec(name="demo", phases=phases)
    else:
        FleetSpec(name="demo", phases=phases)


@given(fleets())
def test_what_was_applied_is_all_kept(fleet: FleetSpec) -> None:
    first = diff(fleet, [])
    assert {change.kind for change in first.changes} <= {Kind.CREATE}
    assert len(first.changes) == sum(phase.count for phase in fleet.phases)
    again = diff(fleet, applied(fleet))
    assert again.is_empty
    assert len(again.changes) == len(first.changes)


@given(fleets(), st.data())
def test_scaling_touches_only_the_difference(fleet: FleetSpec, data: st.DataObject) -> None:
    phase = data.draw(st.sampled_from(fleet.phases))
    count = data.draw(st.integers(0, 8))
    members = applied(fleet)
    plan = diff(fleet.scaled({phase.name: count}), members)
    more = {phase.member_name(index) for index in range(phase.count + 1, count + 1)}
    fewer = {phase.member_name(index) for index in range(count + 1, phase.count + 1)}
    expected = {Kind.CREATE: more, Kind.DESTROY: fewer}
    assert touched(plan.changes) == {kind: names for kind, names in expected.items() if names}


@given(fleets(), st.data())
def test_a_change_of_a_phase_replaces_its_members_and_no_others(fleet: FleetSpec, data: st.DataObject) -> None:
    phase = data.draw(st.sampled_from(fleet.phases))
    other = msgspec.structs.replace(phase, spec=phase.spec.but(env={"V": "other"}))
    changed = FleetSpec(name="demo", phases=tuple(other if each is phase else each for each in fleet.phases))
    plan = diff(changed, applied(fleet))
    assert touched(plan.changes) == ({Kind.REPLACE: set(phase.members())} if phase.count else {})
    assert diff(changed, applied(changed, applied(fleet))).is_empty


@given(fleets(), fleets())
def test_any_fleet_becomes_any_other_in_one_step(before: FleetSpec, after: FleetSpec) -> None:
    members = applied(after, applied(before))
    assert sorted(member.name for member in members) == sorted(
        name for phase in after.phases for name in phase.members()
    )
    assert diff(after, members).is_empty


@given(fleets())
def test_the_drawing_has_each_phase_once(fleet: FleetSpec) -> None:
    drawn = [line.lstrip(" │├└─").partition(" (")[0] for line in graph_lines(fleet)]
    assert sorted(drawn) == sorted(phase.name for phase in fleet.phases)


def test_the_drawing_is_a_tree_of_what_waits_for_what() -> None:
    phases = (
        Phase(name="db", count=2),
        Phase(name="cache"),
        Phase(name="api", count=3, wait_for=("db", "cache")),
        Phase(name="web", wait_for=("api",)),
        Phase(name="jobs", wait_for=("api",), count=0),
    )
    assert graph_lines(FleetSpec(name="demo", phases=phases)) == [
        "db (2)",
        "cache (1)",
        "└─ api (3), also after db",
        "   ├─ web (1)",
        "   └─ jobs (0)",
    ]


@pytest.mark.parametrize(
    ("state", "kind", "why"),
    [
        (State.READY, Kind.KEEP, ""),
        (State.STOPPED, Kind.START, "it is stopped"),
        (State.PAUSED, Kind.START, "it is paused"),
        (State.LOST, Kind.REPLACE, "it is lost"),
        (State.CREATING, Kind.REPLACE, "its making came to no end"),
    ],
)
def test_the_state_of_a_member_decides_what_becomes_of_it(state: State, kind: Kind, why: str) -> None:
    fleet = FleetSpec(name="demo", phases=(Phase(name="a"),))
    there = member(fleet.phases[0], 1, state)
    assert diff(fleet, [there]).changes == (
        Change(kind=kind, phase="a", index=1, name="agent-a-001", why=why, id=there.id),
    )


@pytest.mark.parametrize("field", ["pending", "doomed"])
def test_a_member_that_is_not_whole_is_replaced(field: str) -> None:
    fleet = FleetSpec(name="demo", phases=(Phase(name="a"),))
    there = msgspec.structs.replace(member(fleet.phases[0], 1), **{field: True})
    assert diff(fleet, [there]).counts()[Kind.REPLACE] == 1


def test_the_members_of_a_phase_that_is_gone_are_destroyed() -> None:
    before = FleetSpec(name="demo", phases=(Phase(name="a"), Phase(name="b", count=2)))
    plan = diff(FleetSpec(name="demo", phases=(Phase(name="a"),)), applied(before))
    assert touched(plan.changes) == {Kind.DESTROY: {"agent-b-001", "agent-b-002"}}
    assert {change.why for change in plan.of("b")} == {"there is no such phase any more"}


def record(spec: Spec, state: State = State.READY) -> Record:
    owner = Owner(host="h", pid=1, started=1)
    return Record(id=new_id(), spec=spec, state=state, version=1, created_at=0.0, updated_at=0.0, owner=owner)


def test_a_record_is_a_member_by_its_labels() -> None:
    phase = FleetSpec(name="demo", phases=(Phase(name="a", count=2),)).phases[0]
    spec = phase.member_spec("demo", 2)
    fresh = record(spec)
    found = member_of(fresh)
    assert found is not None
    assert (found.id, found.name, found.phase, found.index) == (fresh.id, "agent-a-002", "a", 2)
    assert (found.version, found.pending) == (phase.version(), True)
    done = {key: value for key, value in spec.labels.items() if key != SETUP_LABEL}
    finished = member_of(record(msgspec.structs.replace(spec, labels=done)))
    assert finished is not None
    assert not finished.pending


def test_what_is_no_fleets_or_gone_is_no_member() -> None:
    spec = Phase(name="a").member_spec("demo", 1)
    assert member_of(record(Spec())) is None
    assert member_of(record(spec, State.DESTROYED)) is None
    assert member_of(record(msgspec.structs.replace(spec, labels={**spec.labels, "skerry.index": "x"}))) is None
