"""Every end of a sandbox is whole, has one cause, and survives whoever began it."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from skerry import clock
from skerry.errors import (
    InvalidSpec,
    NotFound,
    ProviderError,
    SkerryError,
    WrongState,
)
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter, Owner
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.providers.mock import Context, Mock
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.store import Store

from .world import ENDED, HostClock, config_of, in_agreement, until

# ending


async def test_a_destroyed_sandbox_is_gone_and_its_end_is_written_down(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    sandbox = await manager.create(name="done")
    await sandbox.destroy()
    record = await manager.record(sandbox.id)
    assert (record.state, record.cause) == (State.DESTROYED, Cause.USER)
    assert not await mock.discover()
    with pytest.raises(NotFound):
        await manager.get(sandbox.id)
    with pytest.raises(WrongState):
        await sandbox.exec("true")


async def test_destroying_twice_is_quiet(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    await manager.destroy(sandbox.id)
    await manager.destroy(sandbox.id)
    await sandbox.destroy()
    kinds = [event.kind async for event in manager.events(sandbox=sandbox.id)]
    assert kinds == ["created", "ready", "doomed", "destroyed"]


async def test_ten_that_destroy_the_same_one_all_succeed(
    manager: AsyncSandboxManager, tmp_path: Path, mock: Mock
) -> None:
    sandbox = await manager.create()
    async with AsyncSandboxManager(config_of(tmp_path), providers={"mock": mock}) as other:
        await asyncio.gather(*(each.destroy(sandbox.id) for each in (manager, other) * 5))
    kinds = [event.kind async for event in manager.events(sandbox=sandbox.id)]
    assert kinds.count("destroyed") == 1


async def test_a_sandbox_can_be_destroyed_while_it_is_made(manager: AsyncSandboxManager, mock: Mock) -> None:
    create, made = mock.create, asyncio.Event()
    go_on = asyncio.Event()

    async def slow(id: object, spec: object) -> None:
        made.set()
        await go_on.wait()
        await create(id, spec)  # type: ignore[arg-type]

    mock.create = slow  # type: ignore[method-assign, assignment]
    creating = asyncio.create_task(manager.create(name="early"))
    await made.wait()
    await manager.destroy("early")
    go_on.set()
    with pytest.raises(SkerryError):
        await creating
    (record,) = await manager.list(ENDED)
    assert (record.state, record.cause) == (State.DESTROYED, Cause.USER)
    assert not await mock.discover()


async def test_a_sandbox_can_be_destroyed_while_it_waits_for_its_boot(tmp_path: Path, store: Store, mock: Mock) -> None:
    config = config_of(tmp_path, max_boots=1)
    create, go_on, began = mock.create, asyncio.Event(), asyncio.Event()

    async def slow(id: object, spec: object) -> None:
        began.set()
        await go_on.wait()
        await create(id, spec)  # type: ignore[arg-type]

    mock.create = slow  # type: ignore[method-assign, assignment]
    async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
        first = asyncio.create_task(manager.create())
        await began.wait()
        waiting = asyncio.create_task(manager.create(name="waits"))
        await until(lambda: manager.exists("waits"))
        await manager.destroy("waits")
        go_on.set()
        await first
        async with asyncio.timeout(5):
            with pytest.raises(SkerryError):
                await waiting
        assert set(await mock.discover()) == {(await first).id}


async def test_a_create_cancelled_at_any_moment_leaves_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    kept = set()
    for steps in range(60):
        creating = asyncio.create_task(manager.create())
        for _ in range(steps):
            await asyncio.sleep(0.0002)
        creating.cancel()
        with suppress(asyncio.CancelledError):
            kept.add((await creating).id)
    assert {record.id for record in await manager.list()} == kept
    assert set(await mock.discover()) == kept


@pytest.mark.parametrize("call", ["reserve", "boot_slot", "change"])
async def test_a_create_cancelled_while_the_registry_is_written_leaves_nothing(
    manager: AsyncSandboxManager, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The database does its work whether or not somebody still waits for it."""
    original = getattr(store, call)

    async def cancel_meanwhile(*args: object, **options: object) -> object:
        monkeypatch.setattr(store, call, original)
        writing = asyncio.ensure_future(original(*args, **options))
        task.cancel()
        return await asyncio.shield(writing)

    monkeypatch.setattr(store, call, cancel_meanwhile)
    task = asyncio.create_task(manager.create(name="cancelled"))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not await manager.list()
    assert not await mock.discover()


