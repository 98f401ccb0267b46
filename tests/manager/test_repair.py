"""Reconcile beside others who act, and with providers that fail."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from skerry.config import Config
from skerry.errors import ProviderError, SkerryError
from skerry.manager import identity
from skerry.manager.addresses import Addresses
from skerry.manager.admission import Admission
from skerry.manager.create import Creator
from skerry.manager.manager import AsyncSandboxManager
from skerry.manager.network import Networks
from skerry.model.records import Filter
from skerry.model.spec import SandboxId, Spec
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.store import Store

from .world import Folders, config_of

LIVE = Filter()

# reconcile beside others who act


async def test_a_box_that_comes_after_the_end_of_the_last_one_of_its_provider_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that is not the default one: a daemon may do late what it was asked for."""
    folders = Folders(tmp_path / "boxes")
    async with AsyncSandboxManager(config_of(tmp_path), providers={"folders": folders}) as manager:
        sandbox = await manager.create(provider="folders")
        record = await manager.record(sandbox.id)
        await sandbox.destroy()
        addresses = Addresses(manager.config, is_shared=False)
        networks = Networks(manager.store, manager.config, is_shared=False)
        creator = Creator(manager.store, manager.config, addresses, networks, Admission())
        spec = creator.spec_of_box(record, record.spec, folders)
        await folders.create(sandbox.id, spec)
    monkeypatch.setattr(Config, "load_provider", lambda _config, name: folders if name == "folders" else Mock())
    async with AsyncSandboxManager(config_of(tmp_path), reconcile=False) as manager:
        verdicts = await manager.reconcile()
    assert [(each.id, each.action) for each in verdicts] == [(sandbox.id, "destroy")]
    assert not await folders.discover()


