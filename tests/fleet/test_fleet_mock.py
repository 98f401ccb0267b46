"""Fleets on a host that fails on demand. The invariants of a fleet have tests of their names."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from manager.world import config_of, until

from skerry.errors import AgentUnreachable, Conflict, CreateFailed, InvalidFleet, NotFound, ProviderError, WrongState
from skerry.fleet import aside
from skerry.fleet.events import MemberCreating, MemberReady, PhaseReady, PhaseStarted, PhaseState
from skerry.fleet.fleet import AsyncFleet
from skerry.fleet.model import File, Healthcheck, OnFailure
from skerry.fleet.plan import ends
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.providers.mock import Context, Mock

from .world import Told, agree, fleet_of, names, nothing_left, phase

CONTINUE = OnFailure.CONTINUE
THREE = (phase("db", 1), phase("workers", 3, "db"), phase("web", 2, "db"))


async def test_up_makes_every_member_under_its_name_and_tells_each_step(manager: AsyncSandboxManager) -> None:
    told = Told()
    report = await AsyncFleet(manager, fleet_of(*THREE)).up(on_event=told)
    assert report.ok
    assert {name: (each.state, each.ready, each.total) for name, each in report.phases.items()} == {
        "db": (PhaseState.READY, 1, 1),
        "workers": (PhaseState.READY, 3, 3),
        "web": (PhaseState.READY, 2, 2),
    }
    members = ["agent-db-001", "agent-web-001", "agent-web-002"]
    assert await names(manager) == [*members, "agent-workers-001", "agent-workers-002", "agent-workers-003"]
    assert told.kinds("db") == ["PhaseStarted", "MemberCreating", "MemberReady", "PhaseReady"]


async def test_no_phase_starts_before_its_dependencies_are_ready(manager: AsyncSandboxManager) -> None:
    told = Told()
    chain = (phase("c", 2, "b"), phase("b", 2, "a"), phase("a", 2), phase("free", 1))
    assert (await AsyncFleet(manager, fleet_of(*chain)).up(on_event=told)).ok
    assert told.at(PhaseReady, "a") < told.at(PhaseStarted, "b") < told.at(PhaseReady, "b") < told.at(PhaseStarted, "c")
    assert told.at(PhaseStarted, "free") < told.at(PhaseReady, "a")


async def test_no_two_members_have_the_same_id(manager: AsyncSandboxManager) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 20), phase("b", 20)))
    await fleet.up()
    assert len({status.id for status in (await fleet.status()).values()}) == 40


async def test_no_member_is_registered_without_a_reachable_agent_after_start(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 3)))
    await fleet.up()
    ids = {status.id for status in (await fleet.status()).values() if status.agent is not None}
    assert ids == {record.id for record in await manager.list()}
    mock.faults.dead_agent(next(iter(ids)))
    report = await fleet.up()
    assert report.ok
    statuses = (await fleet.status()).values()
    assert len(statuses) == 3
    assert all(status.agent is not None for status in statuses)
    assert len(ids & {status.id for status in statuses}) == 2


async def test_no_half_started_phase_is_left_after_fail_fast(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.slow_boot(0)
    mock.faults.slow_boot(0)
    mock.faults.fail_create(CreateFailed("no addresses left"))
    fleet = AsyncFleet(manager, fleet_of(phase("a", 5), phase("b", 1, "a"), phase("free", 1)))
    report = await fleet.up()
    assert not report.ok
    assert report.phases["a"].state is PhaseState.FAILED
    assert report.phases["a"].ready == 0
    assert list(report.phases["a"].errors.values()) == ["no addresses left"]
    assert report.phases["b"].state is PhaseState.SKIPPED
    assert report.phases["b"].errors == {"b": "it waits for a, which is failed"}
    assert report.phases["free"].state is PhaseState.READY
    assert await names(manager) == ["agent-free-001"]
    await agree(manager, mock)


async def test_continue_keeps_what_came_up_and_lets_dependents_start(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.fail_create(times=2)
    spec = fleet_of(phase("a", 3, on_failure=CONTINUE), phase("b", 1, "a"))
    report = await AsyncFleet(manager, spec).up()
    assert (report.phases["a"].state, report.phases["a"].ready) == (PhaseState.PARTIAL, 1)
    assert len(report.phases["a"].errors) == 2
    assert report.phases["b"].state is PhaseState.READY
    assert not report.ok
    again = await AsyncFleet(manager, spec).up()
    assert again.ok
    assert len(await manager.list()) == 4


async def test_dependents_do_not_start_if_all_members_fail(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.fail_create(times=2)
    report = await AsyncFleet(manager, fleet_of(phase("a", 2, on_failure=CONTINUE), phase("b", 1, "a"))).up()
    assert report.phases["a"].state is PhaseState.FAILED
    assert report.phases["b"].state is PhaseState.SKIPPED
    assert await nothing_left(manager, mock)


async def test_an_empty_phase_is_complete_at_once(manager: AsyncSandboxManager) -> None:
    report = await AsyncFleet(manager, fleet_of(phase("a", 0), phase("b", 1, "a"))).up()
    assert report.ok
    assert report.phases["a"].state is PhaseState.EMPTY
    assert await names(manager) == ["agent-b-001"]


async def test_an_agent_that_never_answers_fails_its_phase(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.dead_agent()
    report = await AsyncFleet(manager, fleet_of(phase("a", 2))).up()
    assert report.phases["a"].state is PhaseState.FAILED
    assert "did not answer" in next(iter(report.phases["a"].errors.values()))
    assert await nothing_left(manager, mock)


@pytest.mark.parametrize("on_failure", list(OnFailure))
async def test_a_phase_timeout_cancels_the_rest_and_says_what_came_up(
    manager: AsyncSandboxManager, mock: Mock, on_failure: OnFailure
) -> None:
    mock.faults.hang()
    spec = fleet_of(phase("a", 3, timeout_s=2, on_failure=on_failure), phase("b", 1, "a"))
    report = await AsyncFleet(manager, spec).up()
    assert report.phases["a"].state is PhaseState.TIMED_OUT
    assert len(report.phases["a"].came_up) == 2
    assert list(report.phases["a"].errors.values()) == ["it was not ready within 2 s"]
    goes_on = on_failure is CONTINUE
    assert report.phases["a"].ready == (2 if goes_on else 0)
    assert report.phases["b"].state is (PhaseState.READY if goes_on else PhaseState.SKIPPED)
    await agree(manager, mock)
    assert len(await manager.list()) == (3 if goes_on else 0)


async def test_a_fleet_timeout_skips_what_had_no_turn(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.hang()
    spec = fleet_of(phase("a", 1), phase("b", 1, "a"), phase("free", 1), timeout_s=2)
    report = await AsyncFleet(manager, spec).up()
    states = {name: each.state for name, each in report.phases.items()}
    assert states == {"a": PhaseState.TIMED_OUT, "b": PhaseState.SKIPPED, "free": PhaseState.READY}
    assert await names(manager) == ["agent-free-001"]


async def test_files_and_setup_are_done_before_a_member_is_ready(manager: AsyncSandboxManager) -> None:
    files = (File(path="conf/a.txt", content=b"hello", mode=0o600),)
    setup = ("cat conf/a.txt > seen", ("sh", "-c", "echo $SKERRY_INDEX of $SKERRY_COUNT: $SKERRY_PEERS >> seen"))
    fleet = AsyncFleet(manager, fleet_of(phase("a", 2, files=files, setup=setup)))
    assert (await fleet.up()).ok
    outcomes = await fleet.exec("a", ["cat", "seen"])
    assert {name: each.result.text for name, each in outcomes.items() if each.result} == {
        "agent-a-001": "hello1 of 2: agent-a-001,agent-a-002\n",
        "agent-a-002": "hello2 of 2: agent-a-001,agent-a-002\n",
    }


async def test_a_setup_that_fails_tells_its_command_code_and_last_words(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    spec = fleet_of(phase("a", 2, setup=("true", "echo no such package >&2; exit 7")))
    report = await AsyncFleet(manager, spec).up()
    error = next(iter(report.phases["a"].errors.values()))
    assert error.startswith("setup command 2 of 2 ended with 7: echo no such package")
    assert error.endswith("no such package")
    assert await nothing_left(manager, mock)


async def test_a_member_is_ready_when_its_healthcheck_passes(manager: AsyncSandboxManager, mock: Mock) -> None:
    tries = 0

    @mock.program("probe")
    async def probe(_: Context) -> int:
        nonlocal tries
        tries += 1
        return int(tries < 4)

    check = Healthcheck(command=("probe",), interval_s=0.01, retries=5)
    assert (await AsyncFleet(manager, fleet_of(phase("a", 1, healthcheck=check))).up()).ok
    assert tries == 4
    tries = -100
    report = await AsyncFleet(manager, fleet_of(phase("b", 1, healthcheck=check), name="sick")).up()
    assert "the healthcheck, 5 times in a row, ended with 1: probe" in report.phases["b"].errors["agent-b-001"]


async def test_no_more_members_are_in_the_making_than_allowed(manager: AsyncSandboxManager) -> None:
    making: set[str] = set()
    most: dict[str, int] = {"fleet": 0, "a": 0}

    def count(event: object) -> None:
        if isinstance(event, MemberCreating):
            making.add(event.member)
        elif isinstance(event, MemberReady):
            making.discard(event.member)
        most["fleet"] = max(most["fleet"], len(making))
        most["a"] = max(most["a"], sum(name.startswith("agent-a-") for name in making))

    spec = fleet_of(phase("a", 6, max_parallel=2), phase("b", 6), max_parallel=3)
    assert (await AsyncFleet(manager, spec).up(on_event=count)).ok
    assert most == {"fleet": 3, "a": 2}


async def test_up_again_touches_only_the_difference(manager: AsyncSandboxManager) -> None:
    spec = fleet_of(*THREE)
    await AsyncFleet(manager, spec).up()
    before = {record.name: record for record in await manager.list()}
    assert (await AsyncFleet(manager, spec).up()).ok
    assert {record.name: record for record in await manager.list()} == before
    changed = fleet_of(phase("db", 1), phase("workers", 4, "db", setup=("true",)), phase("new", 1))
    report = await AsyncFleet(manager, changed).up()
    assert report.ok
    assert sorted(report.destroyed) == ["agent-web-001", "agent-web-002"]
    after = {record.name: record for record in await manager.list()}
    assert after["agent-db-001"] == before["agent-db-001"]
    assert after["agent-workers-001"].id != before["agent-workers-001"].id
    assert sorted(name or "" for name in after) == [
        "agent-db-001", "agent-new-001", *(f"agent-workers-00{n}" for n in range(1, 5))
    ]  # fmt: skip


async def test_up_heals_what_was_lost_stopped_or_paused(manager: AsyncSandboxManager, mock: Mock) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 4, spec=Spec(provider="mock", env={"KEY": "value"}))))
    await fleet.up()
    before = {name: status.id for name, status in (await fleet.status()).items()}
    mock.faults.lost_box(before["agent-a-001"])
    await manager.stop(before["agent-a-002"])
    await manager.pause(before["agent-a-003"])
    assert (await fleet.status())["agent-a-002"].state is State.STOPPED
    assert (await fleet.up()).ok
    after = {name: status.id for name, status in (await fleet.status()).items()}
    assert {name for name in after if after[name] != before[name]} == {"agent-a-001"}
    outcomes = await fleet.exec_on_all("echo $KEY")
    assert [each.result.text for each in outcomes.values() if each.result] == ["value\n"] * 4


async def test_scale_makes_the_missing_and_ends_the_highest(manager: AsyncSandboxManager, mock: Mock) -> None:
    fleet = AsyncFleet(manager, fleet_of(*THREE))
    await fleet.up()
    first = (await fleet.status())["agent-workers-001"].id
    assert (await fleet.scale(workers=5, web=1)).ok
    assert len(await fleet.status()) == 7
    report = await fleet.scale(workers=2)
    assert sorted(report.destroyed) == [f"agent-workers-00{n}" for n in (3, 4, 5)]
    assert (await fleet.status())["agent-workers-001"].id == first
    peers = await fleet.exec_on_agent("agent-workers-001", "echo $SKERRY_COUNT $SKERRY_PEERS")
    assert peers.text == "2 agent-workers-001,agent-workers-002\n"
    assert (await fleet.scale(workers=0)).ok
    with pytest.raises(NotFound, match="no phase 'worker'; did you mean 'workers'"):
        await fleet.scale(worker=1)
    await agree(manager, mock)


async def test_a_phase_alone_is_refused_while_what_it_waits_for_is_not_ready(manager: AsyncSandboxManager) -> None:
    fleet = AsyncFleet(manager, fleet_of(*THREE))
    with pytest.raises(WrongState, match="'workers' waits for 'db', and 0 of its 1 members are ready"):
        await fleet.start_phase("workers")
    assert (await fleet.start_phase("db")).ok
    assert (await fleet.start_phase("workers")).ok
    assert len(await manager.list()) == 4
    assert (await fleet.start_all_phases()).ok


async def test_status_tells_all_that_is_known_and_changes_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 3)))
    assert await fleet.status() == {}
    await fleet.up()
    before, last = await manager.list(), await manager.store.last_event()
    hung = before[1].id
    mock.faults.hang(hung)
    statuses = await fleet.status(timeout_s=0.1)
    assert list(statuses) == ["agent-a-001", "agent-a-002", "agent-a-003"]
    for status in statuses.values():
        assert (status.phase, status.state, status.ip) == ("a", State.READY, "")
        assert (status.agent is None) == (status.error == "agent unreachable") == (status.id == hung)
    assert await manager.list() == before
    assert await manager.store.last_event() == last
    name = before[0].name or ""
    assert msgspec.structs.replace(await fleet.get_container_status(name), agent=None) == msgspec.structs.replace(
        statuses[name], agent=None
    )
    with pytest.raises(NotFound, match="no member 'agent-a-004'"):
        await fleet.get_container_status("agent-a-004")


async def test_a_member_on_trial_is_creating_to_all_who_look(manager: AsyncSandboxManager, mock: Mock) -> None:
    gate = asyncio.Event()

    @mock.program("hold")
    async def hold(_: Context) -> int:
        await gate.wait()
        return 0

    fleet = AsyncFleet(manager, fleet_of(phase("a", 1, setup=("hold",))))
    starting = asyncio.create_task(fleet.up())
    other = await AsyncFleet.open(manager, "crew")

    async def is_set_up() -> bool:
        statuses = await other.status()
        return bool(statuses) and statuses["agent-a-001"].agent is not None

    await until(is_set_up)
    assert (await other.status())["agent-a-001"].state is State.CREATING
    outcome = (await other.exec("all", "true"))["agent-a-001"]
    assert isinstance(outcome.error, WrongState)
    assert "setup is not done" in str(outcome.error)
    gate.set()
    assert (await starting).ok
    assert (await other.status())["agent-a-001"].state is State.READY


async def test_exec_reaches_what_the_target_means_with_one_outcome_each(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    labelled = Spec(provider="mock", labels={"tier": "gold"})
    fleet = AsyncFleet(manager, fleet_of(phase("a", 2, spec=labelled), phase("b", 1), phase("empty", 0)))
    await fleet.up()
    everyone = ["agent-a-001", "agent-a-002", "agent-b-001"]
    assert list(await fleet.exec_on_all("true")) == everyone
    assert list(await fleet.exec_on_phase("a", "true")) == everyone[:2]
    assert list(await fleet.exec("tier=gold", "true")) == everyone[:2]
    assert list(await fleet.exec("agent-b-001", "true")) == everyone[2:]
    assert await fleet.exec("empty", "true") == {}
    assert await fleet.exec("tier=silver", "true") == {}
    with pytest.raises(NotFound, match="no member or phase 'c'"):
        await fleet.exec("c", "true")
    mock.faults.dead_agent(SandboxId((await fleet.get_container_status("agent-a-002")).id))
    heard: list[tuple[str, int, bytes]] = []
    outcomes = await fleet.exec(
        "all", "echo $SKERRY_PHASE; exit $SKERRY_INDEX", on_output=lambda *piece: heard.append(piece)
    )
    assert [each.result and each.result.exit_code for each in outcomes.values()] == [1, None, 1]
    assert isinstance(outcomes["agent-a-002"].error, AgentUnreachable)
    assert sorted(heard) == [("agent-a-001", 1, b"a\n"), ("agent-b-001", 1, b"b\n")]
    with pytest.raises(AgentUnreachable, match="agent-a-002: agent unreachable"):
        await fleet.exec_on_agent("agent-a-002", "true")
    with pytest.raises(NotFound):
        await fleet.exec_on_agent("agent-a-009", "true")


async def test_a_broadcast_that_is_cancelled_ends_the_commands(manager: AsyncSandboxManager) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 3)))
    await fleet.up()
    running = asyncio.create_task(fleet.exec_on_all(["cat"], stdin=None))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert all(each.ok for each in (await fleet.exec_on_all("true")).values())


async def test_stop_during_start_is_safe(manager: AsyncSandboxManager, mock: Mock) -> None:
    for wait_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
        fleet = AsyncFleet(manager, fleet_of(phase("a", 4, setup=("sleep 1",)), phase("b", 2, "a")))
        starting = asyncio.create_task(fleet.up())
        await asyncio.sleep(wait_s)
        await fleet.stop_all()
        report = await starting
        assert await nothing_left(manager, mock)
        assert (
            all(each.state in (PhaseState.STOPPED, PhaseState.READY) for each in report.phases.values()) or wait_s == 0
        )


async def test_stopping_one_phase_during_start_lets_the_others_go_on(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.hang()
    fleet = AsyncFleet(manager, fleet_of(phase("a", 2), phase("b", 1, "a"), phase("free", 2)))
    starting = asyncio.create_task(fleet.up())

    async def are_there() -> bool:
        return len(mock.host.boxes) == 4

    await until(are_there)
    await fleet.stop_phase("a")
    report = await starting
    states = {name: each.state for name, each in report.phases.items()}
    assert states == {"a": PhaseState.STOPPED, "b": PhaseState.SKIPPED, "free": PhaseState.READY}
    assert await names(manager) == ["agent-free-001", "agent-free-002"]


async def test_stop_twice_is_safe(manager: AsyncSandboxManager, mock: Mock) -> None:
    fleet = AsyncFleet(manager, fleet_of(*THREE))
    await fleet.up()
    gone = await asyncio.gather(fleet.down(), fleet.stop_all())
    assert sorted(len(each) for each in gone) == [0, 6]
    assert await fleet.down() == []
    assert await fleet.stop_phase("db") == []
    assert await nothing_left(manager, mock)
    with pytest.raises(NotFound, match="no phase"):
        await fleet.stop_phase("nonsense")


async def test_down_ends_all_it_can_and_tells_what_it_could_not(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 3)))
    await fleet.up()
    stuck = (await fleet.get_container_status("agent-a-002")).id
    original = mock.destroy

    async def destroy(id: SandboxId, *, volumes: bool = False) -> None:
        if id == stuck:
            raise ProviderError("the disk is busy")
        await original(id, volumes=volumes)

    monkeypatch.setattr(mock, "destroy", destroy)
    with pytest.raises(ProviderError, match=r"1 of 3 members .* ask again. agent-a-002: the disk is busy"):
        await fleet.down()
    assert await names(manager) == ["agent-a-002"]
    monkeypatch.undo()
    assert await fleet.down() == ["agent-a-002"]
    assert await nothing_left(manager, mock)


async def test_a_fleet_is_known_by_its_name_alone(manager: AsyncSandboxManager, mock: Mock) -> None:
    await AsyncFleet(manager, fleet_of(*THREE, project="elsewhere")).up()
    opened = await AsyncFleet.open(manager, "crew")
    assert len(await opened.status()) == 6
    assert len(await opened.exec("workers", "true")) == 3
    assert (await opened.member("agent-db-001")).state is State.READY
    with pytest.raises(WrongState, match="its file is needed"):
        await opened.up()
    assert len(await opened.stop_phase("web")) == 2
    assert len(await opened.down()) == 4
    assert await nothing_left(manager, mock)
    assert await (await AsyncFleet.open(manager, "nobody")).status() == {}


async def test_fleets_of_one_name_in_two_projects_are_told_apart(manager: AsyncSandboxManager) -> None:
    for project in ("one", "two"):
        await AsyncFleet(manager, fleet_of(phase("a", 1), project=project)).up()
    with pytest.raises(Conflict, match="in one, two: say in which project"):
        await AsyncFleet.open(manager, "crew")
    assert len(await (await AsyncFleet.open(manager, "crew", "two")).down()) == 1
    assert len(await (await AsyncFleet.open(manager, "crew")).status()) == 1


async def test_two_fleets_with_the_same_phases_live_side_by_side_in_one_project(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    @mock.program("whose")
    async def whose(context: Context) -> int:
        await context.print(context.env["SKERRY_FLEET"])
        return 0

    specs = [fleet_of(phase("a", 2), phase("b", 1, "a"), name=name, project="shared") for name in ("one", "shared")]
    one, shared = (AsyncFleet(manager, spec) for spec in specs)
    assert (await one.up()).ok
    assert (await shared.up()).ok
    members = ["agent-a-001", "agent-a-002", "agent-b-001"]
    for fleet in (one, shared):
        assert list(await fleet.status()) == members
        outcomes = await fleet.exec("agent-a-002", "whose")
        assert [each.result.text for each in outcomes.values() if each.result] == [f"{fleet.name}\n"]
        assert len(await fleet.exec("all", "whose")) == 3
        assert (await fleet.plan()).is_empty
    before = {record.id for record in (await one.records()).values()}
    shared.spec = fleet_of(phase("a", 2, setup=("true",)), phase("b", 1, "a"), name="shared")
    assert (await shared.up()).ok  # which puts members aside for their successors
    assert list(await shared.down()) == ["agent-b-001", "agent-a-001", "agent-a-002"]
    assert {record.id for record in (await one.records()).values()} == before
    assert set(mock.host.boxes) == before
    assert (await one.scale(a=1)).destroyed == ("agent-a-002",)


async def test_a_name_that_is_somebody_else_s_fails_its_member_only(manager: AsyncSandboxManager, mock: Mock) -> None:
    taken = await manager.create(name="agent-a-002", project="crew")
    report = await AsyncFleet(manager, fleet_of(phase("a", 3, on_failure=CONTINUE))).up()
    assert report.phases["a"].state is PhaseState.PARTIAL
    assert "taken by sandbox" in report.phases["a"].errors["agent-a-002"]
    assert taken.id in mock.host.boxes


async def test_two_starts_at_once_make_each_member_once(manager: AsyncSandboxManager, mock: Mock) -> None:
    spec = fleet_of(phase("a", 4, setup=("sleep 1",)), phase("b", 2, "a"))
    reports = await asyncio.gather(*(AsyncFleet(manager, spec).up() for _ in range(3)))
    assert all(report.ok for report in reports)
    assert len(mock.host.boxes) == 6
    created = [event for event in await manager.store.events() if event.kind == "created"]
    assert len(created) == 6
    await agree(manager, mock)


async def test_a_fleet_that_somebody_else_ends_while_it_starts_leaves_nothing(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    for wait_s in (0.001, 0.005, 0.01, 0.02, 0.04, 0.08):
        spec = fleet_of(phase("a", 3, setup=("sleep 1",)), phase("b", 3, "a", on_failure=CONTINUE), max_parallel=2)
        starting = asyncio.create_task(AsyncFleet(manager, spec).up())
        await asyncio.sleep(wait_s)
        await (await AsyncFleet.open(manager, "crew")).down()
        report = await starting
        if any(each.state is PhaseState.STOPPED for each in report.phases.values()):
            assert not report.phases["b"].ready or report.phases["b"].state is PhaseState.READY
        await (await AsyncFleet.open(manager, "crew")).down()
        assert await nothing_left(manager, mock)


async def test_a_start_that_is_cancelled_at_any_moment_leaves_whole_phases_only(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    spec = fleet_of(phase("a", 2, setup=("echo x > y",)), phase("b", 2, "a"))
    for steps in range(0, 80, 2):
        starting = asyncio.create_task(AsyncFleet(manager, spec).up())
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
        await agree(manager, mock)
        found = await names(manager)
        assert found in ([], ["agent-a-001", "agent-a-002"], [f"agent-{p}-00{n}" for p in "ab" for n in (1, 2)])
        await AsyncFleet(manager, spec).down()
        assert await nothing_left(manager, mock)


@pytest.mark.parametrize("call", ["reserve", "boot_slot", "get", "change", "list", "last_event"])
async def test_a_start_cancelled_while_the_registry_is_used_leaves_whole_phases_only(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The n-th call of each kind is the moment of the cancellation; the database does its work nevertheless."""
    original = getattr(manager.store, call)
    left = 0

    async def cancel_meanwhile(*args: object, **options: object) -> object:
        nonlocal left
        left -= 1
        writing = asyncio.ensure_future(original(*args, **options))
        if left == 0:
            task.cancel()
        return await asyncio.shield(writing)

    for nth in range(1, 12):
        left = nth
        monkeypatch.setattr(manager.store, call, cancel_meanwhile)
        task = asyncio.create_task(AsyncFleet(manager, fleet_of(phase("a", 2), phase("b", 1, "a"))).up())
        with suppress(asyncio.CancelledError):
            await task
        monkeypatch.setattr(manager.store, call, original)
        await agree(manager, mock)
        assert await names(manager) in (
            [], ["agent-a-001", "agent-a-002"], ["agent-a-001", "agent-a-002", "agent-b-001"]
        )  # fmt: skip
        await manager.destroy_all()


