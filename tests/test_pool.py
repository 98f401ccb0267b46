"""Pools: what they plan, what they hand out, and that they leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from state_folders import boxes

from skerry import config
from skerry.errors import Conflict, InvalidSpec, WrongState
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Record
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.pool import claim
from skerry.pool import pool as pool_module
from skerry.pool.pool import AsyncSandboxPool, PoolState, Warm, plan, retry_at
from skerry.providers.mock import Mock

pytestmark = pytest.mark.usefixtures("own_registry")

DEADLINE_S = 20.0
PROGRAM = (sys.executable, "-c", "from skerry.cli import main; main()")

NOW = 1000.0


# the plan

ages = st.lists(st.floats(min_value=0.0, max_value=200.0), max_size=12)
states = st.builds(
    lambda ages, **fields: PoolState(
        ready=tuple(Warm(SandboxId(str(n)), NOW - age) for n, age in enumerate(sorted(ages, reverse=True))),
        max_age_s=100.0,
        **fields,
    ),
    ages,
    size=st.integers(1, 10),
    max_boots=st.integers(1, 5),
    booting=st.integers(0, 8),
    failures=st.integers(0, 40),
    failed_at=st.floats(min_value=NOW - 100, max_value=NOW),
    closing=st.booleans(),
)


@given(states)
def test_a_plan_never_makes_more_than_the_size_nor_boots_more_than_allowed_at_once(state: PoolState) -> None:
    steps = plan(state, NOW)
    kept = len(state.ready) - len(steps.drops)
    assert kept <= state.size
    if boots := steps.boots:
        assert kept + state.booting + boots <= state.size
        assert state.booting + boots <= state.max_boots


@given(states)
def test_a_plan_drops_exactly_what_is_too_old_or_too_many_and_nothing_twice(state: PoolState) -> None:
    gone = plan(state, NOW).drops
    assert len(gone) == len(set(gone))
    assert set(gone) <= {each.id for each in state.ready}
    too_old = {each.id for each in state.ready if NOW - each.since >= state.max_age_s}
    assert too_old <= set(gone)
    if not state.closing and len(state.ready) <= state.size:
        assert too_old == set(gone)


@given(states)
def test_a_plan_says_once_when_to_look_again_and_that_is_soon_but_not_at_once(state: PoolState) -> None:
    assert NOW < plan(state, NOW).look_at <= NOW + pool_module.WATCH_S


@given(states)
def test_a_pool_that_closes_boots_nothing_and_drops_all(state: PoolState) -> None:
    steps = plan(PoolState(size=state.size, max_boots=1, max_age_s=9, ready=state.ready, closing=True), NOW)
    assert steps.boots == 0
    assert steps.drops == [each.id for each in state.ready]


@given(states)
def test_after_a_failure_nothing_boots_until_its_time_and_then_one_at_a_time(state: PoolState) -> None:
    boots = plan(state, NOW).boots
    if state.failures:
        assert boots <= (retry_at(state) <= NOW)


def test_each_failure_doubles_the_wait_up_to_a_minute() -> None:
    waits = [retry_at(PoolState(size=1, max_boots=1, max_age_s=1, failures=n)) for n in range(1, 12)]
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == 60.0


@given(states)
def test_plans_that_are_carried_out_fill_the_pool_and_then_rest(state: PoolState) -> None:
    state = PoolState(size=state.size, max_boots=state.max_boots, max_age_s=100.0, ready=state.ready)
    for turn in range(30):
        steps = plan(state, NOW)
        kept = tuple(each for each in state.ready if each.id not in steps.drops)
        fresh = tuple(Warm(SandboxId(f"new-{turn}-{n}"), NOW) for n in range(steps.boots))
        state = PoolState(size=state.size, max_boots=state.max_boots, max_age_s=100.0, ready=kept + fresh)
    assert len(state.ready) == state.size
    assert (plan(state, NOW).drops, plan(state, NOW).boots) == ([], 0)


# the key


def test_specs_share_a_key_if_they_differ_only_in_what_is_bound_at_hand_out() -> None:
    plain = Spec.of(memory="512M")
    bound = plain.but(name="a", env={"A": "b"}, labels={"c": "d"}, lifetime="1h", idle=5, language="node")
    assert claim.key_of(plain) == claim.key_of(bound)
    assert claim.key_of(plain) != claim.key_of(plain.but(project="p"))
    for other in (plain.but(memory="1G"), plain.but(provider="mock"), plain.but(network="host"), plain.but(user="1")):
        assert claim.key_of(plain) != claim.key_of(other)


# the acting half, on the mock


@pytest.fixture
def mock() -> Mock:
    return Mock()


@pytest.fixture
async def manager(mock: Mock) -> AsyncIterator[AsyncSandboxManager]:
    """A manager on the mock, which has to be left with nothing warm."""
    async with open_manager(mock) as manager:
        yield manager
        assert [record.id for record in await manager.list() if claim.LABEL in record.spec.labels] == []


@asynccontextmanager
async def open_manager(mock: Mock) -> AsyncIterator[AsyncSandboxManager]:
    settings = config.load({"provider": "mock"})
    async with AsyncSandboxManager(settings, providers={"mock": mock}) as manager:
        yield manager


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(DEADLINE_S / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen")


async def warm_ids(manager: AsyncSandboxManager, pool: AsyncSandboxPool) -> list[SandboxId]:
    await pool.wait_for_full(DEADLINE_S)
    return list(pool._ready)


async def test_the_one_that_waited_longest_is_handed_out_first_and_another_takes_its_place(
    manager: AsyncSandboxManager,
) -> None:
    async with AsyncSandboxPool(manager, size=3, max_boots=1) as pool:
        waiting = await warm_ids(manager, pool)
        taken = [(await pool.acquire()).id for _ in range(2)]
        assert taken == waiting[:2]
        assert (await warm_ids(manager, pool))[0] == waiting[2]
        stats = pool.stats()
        assert (stats.hits, stats.misses, stats.ready, stats.booting) == (2, 0, 3, 0)
        assert stats.age_max_s >= stats.age_p50_s > 0


async def test_what_waits_ends_with_its_program_and_bears_the_label_of_its_pool(manager: AsyncSandboxManager) -> None:
    async with AsyncSandboxPool(manager, size=1, name="late", env={"A": "b"}, labels={"team": "x"}) as pool:
        (id,) = await warm_ids(manager, pool)
        record = await manager.record(id)
        assert record.ephemeral
        assert record.owner == identity.this_process()
        assert record.spec.labels == {claim.LABEL: pool.key}
        assert (record.name, record.spec.env) == (None, {})


async def test_a_sandbox_becomes_the_callers_with_all_that_is_bound_to_it(manager: AsyncSandboxManager) -> None:
    async with AsyncSandboxPool(manager, size=1, env={"WHO": "pool", "A": "1"}, lifetime="2h") as pool:
        (id,) = await warm_ids(manager, pool)
        sandbox = await pool.acquire(
            name="job", env={"WHO": "me"}, labels={"team": "x"}, project="other", idle=60, language="sh"
        )
        record = await manager.record(id)
        assert sandbox.id == id
        assert set(record.spec.env) == {"WHO"}
        assert "me" not in record.spec.env.values()
        assert (record.name, record.spec.project, record.spec.language) == ("job", "other", "sh")
        assert record.spec.labels == {"team": "x"}
        assert not record.ephemeral
        assert record.ends_at is not None
        assert record.ends_at - record.updated_at == pytest.approx(7200, abs=5)
        assert (await sandbox.call("set_lifetime", {"idle_s": 60}))["idle_s"] == pytest.approx(60, abs=5)
        assert [event.kind async for event in manager.events(sandbox=id)] == ["created", "ready", "acquired"]
    assert (await manager.record("job")).is_live
    await sandbox.destroy()


async def test_the_bound_environment_reaches_commands_also_through_another_handle(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    async with AsyncSandboxPool(manager, size=1, env={"A": "1", "B": "2"}) as pool:
        await pool.wait_for_full(DEADLINE_S)
        sandbox = await pool.acquire(name="job")
        assert (await sandbox.exec("echo $A $B", env={"B": "3"})).text == "1 3\n"
        async with open_manager(mock) as other:
            assert (await other.execute("job", "echo $A $B")).text == "1 2\n"
        await sandbox.destroy()


async def test_an_ephemeral_acquire_stays_with_the_program(manager: AsyncSandboxManager) -> None:
    async with AsyncSandboxPool(manager, size=1) as pool:
        await pool.wait_for_full(DEADLINE_S)
        sandbox = await pool.acquire(ephemeral=True)
        assert (await manager.record(sandbox.id)).ephemeral
        await sandbox.destroy()


async def test_a_dead_one_is_dropped_and_the_next_is_handed_out(manager: AsyncSandboxManager, mock: Mock) -> None:
    async with AsyncSandboxPool(manager, size=3) as pool:
        dead, lost, good = await warm_ids(manager, pool)
        mock.faults.dead_agent(dead)
        mock.faults.lost_box(lost)
        assert (await pool.acquire(name="job")).id == good
        await pool.wait_for_full(DEADLINE_S)
        await until(lambda: dead not in mock.host.boxes)
        assert (pool.stats().hits, pool.stats().discards) == (1, 2)
        for id in (dead, lost):
            record = await manager.wait(id, timeout_s=DEADLINE_S)
            assert (record.state, record.cause) == (State.DESTROYED, Cause.AGENT_LOST)


async def test_one_that_dies_between_the_check_and_the_hand_out_gives_its_place_and_name_to_the_next(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = manager.store.change

    async def change_and_kill(record: Record, **fields: Any) -> Record:
        changed = await change(record, **fields)
        if record.id == first and fields.get("kind") == "acquired":
            mock.faults.dead_agent(first)
        return changed

    async with AsyncSandboxPool(manager, size=2, max_boots=1) as pool:
        first, second = await warm_ids(manager, pool)
        with monkeypatch.context() as patch:
            patch.setattr(manager.store, "change", change_and_kill)
            assert (await pool.acquire(name="job")).id == second
        assert (await manager.record(first)).state is State.DESTROYED
        assert (await manager.record("job")).id == second


async def test_one_that_hangs_is_not_waited_for_long(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "HEALTH_S", 0.05)
    async with AsyncSandboxPool(manager, size=1) as pool:
        (id,) = await warm_ids(manager, pool)
        mock.faults.hang(id)
        async with asyncio.timeout(5):
            sandbox = await pool.acquire()
        assert sandbox.id != id
        await until(lambda: pool.stats().discards == 1)


async def test_without_anything_warm_a_sandbox_is_booted_on_the_spot(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.host.clock.autojump = False
    mock.faults.slow_boot(5)
    async with AsyncSandboxPool(manager, size=1) as pool:
        await until(lambda: len(mock.host.boxes) == 1)
        sandbox = await pool.acquire(name="cold")
        assert (await manager.record("cold")).id == sandbox.id
        assert pool.stats().misses == 1
        await mock.pass_time(5)
        await pool.wait_for_full(DEADLINE_S)


async def test_boots_that_fail_are_tried_again_until_they_work(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(pool_module, "WATCH_S", 0.02)
    mock.faults.fail_create(times=3)
    async with AsyncSandboxPool(manager, size=2, max_boots=1) as pool:
        await pool.wait_for_full(DEADLINE_S)
        stats = pool.stats()
        assert (stats.failures, stats.ready, stats.retry_in_s) == (3, 2, 0.0)
        assert "told to fail" in stats.last_error


async def test_while_boots_fail_a_pool_waits_and_says_for_how_long(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.fail_create(RuntimeError("not even one of ours"), times=1)  # type: ignore[arg-type]
    async with AsyncSandboxPool(manager, size=4, max_boots=1) as pool:
        await until(lambda: pool.stats().failures == 1)
        stats = pool.stats()
        assert (stats.ready, stats.last_error) == (0, "not even one of ours")
        assert 0 < stats.retry_in_s <= 0.5
        assert (await pool.acquire()).id in mock.host.boxes


async def test_a_taken_name_is_an_error_and_the_sandbox_stays_warm(manager: AsyncSandboxManager) -> None:
    holder = await manager.create(name="taken")
    async with AsyncSandboxPool(manager, size=1) as pool:
        (id,) = await warm_ids(manager, pool)
        with pytest.raises(Conflict, match="taken"):
            await pool.acquire(name="taken")
        assert (await pool.acquire(name="free")).id == id
    await holder.destroy()


async def test_one_that_is_too_old_is_replaced(manager: AsyncSandboxManager, mock: Mock) -> None:
    async with AsyncSandboxPool(manager, size=1, max_age_s=0.2) as pool:
        (id,) = await warm_ids(manager, pool)
        await until(lambda: pool.stats().discards >= 1)
        assert id not in await warm_ids(manager, pool)
        await until(lambda: id not in mock.host.boxes)


async def test_fifty_acquires_at_once_get_fifty_different_sandboxes(manager: AsyncSandboxManager) -> None:
    async with AsyncSandboxPool(manager, size=20, max_boots=4) as pool:
        await pool.wait_for_full(DEADLINE_S)
        sandboxes = await asyncio.gather(*(pool.acquire(name=f"job-{n}") for n in range(50)))
        assert len({sandbox.id for sandbox in sandboxes}) == 50
        stats = pool.stats()
        assert stats.hits + stats.misses == 50
        assert stats.hits >= 20
        await asyncio.gather(*(sandbox.destroy() for sandbox in sandboxes))


async def test_nothing_is_left_of_acquires_that_are_cancelled_at_any_step(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    async with AsyncSandboxPool(manager, size=2) as pool:
        for turns in range(0, 40, 2):
            await pool.wait_for_full(DEADLINE_S)
            acquiring = asyncio.create_task(pool.acquire())
            for _ in range(turns):
                await asyncio.sleep(0.0001)
            acquiring.cancel()
            with suppress(asyncio.CancelledError):
                await (await acquiring).destroy()
    assert await manager.list() == []
    assert mock.host.boxes == {}


async def test_closing_in_the_middle_of_boots_waits_for_them_and_leaves_nothing(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    mock.host.clock.autojump = False
    mock.faults.slow_boot(5, times=3)
    pool = AsyncSandboxPool(manager, size=5, max_boots=3)
    async with pool:
        await until(lambda: len(mock.host.boxes) == 3)
        closing = asyncio.create_task(pool.__aexit__())
        await until(lambda: pool._closing)
        with pytest.raises(WrongState, match="not open"):
            await pool.acquire()
        assert not closing.done()
        await mock.pass_time(5)
        await asyncio.wait_for(closing, DEADLINE_S)
    assert mock.host.boxes == {}
    assert await manager.list() == []


async def test_cancelling_the_program_of_a_pool_leaves_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    async def program() -> None:
        async with AsyncSandboxPool(manager, size=5):
            await asyncio.sleep(0.02)
            await asyncio.Event().wait()

    for wait_s in (0.0, 0.005, 0.03):
        task = asyncio.create_task(program())
        await asyncio.sleep(wait_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert mock.host.boxes == {}
        assert await manager.list() == []


async def test_a_pool_is_refused_sizes_that_make_no_sense_and_acquires_when_it_is_not_open(
    manager: AsyncSandboxManager,
) -> None:
    with pytest.raises(InvalidSpec, match="size"):
        AsyncSandboxPool(manager, size=0)
    pool = AsyncSandboxPool(manager, size=1)
    with pytest.raises(WrongState):
        await pool.acquire()
    async with pool:
        with pytest.raises(WrongState):
            await pool.__aenter__()


# claims of others


async def test_another_manager_claims_the_oldest_and_the_pool_makes_another(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    async with AsyncSandboxPool(manager, size=2, max_boots=1) as pool:
        first, second = await warm_ids(manager, pool)
        async with open_manager(mock) as other:
            mine = Spec.of(provider="mock", name="mine", env={"A": "1"}, lifetime=60)
            assert await claim.claim(other, mine) is None  # its data is found by its name, and a warm one has none
            claimed = await claim.claim(other, mine.but(data=False))
            assert claimed is not None
            assert claimed.id == first
            record = await other.record("mine")
            assert (record.ephemeral, record.spec.labels) == (False, {})
        await until(lambda: pool.stats().claimed == 1)
        assert (await warm_ids(manager, pool))[0] == second
    assert (await manager.record("mine")).is_live


async def test_a_claim_takes_only_what_has_the_same_box(manager: AsyncSandboxManager, mock: Mock) -> None:
    async with AsyncSandboxPool(manager, size=1, memory="64M") as pool:
        await pool.wait_for_full(DEADLINE_S)
        assert await claim.claim(manager, Spec.of(provider="mock", memory="128M")) is None
        cold = await claim.claim_or_create(manager, Spec.of(provider="mock", memory="128M"), ephemeral=True)
        assert (await manager.record(cold.id)).ephemeral
        claimed = await claim.claim_or_create(manager, Spec.of(provider="mock", memory="64M"))
        assert (await claimed.exec("echo hi")).text == "hi\n"


async def test_a_claim_removes_what_does_not_answer(manager: AsyncSandboxManager, mock: Mock) -> None:
    async with AsyncSandboxPool(manager, size=2, max_boots=1) as pool:
        dead, good = await warm_ids(manager, pool)
        mock.faults.dead_agent(dead)
        claimed = await claim.claim(manager, Spec(provider="mock"))
        assert claimed is not None
        assert claimed.id == good
        assert (await manager.record(dead)).cause is Cause.AGENT_LOST
        assert dead not in mock.host.boxes


async def test_nobody_gets_what_another_has_when_all_reach_for_it_at_once(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    async with open_manager(mock) as other, AsyncSandboxPool(manager, size=10, max_boots=4) as pool:
        await pool.wait_for_full(DEADLINE_S)
        reached = await asyncio.gather(
            *(pool.acquire() for _ in range(10)), *(claim.claim(other, Spec(provider="mock")) for _ in range(10))
        )
        ids = [sandbox.id for sandbox in reached if sandbox is not None]
        assert len(ids) == len(set(ids)) >= 10
        for id in ids:
            assert claim.LABEL not in (await manager.record(id)).spec.labels


# on the default provider, with programs of their own


CLAIM = """
import asyncio
from skerry.pool import claim
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId, Spec