async def test_all_are_destroyed_and_each_failure_is_told(manager: AsyncSandboxManager, mock: Mock) -> None:
    bad, good = await manager.create(labels={"n": "1"}), await manager.create(labels={"n": "2"})
    destroy = mock.destroy

    async def fail_for_one(id: object, *, volumes: bool = False) -> None:
        if id == bad.id:
            raise ProviderError("it hangs in the kernel")
        await destroy(id, volumes=volumes)  # type: ignore[arg-type]

    mock.destroy = fail_for_one  # type: ignore[method-assign, assignment]
    outcomes = {each.id: each.error for each in await manager.destroy_all()}
    assert outcomes.keys() == {bad.id, good.id}
    assert outcomes[good.id] is None
    assert isinstance(outcomes[bad.id], ProviderError)
    assert (await manager.record(bad.id)).doomed
    mock.destroy = destroy  # type: ignore[method-assign]
    await manager.reconcile()
    assert not await manager.list()
    assert (await manager.record(bad.id)).cause is Cause.USER


async def test_only_those_that_fit_are_destroyed(manager: AsyncSandboxManager) -> None:
    kept = await manager.create(project="kept")
    await manager.create()
    await manager.destroy_all(Filter(project="default"))
    assert [record.id for record in await manager.list()] == [kept.id]


async def test_all_can_be_destroyed_while_others_are_made(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.slow_boot(1, times=10)
    creates = [asyncio.create_task(manager.create()) for _ in range(20)]
    for _ in range(5):
        await manager.destroy_all()
    made = await asyncio.gather(*creates, return_exceptions=True)
    assert all(isinstance(each, AsyncSandbox | SkerryError) for each in made)
    await in_agreement(manager, mock)
    assert all(outcome.error is None for outcome in await manager.destroy_all())
    assert not await mock.discover()


async def test_a_cancelled_destroy_is_finished_by_the_next_reconcile(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    destroy, began = mock.destroy, asyncio.Event()

    async def hang(id: object, *, volumes: bool = False) -> None:
        began.set()
        await asyncio.Event().wait()

    mock.destroy = hang  # type: ignore[method-assign, assignment]
    task = asyncio.create_task(manager.destroy(sandbox.id))
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    mock.destroy = destroy  # type: ignore[method-assign]
    assert (await manager.record(sandbox.id)).doomed
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).cause is Cause.USER
    assert not await mock.discover()


# time


async def test_a_lifetime_is_told_kept_and_the_cause(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock
) -> None:
    sandbox = await manager.create()
    assert (await manager.explain(sandbox.id)).why == ["nothing ends it but you"]
    await manager.set_lifetime(sandbox.id, "100s")
    explained = await manager.explain(sandbox.id)
    assert explained.ends_at == pytest.approx(time.time() + 100, abs=5)
    assert "lifetime" in explained.why[0]
    await mock.pass_time(99)
    assert await manager.is_healthy(sandbox.id)
    await mock.pass_time(2)
    host_clock.pass_time(101)
    await manager.reconcile()
    record = await manager.record(sandbox.id)
    assert (record.state, record.cause) == (State.DESTROYED, Cause.LIFETIME)
    assert not await mock.discover()
    assert (await manager.explain(sandbox.id)).why == ["it ended: lifetime"]


async def test_an_idle_end_is_told_apart(manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock) -> None:
    sandbox = await manager.create(idle=50)
    process = await sandbox.start(["sleep", "200"], background=True)
    explained = await manager.explain(sandbox.id)
    assert (explained.running, explained.idle_s, explained.reachable) == (1, 50, True)
    await process.kill()
    await sandbox.close()
    await mock.pass_time(60)
    host_clock.pass_time(60)
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).cause is Cause.IDLE