async def test_phases_states_agents_and_commands_are_logged(
    manager: AsyncSandboxManager, mock: Mock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "skerry.fleet")
    fleet = AsyncFleet(manager, fleet_of(phase("a", 1)))
    await fleet.up()
    await fleet.exec_on_all("true")
    mock.faults.fail_create()
    await fleet.scale(a=2)
    await fleet.down()
    text = caplog.text
    for words in (
        "phase a starts, 1 members",
        "agent-a-001 is creating",
        "agent-a-001 is ready after",
        "phase a is ready after",
        "a command in 1 members took",
        "agent-a-001: a command ended with 0",
        "agent-a-002 failed",
        "phase a failed, 1/2 ready",
        "agent-a-001 is destroyed",
    ):
        assert words in text, words


async def test_a_listener_that_fails_holds_up_nothing(
    manager: AsyncSandboxManager, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_: object) -> None:
        raise ValueError("no terminal")

    assert (await AsyncFleet(manager, fleet_of(phase("a", 2))).up(on_event=fail)).ok
    assert "whoever listens" in caplog.text


async def test_two_starts_that_make_members_in_different_orders_do_not_wait_for_each_other(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    """One at a time here, all at once there: the second must not take what the first will want."""
    spec = fleet_of(phase("a", 3, setup=("sleep 1",)), phase("b", 3, setup=("sleep 1",)), max_parallel=1)
    first = asyncio.create_task(AsyncFleet(manager, spec).up())

    async def begun() -> bool:
        return bool(mock.host.boxes)

    await until(begun)
    eager = msgspec.structs.replace(spec, max_parallel=16)
    async with asyncio.timeout(30):
        reports = await asyncio.gather(first, AsyncFleet(manager, eager).up(), AsyncFleet(manager, spec).up())
    assert all(report.ok for report in reports)
    await agree(manager, mock)
    assert len(mock.host.boxes) == 6


async def test_a_phase_whose_provider_is_not_there_is_refused_before_any_other_starts(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    lost = phase("b", 1, "a", spec=Spec(provider="dokcer"))
    with pytest.raises(InvalidFleet, match="phase 'b': no provider is called 'dokcer'"):
        await AsyncFleet(manager, fleet_of(phase("a"), lost)).up()
    assert await nothing_left(manager, mock)


async def test_phases_of_any_name_can_be_scaled(manager: AsyncSandboxManager) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("self"), phase("on_event"), phase("a-b")))
    assert (await fleet.scale({"self": 2, "on_event": 0, "a-b": 2})).ok
    assert await names(manager) == ["agent-a-b-001", "agent-a-b-002", "agent-self-001", "agent-self-002"]


