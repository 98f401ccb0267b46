"""Boxes that are made anew, copied, removed with their volumes: killed at every call, nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from skerry.errors import Conflict, CreateFailed, NotFound, ProviderError, SkerryError, StoreUnavailable, WrongState
from skerry.manager import identity
from skerry.manager.decide import Action
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Owner
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.model.states import State
from skerry.providers.mock import Host, Mock
from skerry.store import Store

from .fuse import Crash, Fuse, Strike, fused_provider, fused_store
from .world import ENDED, HostClock, config_of

KEY = "the key that it was asked for with"
VICTIM, SURVIVOR = Owner("host/boot", 1, 1), Owner("host/boot", 2, 2)
Deed = Callable[[AsyncSandboxManager, SandboxId], Awaitable[object]]


class Scene:
    """A sandbox with files, data and a snapshot, and a program that dies while it does something with it."""

    def __init__(self, folder: Path, store: Store) -> None:
        self.folder = folder
        self.store = store
        self.mock = Mock(host=Host())
        self.id = SandboxId("")

    def manager(self, fuse: Fuse | None = None) -> AsyncSandboxManager:
        store = self.store if fuse is None else fused_store(self.store, fuse)
        mock = self.mock if fuse is None else fused_provider(self.mock, fuse)
        return AsyncSandboxManager(config_of(self.folder), store=store, providers={"mock": mock}, reconcile=False)

    async def begin(self) -> None:
        async with self.manager() as manager:
            sandbox = await manager.create(image="app", key=KEY)
            self.id = sandbox.id
            await sandbox.files.write("f", "before")
            await manager.snapshot(self.id, "one")
            await sandbox.files.write("f", "after")
            await sandbox.files.write("/.data/f", "data")
        self.mock.host.images["app"] = "newer"

    async def settled(self) -> AsyncSandboxManager:
        """A fresh manager that has reconciled, and found nothing to do when it did so again."""
        manager = self.manager()
        await manager.reconcile()
        assert [each.action for each in await manager.reconcile() if not each.outdated] == []
        return manager

    @property
    def temporary(self) -> list[str]:
        return [name for name in self.mock.host.snapshots if name.startswith("tmp-")]


async def scenes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: Deed, *, kills: bool = True
) -> AsyncIterator[Scene]:
    """The deed, cut short before and after every call that it makes, in a scene of its own each time."""
    for after in (False, True):
        for at in itertools.count():
            scene = Scene(tmp_path, await Store.open(str(tmp_path / f"{after}-{at}.db")))
            alive = {VICTIM, SURVIVOR}
            monkeypatch.setattr(identity, "is_alive", alive.__contains__)
            monkeypatch.setattr(identity, "this_process", lambda: SURVIVOR)
            await scene.begin()
            monkeypatch.setattr(identity, "this_process", lambda: VICTIM)
            fuse = Fuse(on_death=lambda alive=alive: alive.discard(VICTIM))  # type: ignore[misc]
            manager = scene.manager(fuse)
            fuse.arm(Strike(at, after, kills))
            with suppress(Crash, SkerryError):
                await deed(manager, scene.id)
            if kills:
                monkeypatch.setattr(identity, "this_process", lambda: SURVIVOR)
            yield scene
            await scene.store.aclose()
            if fuse.strike is not None:
                break


async def restore(manager: AsyncSandboxManager, id: SandboxId) -> object:
    return await manager.restore(id, "one")


async def rebuild(manager: AsyncSandboxManager, id: SandboxId) -> object:
    return await manager.reconcile(rebuild=True)


@pytest.mark.parametrize("kills", [True, False])
@pytest.mark.parametrize("deed", [restore, rebuild])
async def test_a_create_by_its_key_after_a_cut_comes_to_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: Deed, kills: bool
) -> None:
    ends = set()
    async for scene in scenes(tmp_path, monkeypatch, deed, kills=kills):
        manager = scene.manager()
        async with asyncio.timeout(10):
            with suppress(WrongState):
                await (await manager.create(image="app", key=KEY)).ping()
            ends.add((await manager.record(scene.id)).state)
    assert ends == {State.READY, State.LOST}


@pytest.mark.parametrize("kills", [True, False])
@pytest.mark.parametrize("deed", [restore, rebuild])
async def test_one_that_is_made_anew_is_never_destroyed_and_never_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: Deed, kills: bool
) -> None:
    seen = set()
    async for scene in scenes(tmp_path, monkeypatch, deed, kills=kills):
        manager = await scene.settled()
        record = await manager.record(scene.id)
        seen.add(record.state)
        if record.state is State.READY:
            content = await manager.read_file(scene.id, "f") if await has_file(manager, scene.id) else b"new"
            assert content in (b"before", b"after", b"new")
            assert record.remaker is None
        else:
            assert (record.state, record.cause) == (State.LOST, Cause.CREATION_FAILED)
            assert "again" in record.detail
            assert not scene.mock.host.boxes
            await deed(manager, scene.id)
            record = await manager.record(scene.id)
            assert (record.state, record.detail, record.cause) == (State.READY, "", None)
            assert await has_file(manager, scene.id) is (deed is restore)
        assert set(scene.mock.host.boxes) == {scene.id}
        assert await manager.read_file(scene.id, "/.data/f") == b"data"
        assert [each.id for each in await manager.list(ENDED)] == [scene.id]
        await manager.aclose()
    assert seen == {State.READY, State.LOST}


async def has_file(manager: AsyncSandboxManager, id: SandboxId) -> bool:
    return await (await manager.get(id)).files.exists("f")


async def test_a_fork_leaves_no_snapshot_and_no_half_sandbox_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    async for scene in scenes(tmp_path, monkeypatch, lambda manager, id: manager.fork(id, name="copy")):
        manager = await scene.settled()
        records = await manager.list()
        assert set(scene.mock.host.boxes) == {record.id for record in records}
        assert {record.state for record in records} == {State.READY}
        assert await manager.read_file(scene.id, "f") == b"after"
        forks = [record for record in records if record.id != scene.id]
        seen.add(len(forks))
        for fork in forks:
            assert await manager.read_file(fork.id, "f") == b"after"
            assert not await (await manager.get(fork.id)).files.exists("/.data/f")
            await manager.destroy(fork.id)
        assert scene.temporary == []
        await manager.aclose()
    assert seen == {0, 1}


async def test_volumes_that_were_to_go_go_with_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    async for scene in scenes(tmp_path, monkeypatch, lambda manager, id: manager.destroy(id, volumes=True)):
        manager = await scene.settled()
        left = await manager.volumes()
        live = (await manager.record(scene.id)).is_live
        assert bool(left) is live, "both, or neither"
        seen.add(live)
        await manager.aclose()
    assert seen == {True, False}


# the whole of it, undisturbed


async def test_a_restored_sandbox_has_the_files_of_the_snapshot_and_its_own_data(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    sandbox = await manager.create(name="one", env={"A": "1"})
    await sandbox.files.write("f", "before")
    snapshot = await manager.snapshot("one", "first")
    assert [each.name for each in await manager.snapshots()] == ["first"]
    assert snapshot.sandbox == sandbox.id
    await sandbox.files.write("f", "after")
    await sandbox.files.write("/.data/f", "data")
    same = await manager.restore("one", "first", {"B": "2"})
    assert same.id == sandbox.id
    assert await sandbox.files.read_text("f") == "before"
    assert await sandbox.files.read_text("/.data/f") == "data"
    assert (await sandbox.exec('echo "$A$B"')).text == "2\n"
    record = await manager.record("one")
    assert (record.state, record.spec.snapshot, record.remaker) == (State.READY, "first", None)
    kinds = [event.kind async for event in manager.events(sandbox="one")]
    assert kinds == ["created", "ready", "remaking", "creating", "ready"]
    with pytest.raises(Conflict):
        await manager.remove_snapshot("first")
    await manager.destroy("one", volumes=True)
    await manager.remove_snapshot("first")
    assert await manager.snapshots() == []
    with pytest.raises(NotFound):
        await manager.remove_snapshot("first")


async def test_what_cannot_be_restored_is_left_as_it_was(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create()
    before = await manager.record(sandbox.id)
    with pytest.raises(NotFound, match="nothing-of-the-sort"):
        await manager.restore(sandbox.id, "nothing-of-the-sort")
    assert await manager.record(sandbox.id) == before
    await sandbox.ping()
    await manager.snapshot(sandbox.id, "one")
    await manager.destroy(sandbox.id)
    with pytest.raises(WrongState, match="destroyed"):
        await manager.restore(sandbox.id, "one")


async def test_a_restore_that_fails_says_so_and_can_be_asked_for_again(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    sandbox = await manager.create()
    await sandbox.files.write("f", "before")
    await manager.snapshot(sandbox.id, "one")
    mock.faults.fail_create(CreateFailed("no room"))
    with pytest.raises(CreateFailed):
        await manager.restore(sandbox.id, "one")
    record = await manager.record(sandbox.id)
    assert record.state is State.LOST
    assert "no room" in record.detail
    assert await manager.reconcile() == []
    await manager.restore(sandbox.id, "one")
    assert await sandbox.files.read_text("f") == "before"


async def test_a_restore_that_is_cancelled_can_be_asked_for_again(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    await manager.snapshot(sandbox.id, "one")
    create, began = mock.create, asyncio.Event()

    async def slow(*args: object) -> None:
        began.set()
        await asyncio.sleep(0.02)
        await create(*args)  # type: ignore[arg-type]

    mock.create = slow  # type: ignore[method-assign, assignment]
    restoring = asyncio.create_task(manager.restore(sandbox.id, "one"))
    await began.wait()
    with pytest.raises(WrongState, match="made anew"):
        await manager.pause(sandbox.id)
    with pytest.raises((Conflict, WrongState)):
        await manager.restore(sandbox.id, "one")
    assert await manager.reconcile() == []
    restoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await restoring
    assert (await manager.record(sandbox.id)).state is State.LOST
    assert not mock.host.boxes
    await manager.restore(sandbox.id, "one")
    await sandbox.ping()


async def test_one_that_is_destroyed_while_it_is_made_anew_is_gone(manager: AsyncSandboxManager, mock: Mock) -> None:
    sandbox = await manager.create()
    await manager.snapshot(sandbox.id, "one")
    create, began, go_on = mock.create, asyncio.Event(), asyncio.Event()

    async def slow(*args: object) -> None:
        began.set()
        await go_on.wait()
        await create(*args)  # type: ignore[arg-type]

    mock.create = slow  # type: ignore[method-assign, assignment]
    restoring = asyncio.create_task(manager.restore(sandbox.id, "one"))
    await began.wait()
    await manager.destroy(sandbox.id, volumes=True)
    go_on.set()
    with pytest.raises(WrongState, match="destroyed while"):
        await restoring
    assert not mock.host.boxes
    assert await manager.volumes() == []
    assert await manager.reconcile() == []


async def test_a_restored_sandbox_has_the_time_that_was_left(
    manager: AsyncSandboxManager, mock: Mock, host_clock: HostClock
) -> None:
    sandbox = await manager.create(lifetime=1000)
    await manager.snapshot(sandbox.id, "one")
    host_clock.pass_time(400)
    await manager.restore(sandbox.id, "one")
    assert mock.host.boxes[sandbox.id].spec.lifetime_s == pytest.approx(600, abs=5)
    assert (await manager.record(sandbox.id)).left_s(host_clock()) == pytest.approx(600, abs=5)


# outdated images


async def test_what_is_outdated_is_told_and_made_anew_only_where_asked(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    old, other = await manager.create(image="app"), await manager.create(image="else")
    stopped = await manager.create(image="app")
    await manager.stop(stopped.id)
    await old.files.write("f", "in the box")
    await old.files.write("/.data/f", "data")
    mock.host.images["app"] = "newer"
    (told,) = await manager.reconcile()
    assert (told.id, told.action, told.outdated) == (old.id, Action.LEAVE, True)
    assert await old.files.exists("f")
    (would,) = await manager.reconcile(dry_run=True, rebuild=True)
    assert would.action is Action.REBUILD
    assert await old.files.exists("f")
    assert [each.action for each in await manager.reconcile(rebuild=True)] == [Action.REBUILD]
    assert not await old.files.exists("f")
    assert await old.files.read_text("/.data/f") == "data"
    assert (await mock.discover())[old.id].image == "newer"
    assert await manager.reconcile(rebuild=True) == []
    await other.ping()


async def test_a_rebuild_that_fails_for_one_does_not_keep_it_from_the_others(
    manager: AsyncSandboxManager, mock: Mock
) -> None:
    one, two = await manager.create(image="app"), await manager.create(image="app")
    mock.host.images["app"] = "newer"
    mock.faults.fail_create(ProviderError("no room"))
    with pytest.raises(ProviderError):
        await manager.reconcile(rebuild=True)
    states = sorted([(await manager.record(each.id)).state for each in (one, two)])
    assert states == [State.LOST, State.READY]
    assert [each.action for each in await manager.reconcile(rebuild=True)] == [Action.REBUILD]
    assert {each.state for each in await manager.list()} == {State.READY}


# forks


async def test_a_fork_has_the_files_and_nothing_else_of_its_source(manager: AsyncSandboxManager, mock: Mock) -> None:
    source = await manager.create(name="source", env={"SECRET": "s"}, labels={"team": "a"}, memory="64M", egress="1M")
    await source.files.write("f", "shared")
    await source.files.write("/.data/f", "its own")
    fork = await manager.fork("source", name="copy", env={"OTHER": "o"})
    assert await fork.files.read_text("f") == "shared"
    assert not await fork.files.exists("/.data/f")
    assert (await fork.exec('echo "$SECRET$OTHER"')).text == "o\n"
    assert (fork.spec.memory, fork.spec.labels, fork.spec.name) == (64 << 20, {"team": "a"}, "copy")
    assert (fork.spec.egress, fork.enforced["egress"].by) == (1 << 20, "it has no network")
    await fork.files.write("f", "changed")
    assert await source.files.read_text("f") == "shared"
    unnamed = await manager.fork("copy")
    assert await unnamed.files.read_text("f") == "changed"
    assert await manager.snapshots() == []
    await manager.destroy_all()
    assert mock.host.snapshots == {}


async def test_what_cannot_be_forked_is_refused_and_leaves_nothing(manager: AsyncSandboxManager, mock: Mock) -> None:
    source = await manager.create(name="source")
    with pytest.raises(SkerryError, match="image"):
        await manager.fork("source", image="another")
    with pytest.raises(Conflict, match="source"):
        await manager.fork("source", name="source")
    mock.faults.fail_create()
    with pytest.raises(CreateFailed):
        await manager.fork("source")
    assert mock.host.snapshots == {}
    assert [record.id for record in await manager.list()] == [source.id]
    assert {volume.sandbox for volume in await manager.volumes()} == {source.id}
    with pytest.raises(SkerryError, match="tmp-"):
        await manager.snapshot("source", "tmp-mine")


# what is finished


async def test_one_whose_agent_never_came_is_not_taken_for_made(
    tmp_path: Path, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncSandboxManager(config_of(tmp_path), store=store, providers={"mock": mock}) as manager:
        for number, broken in enumerate([False, True]):
            monkeypatch.setattr(identity, "this_process", lambda: VICTIM)
            monkeypatch.setattr(identity, "is_alive", lambda owner: True)
            change = store.change

            async def fail(*args: object, **options: object) -> object:
                raise StoreUnavailable("the test made the registry fail")

            monkeypatch.setattr(store, "change", fail)
            destroy = mock.destroy
            monkeypatch.setattr(mock, "destroy", fail)
            with pytest.raises(SkerryError):
                await manager.create(key=f"key {number}")
            monkeypatch.setattr(store, "change", change)
            monkeypatch.setattr(mock, "destroy", destroy)
            (record,) = [each for each in await manager.list() if each.state is State.CREATING]
            if broken:
                mock.faults.dead_agent(record.id)
            monkeypatch.setattr(identity, "this_process", lambda: SURVIVOR)
            monkeypatch.setattr(identity, "is_alive", lambda owner: owner != VICTIM)
            await manager.reconcile()
            expected = State.DESTROYED if broken else State.READY
            assert (await manager.record(record.id)).state is expected
        await manager.destroy_all()


async def test_a_settled_state_is_the_end_of_a_remake(store: Store) -> None:
    record, _ = await store.reserve(new_id(), Spec(), owner=VICTIM, boot_id="")
    record = await store.change(record, to=State.READY)
    record = await store.change(record, remaker=VICTIM, volumes=True)
    assert (await store.get(record.id)) == record
    assert (record.remaker, record.volumes) == (VICTIM, True)
    record = await store.change(record, to=State.READY)
    assert (record.remaker, record.volumes) == (None, True)