async def main():
    async with AsyncSandboxManager() as manager:
        sandbox = await claim.claim(manager, Spec.of(name="mine"))
        print(sandbox.id, (await sandbox.exec("echo $((6 * 7))")).text)

asyncio.run(main())
"""


async def test_another_program_claims_a_real_sandbox_which_outlives_the_pool(folder: Path) -> None:
    async with AsyncSandboxManager() as manager:
        async with AsyncSandboxPool(manager, size=2, max_boots=1) as pool:
            first, _ = await warm_ids(manager, pool)
            program = await asyncio.create_subprocess_exec(sys.executable, "-c", CLAIM, stdout=subprocess.PIPE)
            out, _ = await asyncio.wait_for(program.communicate(), DEADLINE_S)
            assert out.decode().split() == [first, "42"]
            sandbox = await pool.acquire(name="here")
            assert (await sandbox.exec("echo hi")).text == "hi\n"
            await sandbox.destroy()
        assert boxes(folder) == [first]
        assert (await manager.execute("mine", "echo still")).text == "still\n"
        await manager.destroy("mine")


def test_the_program_that_keeps_a_pool_tells_its_state_and_clears_up_at_ctrl_c(folder: Path) -> None:
    with subprocess.Popen([*PROGRAM, "pool", "run", "--size", "2", "--json"], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        try:
            stats = next_stats(program, lambda stats: stats["ready"] == 2)
            assert stats["size"] == 2
            claimed = subprocess.run([sys.executable, "-c", CLAIM], capture_output=True, check=True, timeout=30)
            next_stats(program, lambda stats: stats["claimed"] == 1 and stats["ready"] == 2)
            assert len(boxes(folder)) == 3
        finally:
            program.send_signal(signal.SIGINT)
        assert program.wait(30) == 130
    assert boxes(folder) == [claimed.stdout.decode().split()[0]]
    subprocess.run([*PROGRAM, "rm", "mine"], check=True, timeout=30, capture_output=True)


def test_nothing_warm_is_left_when_the_program_was_killed_and_another_begins(folder: Path) -> None:
    with subprocess.Popen([*PROGRAM, "pool", "run", "--size", "2", "--json"], stdout=subprocess.PIPE) as program:
        try:
            next_stats(program, lambda stats: stats["ready"] == 2)
        finally:
            program.kill()
    assert len(boxes(folder)) == 2

    async def begin() -> None:
        async with AsyncSandboxManager() as manager:
            assert await claim.claim(manager, Spec()) is None

    asyncio.run(begin())


def next_stats(program: subprocess.Popen[bytes], wanted: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    assert program.stdout is not None
    for line in program.stdout:
        stats: dict[str, int] = json.loads(line)
        if wanted(stats):
            return stats
    raise AssertionError("the program ended")