# ends


async def _handler(context: Context) -> None:
    asked = asyncio.Event()
    context.on_signal(signal.SIGTERM, asked.set)
    await context.print("ready")
    with context.waiting():
        await asked.wait()
    ENDED.append(context.env["SKERRY_PHASE"])


ENDED: list[str] = []
CHAIN = (phase("c", 2, "b"), phase("free", 1), phase("b", 2, "a"), phase("a", 1))


@pytest.mark.parametrize("has_file", [True, False])
async def test_phases_end_in_the_reverse_order_of_their_start_each_member_asked_first(
    manager: AsyncSandboxManager, mock: Mock, has_file: bool
) -> None:
    ENDED.clear()
    mock.host.programs["handler"] = _handler
    fleet = AsyncFleet(manager, fleet_of(*CHAIN))
    await fleet.up()
    for name in await fleet.records():
        await (await fleet.member(name)).start(["handler"], background=True)
    told = Told()
    opened = fleet if has_file else await AsyncFleet.open(manager, "crew")
    await opened.down(on_event=told)
    assert [name for name in ENDED if name != "free"] == ["c", "c", "b", "b", "a"]
    assert [event.phase for event in told if event.phase != "free"] == ["c", "c", "b", "b", "a"]
    assert await nothing_left(manager, mock)


