from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from skerry.errors import InvalidFleet, InvalidSpec, NotFound, Problem
from skerry.fleet.model import ASIDE, VARIABLES, File, FleetSpec, Healthcheck, OnFailure, Phase
from skerry.model.spec import Spec

PHASE = Phase(name="workers", count=3, spec=Spec.of(memory="64M", env={"A": "1"}, labels={"team": "x"}))


def test_a_member_has_a_name_labels_and_variables_of_its_own() -> None:
    (phase,) = FleetSpec(name="demo", phases=(PHASE,)).phases
    spec = phase.member_spec("demo", 2)
    assert spec.name == "agent-workers-002"
    assert spec.labels == {
        "team": "x",
        "skerry.fleet": "demo",
        "skerry.phase": "workers",
        "skerry.index": "2",
        "skerry.version": phase.version(),
        "skerry.setup": "pending",
    }
    values = ("demo", "workers", "2", "3", "agent-workers-001,agent-workers-002,agent-workers-003")
    assert spec.env == {"A": "1", **dict(zip(VARIABLES, values, strict=True))}


def test_the_names_of_members_fit_whatever_the_phase_is_called() -> None:
    phases = (Phase(name="x" * 48, count=1000), Phase(name=f"{'x' * 47}y", count=1000))
    own = FleetSpec(name="f" * 63, phases=phases, max_per_phase=1000).phases[0]
    assert own.member_spec("f" * 63, 1000).name == f"agent-{'x' * 48}-1000"
    found = set()
    for name in ("f" * 63, f"{'f' * 62}g", "short"):
        for phase in FleetSpec(name=name, project="shared", phases=phases, max_per_phase=1000).phases:
            found |= {phase.sandbox_name(name, index) for index in phase.indexes()}
    assert len(found) == 3 * 2 * 1000
    assert max(map(len, found)) + len(ASIDE) == 63


def test_the_name_of_a_fleet_is_in_those_of_its_sandboxes_where_the_project_is_not_its_own() -> None:
    (phase,) = FleetSpec(name="demo", project="shared", phases=(PHASE,)).phases
    spec = phase.member_spec("demo", 2)
    assert (spec.name, phase.member_name(2)) == ("demo-agent-workers-002", "agent-workers-002")
    assert spec.env["SKERRY_PEERS"] == "agent-workers-001,agent-workers-002,agent-workers-003"


@pytest.mark.parametrize(
    "change",
    [
        {"count": 7},
        {"wait_for": ("db",)},
        {"on_failure": OnFailure.CONTINUE},
        {"timeout_s": 5.0},
        {"max_parallel": 1},
    ],
    ids=str,
)
def test_how_many_there_are_and_when_they_start_changes_no_version(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(PHASE, **change).version() == PHASE.version()


@pytest.mark.parametrize(
    "change",
    [
        {"spec": PHASE.spec.but(memory="65M")},
        {"spec": PHASE.spec.but(env={"A": "2"})},
        {"spec": PHASE.spec.but(labels={})},
        {"setup": ("true",)},
        {"files": (File(path="/a", content=b""),)},
        {"healthcheck": Healthcheck(command="true")},
        {"inherited": ("B",)},
    ],
    ids=str,
)
def test_what_a_member_is_made_from_changes_the_version(change: dict[str, Any]) -> None:
    assert msgspec.structs.replace(PHASE, **change).version() != PHASE.version()


def test_the_value_of_a_variable_of_the_caller_is_no_part_of_the_version() -> None:
    phases = [
        Phase(name="a", spec=Spec.of(env={"TOKEN": value} if value else {}), inherited=("TOKEN",))
        for value in ("one", "two", "")
    ]
    assert len({phase.version() for phase in phases}) == 1


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("name", ["", "A", "a b", "-x", "x" * 49, "all", "a/b"]),
        ("count", [-1, 1001]),
        ("timeout_s", [0, -1, float("nan"), float("inf")]),
        ("max_parallel", [0, -1]),
        ("setup", [("",), ((),), ("a\0b",), (("", "x"),)]),
        ("spec", [Spec.of(labels={"skerry.fleet": "x"}), Spec.of(env={"SKERRY_INDEX": "1"})]),
    ],
)
def test_a_wrong_phase_cannot_exist(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidSpec):
            Phase(**{"name": "a", field: value})


def test_variables_that_leave_no_room_for_the_names_of_the_peers_are_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidSpec, match="env: more than"):
        Phase(name="a", count=1000, spec=Spec.of(env={"A": "x" * 120_000}))


@pytest.mark.parametrize(
    "wrong",
    [{"interval_s": 0}, {"timeout_s": -1}, {"retries": 0}, {"start_period_s": -1}, {"command": ()}],
    ids=str,
)
def test_a_wrong_health_check_cannot_exist(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="healthcheck"):
        Healthcheck(**{"command": "true", **wrong})


@pytest.mark.parametrize("wrong", [{"path": ""}, {"path": "a\0"}, {"mode": 0o10000}, {"mode": -1}], ids=str)
def test_a_wrong_file_cannot_exist(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec, match="files"):
        File(**{"path": "/a", "content": b"", **wrong})


def test_a_fleet_has_a_project_of_its_own() -> None:
    fleet = FleetSpec(name="demo", phases=(PHASE,))
    assert (fleet.project, fleet.phase("workers").spec.project) == ("demo", "demo")
    other = FleetSpec(name="demo", project="shared", phases=(PHASE,))
    assert (other.project, other.phases[0].spec.project) == ("shared", "shared")


def test_a_fleet_that_is_made_in_python_is_checked_too_and_all_is_told() -> None:
    phases = (Phase(name="a", wait_for=("b", "nothing")), Phase(name="b", wait_for=("a",)), Phase(name="a", count=101))
    with pytest.raises(InvalidFleet) as caught:
        FleetSpec(name="demo", phases=phases)
    told = str(caught.value)
    assert "names 'nothing', and there is no such phase" in told
    assert "there is a phase of this name already" in told
    assert "count 101 is more than max_per_phase" in told
    assert all(problem.line == 0 for problem in caught.value.problems)


@pytest.mark.parametrize(
    "wrong",
    [{"name": "A"}, {"name": ""}, {"project": "A b"}, {"timeout_s": 0}, {"max_parallel": 0}, {"max_per_phase": 0}],
    ids=str,
)
def test_a_wrong_fleet_cannot_exist(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec):
        FleetSpec(**{"name": "demo", "phases": (PHASE,), **wrong})


def test_a_fleet_is_scaled_by_the_names_of_its_phases() -> None:
    fleet = FleetSpec(name="demo", phases=(PHASE, Phase(name="db")))
    assert [phase.count for phase in fleet.scaled({"workers": 8}).phases] == [8, 1]
    with pytest.raises(NotFound, match="no phase 'worker'; did you mean 'workers'"):
        fleet.scaled({"worker": 8})
    with pytest.raises(InvalidFleet, match="more than max_per_phase"):
        fleet.scaled({"workers": 101})
    with pytest.raises(InvalidSpec, match="count: -1"):
        fleet.scaled({"workers": -1})


def test_an_invalid_fleet_goes_from_process_to_process() -> None:
    error = pickle.loads(pickle.dumps(InvalidFleet([Problem(2, 3, "b"), Problem(1, 1, "a")], path="f.yaml")))
    assert str(error) == "f.yaml:1:1: a\nf.yaml:2:3: b"
    assert error.problems[0] == Problem(1, 1, "a")
    assert error.path == "f.yaml"
