"""Making, finding and using sandboxes: each method of the manager, on the mock and a real SQLite registry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skerry.errors import (
    CreateFailed,
    InvalidSpec,
    NotFound,
    SkerryError,
    Unsupported,
    WrongState,
)
from skerry.manager import identity
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter
from skerry.model.spec import Spec, new_id
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.store import Store

from .world import ENDED, Folders, config_of

# making and finding


async def test_a_created_sandbox_works_and_is_in_the_registry(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create(name="first", labels={"team": "red"})
    assert (await sandbox.exec("echo hello")).stdout == b"hello\n"
    record = await manager.record("first")
    assert (record.id, record.state, record.owner) == (sandbox.id, State.READY, identity.this_process())
    assert sandbox.state is State.READY
    assert sandbox.enforced["memory"].by == "simulation"


async def test_a_default_sandbox_is_as_the_configuration_has_it(tmp_path: Path, store: Store, mock: Mock) -> None:
    config = config_of(tmp_path, lifetime="2h", project="ours")
    async with AsyncSandboxManager(config, store=store, providers={"mock": mock}) as manager:
        sandbox = await manager.create_default()
        assert (sandbox.spec.lifetime_s, sandbox.spec.project, sandbox.spec.provider) == (7200, "ours", "mock")
        assert manager.config is config


async def test_a_sandbox_is_found_by_id_prefix_and_name(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create(name="finder")
    for reference in (sandbox.id, sandbox.id[:8], "finder"):
        assert (await manager.get(reference)).id == sandbox.id
        assert await manager.exists(reference)
    assert not await manager.exists(new_id())
    with pytest.raises(NotFound):
        await manager.get("nobody")


async def test_lists_and_counts_fit_their_filter(manager: AsyncSandboxManager) -> None:
    red = await manager.create(labels={"team": "red"}, project="a")
    await manager.create(labels={"team": "blue"}, project="b")
    gone = await manager.create(labels={"team": "red"})
    await manager.destroy(gone.id)
    assert [record.id for record in await manager.list(Filter(labels={"team": "red"}))] == [red.id]
    assert await manager.count() == 2
    assert await manager.count(Filter(project="b")) == 1
    assert await manager.count(ENDED) == 3
    assert await manager.count(Filter(states=frozenset({State.DESTROYED}))) == 1


async def test_the_short_ways_do_what_the_sandbox_does(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.reply("python", "print(1)", stdout="1\n")
    id = (await manager.create()).id
    assert (await manager.execute(id, ["echo", "x"])).stdout == b"x\n"
    assert (await manager.execute_code(id, "python", "print(1)")).stdout == b"1\n"
    await manager.write_file(id, "note", "text")
    assert await manager.read_file(id, "note") == b"text"
    assert [each.name for each in await manager.list_dir(id)] == ["note"]
    assert await manager.is_healthy(id)
    async with manager.with_sandbox(id) as sandbox:
        assert (await sandbox.exec("cat note")).stdout == b"text"
    assert await manager.exists(id)


async def test_another_manager_uses_what_the_first_made(
    manager: AsyncSandboxManager, tmp_path: Path, store: Store, mock: Mock
) -> None:
    sandbox = await manager.create(name="shared")
    await sandbox.files.write("note", "mine")
    async with AsyncSandboxManager(config_of(tmp_path), providers={"mock": mock}) as other:
        assert await other.read_file("shared", "note") == b"mine"
        await other.destroy("shared")
    assert not await manager.exists(sandbox.id)
    with pytest.raises(SkerryError):
        await manager.execute(sandbox.id, "true")


async def test_a_wrong_request_leaves_no_record(manager: AsyncSandboxManager) -> None:
    with pytest.raises(InvalidSpec):
        await manager.create(Spec(provider="mock"), name="x")
    with pytest.raises(Unsupported):
        await manager.create(network="bridge")
    with pytest.raises(SkerryError):
        await manager.create(provider="nowhere")
    assert await manager.count(ENDED) == 0


async def test_a_failed_create_leaves_its_log_and_nothing_else(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.fail_create(CreateFailed("it did not come up", log="kernel: no init found"))
    with pytest.raises(CreateFailed, match="no init"):
        await manager.create(name="again")
    (record,) = await manager.list(ENDED)
    assert (record.state, record.cause) == (State.DESTROYED, Cause.CREATION_FAILED)
    assert "kernel: no init found" in record.detail
    assert not await mock.discover()
    await manager.create(name="again")


async def test_managing_needs_an_open_manager(tmp_path: Path) -> None:
    with pytest.raises(WrongState, match="async with"):
        await AsyncSandboxManager(config_of(tmp_path)).list()


# nobody waits for another's guest


async def test_a_guest_that_takes_its_time_delays_nobody(manager: AsyncSandboxManager, mock: Mock) -> None:
    go_on = asyncio.Event()

    @mock.program("slow")
    async def slow(ctx: object) -> int:
        await go_on.wait()
        return 0

    busy, other = await manager.create(), await manager.create()
    running = asyncio.create_task(manager.execute(busy.id, ["slow"]))
    same = asyncio.create_task(manager.execute(busy.id, ["slow"]))
    async with asyncio.timeout(5):
        assert (await manager.execute(busy.id, ["echo", "beside it"])).ok
        assert await manager.is_healthy(busy.id)
        assert (await manager.execute(other.id, "true")).ok
        assert await manager.count() == 2
        await manager.create(name="third")
        await manager.reconcile()
        await manager.destroy(other.id)
        await manager.destroy("third")
        assert not running.done()
        go_on.set()
        assert (await running).ok
        assert (await same).ok


async def test_a_create_that_takes_its_time_delays_nobody(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    create, go_on, began = mock.create, asyncio.Event(), asyncio.Event()

    async def slow(id: object, spec: Spec) -> None:
        if spec.name == "slow":
            began.set()
            await go_on.wait()
        await create(id, spec)  # type: ignore[arg-type]

    mock.create = slow  # type: ignore[method-assign, assignment]
    creating = asyncio.create_task(manager.create(name="slow"))
    await began.wait()
    async with asyncio.timeout(5):
        await manager.create(name="quick")
        assert (await manager.execute(sandbox.id, "true")).ok
        await manager.destroy(sandbox.id)
        assert (await manager.record("slow")).state is State.CREATING
        go_on.set()
        await creating


# pausing and stopping


async def test_a_sandbox_is_paused_and_stopped_where_its_provider_can(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    await sandbox.files.write("note", "kept")
    await manager.pause(sandbox.id)
    assert (await manager.record(sandbox.id)).state is State.PAUSED
    with pytest.raises(WrongState):
        await manager.execute(sandbox.id, "true")
    await manager.resume(sandbox.id)
    await manager.stop(sandbox.id)
    assert (await manager.record(sandbox.id)).state is State.STOPPED
    await manager.start(sandbox.id)
    assert await manager.read_file(sandbox.id, "note") == b"kept"
    kinds = [event.kind async for event in manager.events(sandbox=sandbox.id)]
    assert kinds == ["created", "ready", "paused", "ready", "stopped", "ready"]
    assert await manager.reconcile() == []


async def test_a_provider_without_the_verb_says_so_and_nothing_changes(tmp_path: Path, store: Store) -> None:
    providers = {"folders": Folders(tmp_path / "boxes")}
    config = config_of(tmp_path, provider="folders")
    async with AsyncSandboxManager(config, store=store, providers=providers) as manager:
        sandbox = await manager.create()
        for verb in (manager.pause, manager.stop):
            with pytest.raises(Unsupported):
                await verb(sandbox.id)
        assert (await manager.record(sandbox.id)).state is State.READY


async def test_a_crash_between_pause_and_its_note_is_followed(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    await mock.pause(sandbox.id)
    assert [verdict.action for verdict in await manager.reconcile()] == ["follow"]
    await manager.resume(sandbox.id)
    assert (await manager.execute(sandbox.id, "true")).ok
