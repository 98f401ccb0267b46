"""Stopping and starting, the volumes that outlive a sandbox, and what others do by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skerry.errors import AgentUnreachable, Conflict, InvalidSpec, NotFound, Unsupported, WrongState
from skerry.manager import identity, watch
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Event
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import State
from skerry.providers.mock import Mock
from skerry.store import Store

from .world import Folders, HostClock, config_of, until

# stopping and starting


async def test_a_started_sandbox_has_the_environment_given_and_the_time_left(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock
) -> None:
    sandbox = await manager.create(env={"A": "1"}, lifetime=1000, idle=500)
    await sandbox.files.write("f", "kept")
    await manager.stop(sandbox.id)
    host_clock.pass_time(400)
    await manager.start(sandbox.id, {"B": "2"})
    assert (await sandbox.exec('echo "$A$B"; cat f')).text == "2\nkept"
    await mock.pass_time(550)
    assert mock.host.boxes[sandbox.id].spec.idle_s == 500
    assert (await manager.record(sandbox.id)).spec.env == {"A": "***"}


@pytest.mark.parametrize("state", ["stopped", "paused"])
async def test_one_whose_time_is_over_while_nothing_of_it_runs_is_destroyed(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock, state: str
) -> None:
    sandbox = await manager.create(lifetime=100)
    await (manager.stop if state == "stopped" else manager.pause)(sandbox.id)
    assert await manager.reconcile() == []
    host_clock.pass_time(101)
    (verdict,) = await manager.reconcile()
    assert (verdict.action, verdict.cause) == ("destroy", Cause.LIFETIME)
    assert (await manager.record(sandbox.id)).cause is Cause.LIFETIME
    assert not mock.host.boxes


async def test_one_whose_time_is_over_is_not_started(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock
) -> None:
    sandbox = await manager.create(lifetime=100)
    await manager.stop(sandbox.id)
    host_clock.pass_time(101)
    with pytest.raises(WrongState, match="lifetime is over"):
        await manager.start(sandbox.id)
    assert (await manager.record(sandbox.id)).cause is Cause.LIFETIME


async def test_what_cannot_be_used_says_what_to_do(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    await manager.stop(sandbox.id)
    with pytest.raises(WrongState, match="stopped: start it"):
        await manager.execute(sandbox.id, "true")
    await manager.start(sandbox.id)
    await manager.pause(sandbox.id)
    with pytest.raises(WrongState, match="paused: unpause it"):
        await manager.execute(sandbox.id, "true")


async def test_one_that_does_not_come_up_stays_stopped(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    await manager.stop(sandbox.id)
    start = mock.start

    async def fail(id: SandboxId, spec: Spec | None = None) -> None:
        await start(id, spec)
        raise AgentUnreachable("it never came")

    mock.start = fail  # type: ignore[method-assign]
    with pytest.raises(AgentUnreachable):
        await manager.start(sandbox.id)
    mock.start = start  # type: ignore[method-assign]
    assert (await manager.record(sandbox.id)).state is State.STOPPED
    assert await manager.reconcile() == []
    await manager.start(sandbox.id)
    await sandbox.ping()


async def test_a_sandbox_that_is_being_destroyed_is_not_paused(manager: AsyncSandboxManager, store: Store) -> None:
    sandbox = await manager.create()
    await store.change(await manager.record(sandbox.id), doomed=True, cause=Cause.USER)
    with pytest.raises(WrongState, match="being destroyed"):
        await manager.pause(sandbox.id)


# volumes


async def test_data_is_found_again_by_the_name_and_goes_only_when_asked(manager: AsyncSandboxManager) -> None:
    first = await manager.create(name="db")
    await first.files.write("/.data/f", "kept")
    await manager.destroy("db")
    (volume,) = await manager.volumes("data")
    assert (volume.label, volume.in_use) == ("db", False)
    second = await manager.create(name="db")
    assert await second.files.read_text("/.data/f") == "kept"
    with pytest.raises(Conflict):
        await manager.remove_volume(volume.name)
    await manager.destroy("db", volumes=True)
    assert await manager.volumes() == []
    with pytest.raises(NotFound):
        await manager.remove_volume(volume.name)


async def test_an_ephemeral_sandbox_without_a_name_leaves_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    plain = await manager.create(ephemeral=True)
    assert mock.host.boxes[plain.id].spec.data is False
    asked = await manager.create(ephemeral=True, data=True)
    named = await manager.create(ephemeral=True, name="named")
    assert {volume.sandbox for volume in await manager.volumes()} == {asked.id, named.id}
    await manager.destroy_all()
    assert [volume.label for volume in await manager.volumes()] == ["named"]


async def test_a_create_that_fails_leaves_no_volume(manager: AsyncSandboxManager, mock: Mock) -> None:
    mock.faults.slow_boot(90)
    with pytest.raises(Exception, match="did not answer"):
        await manager.create()
    assert await manager.volumes() == []


async def test_caches_are_told_with_their_sizes(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create(project="p", cache="write", cache_paths={"own": "/opt/own"})
    await sandbox.files.write("/.cache/pip/f", "x" * 1000)
    sizes = {volume.label: volume.size for volume in await manager.volumes("cache", sizes=True)}
    assert (sizes["pip"], sizes["own"]) == (1000, 0)
    assert {volume.project for volume in await manager.volumes("cache")} == {"p"}


async def test_a_provider_without_volumes_and_snapshots_says_so(tmp_path: Path, store: Store) -> None:
    providers = {"folders": Folders(tmp_path / "boxes")}
    async with AsyncSandboxManager(
        config_of(tmp_path, provider="folders"), store=store, providers=providers
    ) as manager:
        sandbox = await manager.create()
        assert await manager.volumes() == []
        assert await manager.snapshots() == []
        with pytest.raises(Unsupported, match="volumes"):
            await manager.volumes(provider="folders")
        with pytest.raises(Unsupported, match="snapshot"):
            await manager.snapshot(sandbox.id, "one")
        with pytest.raises(Unsupported, match="snapshot"):
            await manager.fork(sandbox.id)
        with pytest.raises(Unsupported, match="logs"):
            [chunk async for chunk in manager.logs(sandbox.id)]
        await manager.destroy_all()


async def test_a_provider_that_is_no_longer_installed_keeps_nobody_from_the_others(
    manager: AsyncSandboxManager, store: Store, mock: Mock
) -> None:
    await manager.create(name="here")
    gone, _ = await store.reserve(new_id(), Spec(provider="uninstalled"), owner=identity.this_process(), boot_id="")
    assert [volume.label for volume in await manager.volumes()] == ["here"]
    assert await manager.snapshots() == []
    assert await manager.reconcile() == []
    events = manager.events(follow=True)
    await anext(events)

    async def watched() -> bool:
        return bool(mock.host.watchers)

    await until(watched)
    await events.aclose()  # type: ignore[attr-defined]
    await store.change(gone, to=State.DESTROYED, cause=Cause.USER)


async def test_a_snapshot_has_a_proper_name(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    with pytest.raises(InvalidSpec, match="Not A Name"):
        await manager.snapshot(sandbox.id, "Not A Name")
    await manager.snapshot(sandbox.id, "one")
    with pytest.raises(Conflict):
        await manager.snapshot(sandbox.id, "one")


async def test_the_box_itself_has_a_log(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    await manager.stop(sandbox.id)
    said = b"".join([chunk async for chunk in manager.logs(sandbox.id)])
    assert said == b"mock: running\nmock: stopped\n"
    assert b"".join([chunk async for chunk in manager.logs(sandbox.id, tail=1)]) == b"mock: stopped\n"


# what others do by hand


async def followed(manager: AsyncSandboxManager, seen: list[Event]) -> None:
    async for event in manager.events(follow=True):
        seen.append(event)  # noqa: PERF401  what is seen is looked at meanwhile


async def test_what_is_done_by_hand_is_told_when_it_happens(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    sandbox = await manager.create()
    seen: list[Event] = []
    following = asyncio.create_task(followed(manager, seen))

    async def told(kind: str) -> None:
        async def is_told() -> bool:
            return bool(seen) and seen[-1].kind == kind

        await until(is_told)

    try:
        await told("ready")
        await mock.pause(sandbox.id)
        await told("paused")
        await mock.resume(sandbox.id)
        await told("ready")
        await mock.stop(sandbox.id)
        await told("stopped")
        mock.faults.end_watch()
        await mock.start(sandbox.id)
        await told("ready")
        mock.faults.lost_box(sandbox.id)
        await told("lost")
    finally:
        following.cancel()
        await asyncio.wait([following])
    assert mock.host.watchers == set()


async def test_what_the_manager_does_itself_is_told_once(
    manager: AsyncSandboxManager, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    sandbox = await manager.create()
    seen: list[Event] = []
    following = asyncio.create_task(followed(manager, seen))

    async def watched() -> bool:
        return bool(mock.host.watchers)

    await until(watched)
    try:
        for _ in range(5):
            await manager.pause(sandbox.id)
            await manager.resume(sandbox.id)
            await manager.stop(sandbox.id)
            await manager.start(sandbox.id)
        await manager.destroy(sandbox.id)
    finally:
        following.cancel()
        await asyncio.wait([following])
    kinds = [event.kind async for event in manager.events(sandbox=sandbox.id)]
    assert kinds == ["created", "ready", *["paused", "ready", "stopped", "ready"] * 5, "doomed", "destroyed"]


async def test_one_who_stops_following_leaves_nothing_behind(manager: AsyncSandboxManager, mock: Mock) -> None:
    await manager.create()
    before = len(asyncio.all_tasks())
    events = manager.events(follow=True)
    await anext(events)
    await events.aclose()  # type: ignore[attr-defined]
    assert len(asyncio.all_tasks()) == before
    assert mock.host.watchers == set()