async def test_a_lifetime_can_be_taken_back(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create(lifetime=10)
    await sandbox.set_lifetime(None)
    await mock.pass_time(1000)
    assert await manager.is_healthy(sandbox.id)
    assert (await manager.record(sandbox.id)).ends_at is None


# ends that nobody asked for


async def test_a_box_that_died_is_cleared_away_with_its_cause(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    mock.faults.dead_box(sandbox.id)
    assert not await manager.is_healthy(sandbox.id)
    await manager.reconcile()
    record = await manager.record(sandbox.id)
    assert (record.state, record.cause) == (State.DESTROYED, Cause.BOX_DIED)
    assert not await mock.discover()


async def test_a_box_that_vanished_is_lost_and_found_again(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    box = mock.host.boxes.pop(sandbox.id)
    await manager.reconcile()
    record = await manager.record(sandbox.id)
    assert (record.state, record.cause) == (State.LOST, Cause.BOX_DIED)
    mock.host.boxes[sandbox.id] = box
    await manager.reconcile()
    record = await manager.record(sandbox.id)
    assert (record.state, record.cause) == (State.READY, None)
    assert (await manager.execute(sandbox.id, "true")).ok


async def test_a_restart_of_the_host_is_recognised(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock
) -> None:
    gone, half = await manager.create(), await manager.create()
    mock.faults.lost_box(gone.id)
    mock.faults.dead_box(half.id)
    host_clock.boot = "the next boot"
    await manager.reconcile()
    assert (await manager.record(gone.id)).cause is Cause.HOST_RESTARTED
    assert (await manager.record(half.id)).cause is Cause.HOST_RESTARTED


async def test_an_ephemeral_sandbox_ends_with_its_program_and_a_kept_one_does_not(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ephemeral, kept = await manager.create(ephemeral=True), await manager.create()
    await manager.reconcile()
    assert await manager.count() == 2
    monkeypatch.setattr(identity, "is_alive", lambda owner: False)
    await manager.reconcile()
    assert (await manager.record(ephemeral.id)).cause is Cause.OWNER_DIED
    assert set(await mock.discover()) == {kept.id}
    assert (await manager.execute(kept.id, "true")).ok


async def test_what_a_dead_program_left_half_done_is_finished_when_a_manager_opens(
    manager: AsyncSandboxManager, store: Store, tmp_path: Path, mock: Mock
) -> None:
    dead = Owner(identity.host(), 2**22 + 1, 1)
    for id in (new_id(), new_id()):
        await store.reserve(id, Spec(provider="mock"), owner=dead, boot_id=clock.boot_id())
        await mock.create(id, Spec(provider="mock"))
    async with AsyncSandboxManager(config_of(tmp_path), providers={"mock": mock}) as fresh:
        assert not await fresh.list()
        assert {record.cause for record in await fresh.list(ENDED)} == {Cause.CREATION_FAILED}
    assert not await mock.discover()


async def test_a_create_whose_undo_failed_is_cleared_by_reconcile(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.fail_create()
    destroy = mock.destroy

    async def fail(id: object, *, volumes: bool = False) -> None:
        raise ProviderError("not now")

    mock.destroy = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(SkerryError):
        await manager.create()
    mock.destroy = destroy  # type: ignore[method-assign]
    await manager.reconcile()
    assert not await mock.discover()
    assert not await manager.list()


# grace


async def _handler(context: Context) -> None:
    """Does its last work when it is asked to end, which takes a second of the box's time."""
    asked = asyncio.Event()
    context.on_signal(signal.SIGTERM, asked.set)
    await context.print("ready")
    with context.waiting():
        await asked.wait()
    await context.sleep(1)
    await context.print("bye")


async def _stubborn(context: Context) -> None:
    context.on_signal(signal.SIGTERM, None)
    await context.print("ready")
    await context.sleep(10_000)


async def _start(sandbox: AsyncSandbox, program: str) -> AsyncProcess:
    process = await sandbox.start([program])
    async for _, data in process:
        assert data == b"ready\n"
        return process
    raise AssertionError("it ended before it was ready")


async def _rest_of(process: AsyncProcess) -> bytes:
    said = b""
    with suppress(SkerryError):
        async for _, data in process:
            said += data
    return said


@pytest.mark.parametrize("verb", ["destroy", "destroy_all", "stop", "sandbox"])
async def test_processes_are_asked_to_end_before_they_are_killed(
    manager: AsyncSandboxManager, mock: Mock, verb: str
) -> None:
    mock.host.programs["handler"] = _handler
    sandbox = await manager.create()
    process = await _start(sandbox, "handler")
    acts = {
        "destroy": lambda: manager.destroy(sandbox.id),
        "destroy_all": lambda: manager.destroy_all(),
        "stop": lambda: manager.stop(sandbox.id),
        "sandbox": lambda: sandbox.destroy(),
    }
    await acts[verb]()
    assert await _rest_of(process) == b"bye\n"


@pytest.mark.parametrize("grace_s", [0, 0.05])
async def test_what_is_left_when_the_grace_is_over_is_killed(
    manager: AsyncSandboxManager, mock: Mock, grace_s: float
) -> None:
    mock.host.programs["stubborn"] = _stubborn
    sandbox = await manager.create()
    await _start(sandbox, "stubborn")
    await manager.destroy(sandbox.id, grace_s=grace_s)
    assert not mock.host.boxes


async def test_no_grace_is_no_signal_to_end(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.host.programs["handler"] = _handler
    sandbox = await manager.create()
    process = await _start(sandbox, "handler")
    await manager.destroy(sandbox.id, grace_s=0)
    assert await _rest_of(process) == b""


@pytest.mark.parametrize("fault", ["hang", "garbage_frames", "dead_agent", "drop_stream"])
async def test_an_agent_that_hangs_or_lies_does_not_keep_its_box_from_its_end(
    manager: AsyncSandboxManager, mock: Mock, fault: str
) -> None:
    sandbox = await manager.create()
    await sandbox.ping()
    getattr(mock.faults, fault)(sandbox.id)
    await manager.destroy(sandbox.id, grace_s=0.1)
    assert not mock.host.boxes


@pytest.mark.parametrize("cause", [Cause.LIFETIME, Cause.AGENT_LOST])
async def test_an_end_that_nobody_asked_for_has_no_grace(
    manager: AsyncSandboxManager, mock: Mock, cause: Cause
) -> None:
    mock.host.programs["handler"] = _handler
    sandbox = await manager.create()
    process = await _start(sandbox, "handler")
    await manager.destroy(sandbox.id, cause=cause)
    assert await _rest_of(process) == b""


@pytest.mark.parametrize("grace_s", [-1, 3601, float("nan")])
async def test_a_grace_out_of_range_is_refused_and_nothing_ends(manager: AsyncSandboxManager, grace_s: float) -> None:
    sandbox = await manager.create()
    with pytest.raises(InvalidSpec, match="grace"):
        await manager.destroy(sandbox.id, grace_s=grace_s)
    with pytest.raises(InvalidSpec, match="grace"):
        await manager.stop(sandbox.id, grace_s)
    assert await sandbox.is_healthy()


async def test_until_the_grace_is_over_nothing_is_decided(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.hang(sandbox_id := (await manager.create()).id)
    ending = asyncio.create_task(manager.destroy(sandbox_id, grace_s=60))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert not (await manager.record(sandbox_id)).doomed
    await manager.destroy(sandbox_id, grace_s=0)