def test_what_the_file_does_not_have_ends_first() -> None:
    fleet = fleet_of(*CHAIN)
    assert ends(fleet, dict.fromkeys(("a", "b", "c", "free", "gone"), 0.0)) == (
        ("gone",),
        ("c",),
        ("b",),
        ("free", "a"),
    )
    assert ends(fleet, {"a": 0.0, "c": 0.0}) == (("c",), ("a",))
    assert ends(None, {"a": 1.0, "c": 3.0, "b": 2.0}) == (("c",), ("b",), ("a",))


# successors


def _not_the_second(context: Context) -> int:
    return int(context.env["SKERRY_INDEX"] == "2")


WITHOUT_DATA = Spec(provider="mock", data=False)


@pytest.mark.parametrize("spec", [WITHOUT_DATA, Spec(provider="mock")])
async def test_a_member_whose_successor_fails_is_as_it_was(
    manager: AsyncSandboxManager, mock: Mock, spec: Spec
) -> None:
    await AsyncFleet(manager, fleet_of(phase("a", 3, spec=spec))).up()
    before = {record.id: record.name for record in await manager.list()}
    mock.host.programs["not-the-second"] = _not_the_second
    changed = fleet_of(phase("a", 3, spec=spec.but(env={"NEW": "1"}), setup=("not-the-second",)))
    report = await AsyncFleet(manager, changed).up()
    assert report.phases["a"].state is PhaseState.FAILED
    assert {record.id: record.name for record in await manager.list()} == before
    await agree(manager, mock)
    fleet = AsyncFleet(manager, fleet_of(phase("a", 3, spec=spec)))
    assert all(outcome.ok for outcome in (await fleet.exec("all", "true")).values())
    assert (await fleet.plan()).is_empty