async def test_a_volume_that_comes_after_the_end_of_its_sandbox_is_removed_and_one_that_is_kept_is_not(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    """A daemon may do late what it was asked for by a program that was killed."""
    gone, kept, named = await manager.create(), await manager.create(), await manager.create(name="web")
    volumes = dict(mock.host.volumes)
    await manager.destroy(gone.id, volumes=True)
    await manager.destroy(kept.id)
    await manager.destroy(named.id, volumes=True)
    mock.host.volumes.update(volumes)
    for name, (volume, _) in volumes.items():
        mock.host.volumes[name] = (volume, mock.host.new_folder("volume"))
    await manager.reconcile()
    left = {volume.sandbox for volume in await manager.volumes()}
    assert left == {kept.id, named.id}  # whoever takes the name again takes the volume too


@pytest.mark.parametrize("act", ["create", "pause", "resume", "stop", "start", "destroy", "revive"])
async def test_what_happens_while_the_host_is_asked_is_not_undone(
    manager: AsyncSandboxManager, mock: Mock, act: str
) -> None:
    """The answer of `discover` is old when it comes: whoever acted meanwhile is right."""
    sandbox = await manager.create()
    if act == "resume":
        await manager.pause(sandbox.id)
    if act == "start":
        await manager.stop(sandbox.id)
    if act == "revive":
        mock.faults.dead_box(sandbox.id)
    discover = mock.discover
    late = []

    async def answer_late() -> object:
        answer = await discover()
        if not late:
            late.append(act)
            await {
                "create": lambda: manager.create(name="meanwhile"),
                "revive": lambda: manager.start(sandbox.id),
            }.get(act, lambda: getattr(manager, act)(sandbox.id))()
        return answer

    mock.discover = answer_late  # type: ignore[method-assign, assignment]
    await manager.reconcile()
    mock.discover = discover  # type: ignore[method-assign]
    boxes = await mock.discover()
    states = {record.id: record.state for record in await manager.list()}
    held = {"running": State.READY, "paused": State.PAUSED, "stopped": State.STOPPED}
    assert states == {id: held[box.state] for id, box in boxes.items()}
    assert len(states) == {"create": 2, "destroy": 0}.get(act, 1)


async def test_a_maker_that_finishes_and_exits_while_it_is_judged_did_not_die_making(
    manager: AsyncSandboxManager, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, list_records = mock.create, store.list
    go_on, began = asyncio.Event(), asyncio.Event()

    async def slow(id: SandboxId, spec: Spec) -> None:
        began.set()
        await go_on.wait()
        await create(id, spec)

    mock.create = slow  # type: ignore[method-assign]
    creating = asyncio.create_task(manager.create())
    await began.wait()

    async def answer_late(filter: Filter = LIVE) -> object:
        answer = await list_records(filter)
        if filter.include_ended and not go_on.is_set():
            go_on.set()
            await creating
            monkeypatch.setattr(identity, "is_alive", lambda owner: False)
        return answer

    monkeypatch.setattr(store, "list", answer_late)
    await manager.reconcile()
    assert go_on.is_set()
    sandbox = await creating
    assert (await manager.record(sandbox.id)).state is State.READY
    assert set(await mock.discover()) == {sandbox.id}


async def test_a_dry_run_tells_and_does_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    mock.faults.dead_box(sandbox.id)
    (told,) = await manager.reconcile(dry_run=True)
    assert (told.id, told.action) == (sandbox.id, "destroy")
    assert (await manager.record(sandbox.id)).state is State.READY
    assert await manager.reconcile() == [told]
    assert await manager.reconcile() == []


async def test_a_box_that_will_not_die_keeps_neither_the_others_nor_the_manager_from_going_on(
    manager: AsyncSandboxManager, tmp_path: Path, mock: Mock
) -> None:
    bad, good = await manager.create(), await manager.create()
    for each in (bad, good):
        mock.faults.dead_box(each.id)
    destroy = mock.destroy

    async def fail_for_one(id: object, *, volumes: bool = False) -> None:
        if id == bad.id:
            raise ProviderError("it hangs in the kernel")
        await destroy(id, volumes=volumes)  # type: ignore[arg-type]

    mock.destroy = fail_for_one  # type: ignore[method-assign, assignment]
    with suppress(SkerryError):  # it may say so, after it has done the rest
        await manager.reconcile()
    assert (await manager.record(good.id)).state is State.DESTROYED
    async with AsyncSandboxManager(config_of(tmp_path), providers={"mock": mock}) as fresh:
        await fresh.create()
    mock.destroy = destroy  # type: ignore[method-assign]
    await manager.reconcile()
    assert (await manager.record(bad.id)).state is State.DESTROYED


@pytest.mark.parametrize(("first", "by_hand"), [("ready", "pause"), ("ready", "stop"), ("paused", "stop")])
async def test_what_was_done_by_hand_is_followed(
    manager: AsyncSandboxManager, mock: Mock, first: str, by_hand: str
) -> None:
    sandbox = await manager.create()
    if first == "paused":
        await manager.pause(sandbox.id)
    await getattr(mock, by_hand)(sandbox.id)
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).state is {"pause": State.PAUSED, "stop": State.STOPPED}[by_hand]


async def test_started_and_paused_by_hand_is_followed_too(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    await manager.stop(sandbox.id)
    await mock.start(sandbox.id)
    await mock.pause(sandbox.id)
    await manager.reconcile()
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).state is State.PAUSED


# providers that fail, and several of them


@pytest.mark.parametrize("failure", [ProviderError("the engine is down"), ConnectionRefusedError(), TimeoutError()])
async def test_a_provider_that_errs_has_not_lost_its_boxes(
    manager: AsyncSandboxManager, mock: Mock, failure: Exception
) -> None:
    sandbox = await manager.create()
    discover = mock.discover

    async def fail() -> object:
        raise failure

    mock.discover = fail  # type: ignore[method-assign, assignment]
    assert await manager.reconcile() == []
    assert (await manager.record(sandbox.id)).state is State.READY
    mock.discover = discover  # type: ignore[method-assign]
    assert (await manager.execute(sandbox.id, "true")).ok


async def test_a_provider_that_hangs_has_not_lost_its_boxes(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await manager.create()
    monkeypatch.setattr("skerry.manager.repair._PROVIDER_DEADLINE_S", 0.05)

    async def hang() -> object:
        return await asyncio.Event().wait()

    mock.discover = hang  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(5):
        assert await manager.reconcile() == []
    assert (await manager.record(sandbox.id)).state is State.READY


async def test_an_agent_that_hangs_is_unhealthy_and_not_gone(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.sandbox.connection._GREETING_S", 0.05)
    sandbox = await manager.create()
    mock.faults.hang(sandbox.id)
    assert not await manager.is_healthy(sandbox.id)
    await manager.reconcile()
    assert (await manager.record(sandbox.id)).state is State.READY
    await manager.destroy(sandbox.id)


async def test_several_providers_are_kept_side_by_side(tmp_path: Path, store: Store, mock: Mock) -> None:
    folders = Folders(tmp_path / "boxes")
    providers = {"mock": mock, "folders": folders}
    async with AsyncSandboxManager(config_of(tmp_path), store=store, providers=providers) as manager:
        one, two = await manager.create(provider="mock"), await manager.create(provider="folders")
        assert [record.id for record in await manager.list(Filter(provider="folders"))] == [two.id]
        assert await manager.reconcile() == []
        await folders.destroy(two.id)

        async def fail() -> object:
            raise ProviderError("down")

        mock.discover = fail  # type: ignore[method-assign, assignment]
        assert [(verdict.id, verdict.action) for verdict in await manager.reconcile()] == [(two.id, "lost")]
        assert (await manager.record(one.id)).state is State.READY
        await manager.destroy_all()
        assert not mock.host.boxes


async def test_two_installations_on_one_host_leave_each_other_alone(tmp_path: Path, mock: Mock) -> None:
    a = AsyncSandboxManager(config_of(tmp_path / "a"), providers={"mock": mock})
    b = AsyncSandboxManager(config_of(tmp_path / "b"), providers={"mock": mock})
    async with a, b:
        one, two = await a.create(), await b.create()
        await a.reconcile()
        await b.reconcile()
        assert (await one.exec("true")).ok
        assert (await two.exec("true")).ok
        await a.destroy_all()
        assert set(await mock.discover()) == {two.id}
