"""Ages and ends are counted by the clock of the boot: nothing is decided by a wall clock, however wrong it is."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.clock import End, Moment
from skerry.manager.decide import Action, decide
from skerry.manager.manager import AsyncSandboxManager
from skerry.manager.repair import Timekeeper
from skerry.model.records import Cause, Record
from skerry.model.spec import SandboxId, new_id
from skerry.model.states import State
from skerry.providers.base import BoxStatus
from skerry.providers.mock import Mock
from skerry.store import Store

from .test_reconcile import BOXES, FAR, HERE, NOW, boxes, record, records, verdict_on
from .world import HostClock, config_of, opened_manager, set_wall_clock, until

YEAR_S = 31_557_600.0
JUMPS_S = [0.0, 3600.0, -3600.0, 30 * YEAR_S, -60 * YEAR_S]
BEFORE = Moment("here", "the boot before", 50_000.0)
ELSEWHERE = Moment("elsewhere", "its boot", 10_000.0)


# decisions


@given(records(), boxes, st.sampled_from(JUMPS_S), st.sampled_from(JUMPS_S))
def test_no_verdict_depends_on_what_the_wall_clock_said(
    them: list[Record], there: dict[SandboxId, BoxStatus], created: float, updated: float
) -> None:
    moved = [msgspec.structs.replace(it, created_at=created, updated_at=updated) for it in them]
    assert decide("mock", moved, there, NOW) == decide("mock", them, there, NOW)


@pytest.mark.parametrize("box", ["running", "paused", "stopped"])
def test_after_a_restart_a_sandbox_has_what_was_left_when_that_was_noted_last(box: str) -> None:
    it = record(spec={"lifetime_s": 60}, where=BEFORE, age_s=50_000)
    assert verdict_on(it, BOXES[box]).action is not Action.DESTROY
    assert it.left_s(HERE) == 60
    assert verdict_on(msgspec.structs.replace(it, boot_id="the boot before"), None).cause is Cause.HOST_RESTARTED
    end = End(BEFORE, 10.0).noted_at(HERE)
    assert end.left_at(msgspec.structs.replace(HERE, at=HERE.at + 11)) == -1


def test_the_lifetime_of_another_machines_sandbox_is_left_to_that_machine() -> None:
    it = record(spec={"lifetime_s": 1}, where=ELSEWHERE, age_s=5_000, owner=FAR)
    assert it.left_s(HERE) is None
    for box in (None, *BOXES.values()):
        assert verdict_on(it, box).cause is not Cause.LIFETIME
    making = record(State.CREATING, where=ELSEWHERE, age_s=5_000, owner=FAR)
    assert verdict_on(making, None).action is Action.LEAVE


def test_what_is_over_is_ended_also_if_its_maker_is_in_another_container() -> None:
    it = record(spec={"lifetime_s": 60}, owner=FAR)
    assert verdict_on(it, None).cause is Cause.LIFETIME


def test_a_moment_is_written_and_read() -> None:
    assert Moment.parse(str(HERE)) == HERE
    assert Moment.parse("") is None
    assert Moment.parse("a/b/c") is None
    assert HERE.age_s(msgspec.structs.replace(HERE, at=10_001.0)) == 1
    assert BEFORE.age_s(HERE) == HERE.at  # at least
    assert ELSEWHERE.age_s(HERE) is None


# programs


@pytest.mark.parametrize("jump_s", JUMPS_S)
async def test_a_jump_of_the_wall_clock_changes_no_end(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    short, idle = await manager.create(lifetime=100), await manager.create(idle=50)
    paused, stopped = await manager.create(lifetime=100), await manager.create(lifetime=100)
    await manager.pause(paused.id)
    await manager.stop(stopped.id)
    set_wall_clock(monkeypatch, jump_s)
    assert await manager.reconcile() == []
    explained = await manager.explain(short.id)
    assert explained.ends_at == pytest.approx(time.time() + 100, abs=30)
    mock.faults.lost_box(idle.id)
    await manager.reconcile()
    assert (await manager.record(idle.id)).cause is Cause.BOX_DIED
    await manager.destroy(idle.id)
    await manager.start(stopped.id)
    host_clock.pass_time(106)
    assert {verdict.cause for verdict in await manager.reconcile()} == {Cause.LIFETIME}
    assert not mock.host.boxes


async def test_a_host_that_starts_with_a_wrong_clock_loses_none_and_their_ends_come(
    tmp_path: Path, mock: Mock, host_clock: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_manager(config_of(tmp_path), mock, host_clock) as manager:
        sandbox = await manager.create(lifetime=1000)
        await manager.stop(sandbox.id)
    for boot, wall_s in (("second", 60 * YEAR_S), ("third", -60 * YEAR_S)):
        host_clock.boot = boot
        set_wall_clock(monkeypatch, wall_s)
        async with opened_manager(config_of(tmp_path), mock, host_clock) as manager:
            assert await manager.reconcile() == []
            record = await manager.record(sandbox.id)
            assert record.end is not None
            assert record.end.noted.boot == boot
            assert record.left_s(host_clock()) == pytest.approx(1000, abs=60)
    host_clock.pass_time(1006)
    async with opened_manager(config_of(tmp_path), mock, host_clock) as manager:
        assert (await manager.record(sandbox.id)).cause is Cause.LIFETIME


async def test_what_is_left_is_noted_when_half_has_passed_and_that_is_no_change(
    tmp_path: Path, mock: Mock, host_clock: HostClock
) -> None:
    async with opened_manager(config_of(tmp_path), mock, host_clock) as manager:
        sandbox = await manager.create(lifetime=1000)
        before = await manager.record(sandbox.id)
        for passed_s, noted_s in ((400, 1000), (200, 400)):
            host_clock.pass_time(passed_s)
            await manager.repair.unfinished()
            record = await manager.record(sandbox.id)
            assert record.end is not None
            assert record.end.left_s == pytest.approx(noted_s, abs=30)
        assert (record.version, record.written) == (before.version, before.written)
        assert record.left_s(host_clock()) == pytest.approx(400, abs=30)
        await manager.destroy(sandbox.id)


async def test_a_sandbox_that_was_slow_to_make_has_its_whole_lifetime(
    manager: AsyncSandboxManager, mock: Mock, store: Store, host_clock: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = mock.create

    async def slowly(*args: object) -> None:
        await create(*args)  # type: ignore[arg-type]
        host_clock.pass_time(500)

    monkeypatch.setattr(mock, "create", slowly)
    sandbox = await manager.create(lifetime=100)
    record = await store.get(sandbox.id)
    assert record.left_s(host_clock()) == pytest.approx(100, abs=30)
    assert await manager.reconcile() == []
    mock.faults.lost_box(sandbox.id)  # as its agent may have ended it, which counts from its own start
    await manager.reconcile()
    assert (await store.get(sandbox.id)).cause is Cause.LIFETIME


# managers that are open


async def test_an_open_manager_sees_within_a_minute_what_others_have_made(
    tmp_path: Path, mock: Mock, host_clock: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.manager.manager.LOOK_S", 0.01)
    monkeypatch.setattr("skerry.manager.repair.LOOK_S", 0.01)
    async with (
        opened_manager(config_of(tmp_path), mock, host_clock, reconcile=False) as watcher,
        opened_manager(config_of(tmp_path), mock, host_clock) as other,
    ):
        sandbox = await other.create(lifetime=1000)
        await other._timekeeper.aclose()  # type: ignore[union-attr]
        host_clock.pass_time(1006)

        async def is_ended() -> bool:
            return (await watcher.record(sandbox.id)).cause is Cause.LIFETIME

        await until(is_ended)


async def test_one_timer_is_all_that_waits_and_none_is_left_behind(tmp_path: Path, mock: Mock) -> None:
    before = asyncio.all_tasks()
    async with AsyncSandboxManager(config_of(tmp_path), providers={"mock": mock}) as manager:
        sandbox = await manager.create(lifetime=1000)
        assert manager._timekeeper is not None
        assert manager._timekeeper._timer is not None
        assert manager._timekeeper._looking is None
        await manager.destroy(sandbox.id)
    assert manager._timekeeper is None
    assert asyncio.all_tasks() == before


async def test_a_manager_that_is_closed_waits_for_what_it_is_ending_and_looks_no_more() -> None:
    looks: list[str] = []
    began = asyncio.Event()

    async def look() -> float:
        looks.append("begun")
        began.set()
        await asyncio.sleep(0)
        looks.append("done")
        return 0.0

    keeper = Timekeeper(look)
    keeper.look_in(1000)
    keeper.look_in(0)
    await began.wait()
    await keeper.aclose()
    keeper.look_in(0)
    await asyncio.sleep(0.01)
    assert looks == ["begun", "done"]


async def test_a_create_that_takes_longer_than_the_lifetime_is_not_looked_at_all_the_time(
    store: Store, manager: AsyncSandboxManager, host_clock: HostClock
) -> None:
    await store.reserve(id := new_id(), record(spec={"lifetime_s": 10}).spec, owner=FAR, boot_id="")
    host_clock.pass_time(1000)
    assert await manager.repair.unfinished() > 1
    await store.change(await store.get(id), to=State.DESTROYED, cause=Cause.USER)