async def test_of_a_phase_that_goes_on_only_the_failed_member_is_as_it_was(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    await AsyncFleet(manager, fleet_of(phase("a", 3, spec=WITHOUT_DATA))).up()
    before = {record.name: record.id for record in await manager.list()}
    mock.host.programs["not-the-second"] = _not_the_second
    options = {"setup": ("not-the-second",), "on_failure": CONTINUE}
    await AsyncFleet(manager, fleet_of(phase("a", 3, spec=WITHOUT_DATA, **options))).up()
    after = {record.name: record.id for record in await manager.list()}
    assert after.keys() == before.keys()
    assert [name for name in before if before[name] == after[name]] == ["agent-a-002"]
    await agree(manager, mock)


async def test_a_member_that_has_no_data_of_its_name_runs_until_its_successor_is_ready(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 1, spec=WITHOUT_DATA)))
    await fleet.up()
    (old,) = await manager.list()
    states = []

    async def look(context: Context) -> None:
        states.append((await manager.record(old.id)).state)

    mock.host.programs["look"] = look
    changed = AsyncFleet(manager, fleet_of(phase("a", 1, spec=WITHOUT_DATA, setup=("look",))))
    assert (await changed.up()).ok
    assert states == [State.READY]
    assert await names(manager) == ["agent-a-001"]
    assert (await manager.record(old.id)).state is State.DESTROYED


async def test_where_there_is_no_room_for_both_the_old_member_goes_first(tmp_path: Path, mock: Mock) -> None:
    config = config_of(tmp_path, max_sandboxes=2)
    async with AsyncSandboxManager(config, providers={"mock": mock}) as manager:
        await AsyncFleet(manager, fleet_of(phase("a", 2, spec=WITHOUT_DATA))).up()
        changed = fleet_of(phase("a", 2, spec=WITHOUT_DATA, setup=("true",)))
        assert (await AsyncFleet(manager, changed).up()).ok
        assert await names(manager) == ["agent-a-001", "agent-a-002"]
        await manager.destroy_all()


@pytest.mark.parametrize("has_successor", [True, False])
async def test_a_replacement_that_was_cut_short_is_gone_on_with(
    manager: AsyncSandboxManager, mock: Mock, has_successor: bool
) -> None:
    spec = fleet_of(phase("a", 1, spec=WITHOUT_DATA))
    fleet = AsyncFleet(manager, spec)
    await fleet.up()
    (old,) = await manager.list()
    assert await aside.put_aside(manager, old) is not None
    assert await names(manager) == ["agent-a-001.old"]
    if has_successor:
        await fleet.up()  # it is held, as by a start that goes on
        assert await names(manager) == ["agent-a-001", "agent-a-001.old"]
    aside.held.discard(old.id)  # as after the death of its program
    assert (await fleet.up()).ok
    assert await names(manager) == ["agent-a-001"]
    assert (await manager.record(old.id)).is_live is not has_successor
    await agree(manager, mock)


async def test_down_ends_a_member_that_waits_for_its_successor(manager: AsyncSandboxManager, mock: Mock) -> None:
    fleet = AsyncFleet(manager, fleet_of(phase("a", 1)))
    await fleet.up()
    (old,) = await manager.list()
    await aside.put_aside(manager, old)
    assert await fleet.down() == ["agent-a-001.old"]
    assert await nothing_left(manager, mock)
    aside.held.discard(old.id)


async def test_a_phase_without_an_image_is_refused_where_boxes_are_made_of_images(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mock, "needs_image", True)
    with pytest.raises(InvalidFleet, match="phase 'b': image: mock makes its boxes of one, and none is named"):
        await AsyncFleet(manager, fleet_of(phase("a", 1, spec=Spec(provider="mock", image="x")), phase("b"))).up()
    assert await nothing_left(manager, mock)
