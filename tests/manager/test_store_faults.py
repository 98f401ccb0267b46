"""A registry that is full, damaged, read-only, held or gone: a clear error, and no sandbox is lost for it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from few_inodes import use_up_inodes

from skerry.config import AdmissionSettings
from skerry.errors import CreateFailed, ProviderUnavailable, StoreCorrupt, StoreFull, StoreReadOnly, StoreUnavailable
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter
from skerry.model.states import State
from skerry.providers.local import Local
from skerry.store import Store

from .world import Folders, config_of, in_agreement


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "boxes")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of its own, of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("a disk of its own needs root to mount it")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], check=True)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


Opener = Callable[[Path], AsyncSandboxManager]


@pytest.fixture
def opened(folders: Folders) -> Opener:
    return lambda folder: AsyncSandboxManager(config_of(folder, provider="folders"), providers={"folders": folders})


def fill(disk: Path) -> Path:
    """Every byte of it."""
    waste = disk / "waste"
    with open(waste, "wb", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return waste


def remount(disk: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", disk], check=True)


async def create_many(manager: AsyncSandboxManager, count: int) -> None:
    for _ in range(count):
        await manager.create()


async def reconcile_and_create(manager: AsyncSandboxManager) -> None:
    async with manager:
        await manager.reconcile()
        await manager.create()


async def test_a_place_that_was_taken_while_the_registry_failed_is_given_back(
    tmp_path: Path, folders: Folders, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as manager:
        reserve = manager.store.reserve

        async def write_and_fail(*place: Any, **options: Any) -> Any:
            await reserve(*place, **options)
            raise StoreUnavailable("the connection broke before it was told")

        monkeypatch.setattr(manager.store, "reserve", write_and_fail)
        with pytest.raises(StoreUnavailable):
            await manager.create(key="k")
        (record,) = await manager.store.list(Filter(include_ended=True))
        assert (record.state, record.cause) == (State.DESTROYED, Cause.CREATION_FAILED)
        await in_agreement(manager, folders)


async def test_on_a_full_disk_creates_are_refused_and_destroys_work(
    small_disk: Path, folders: Folders, opened: Opener
) -> None:
    async with opened(small_disk) as manager:
        made = [await manager.create() for _ in range(5)]
        waste = fill(small_disk)
        with pytest.raises(StoreFull):
            await create_many(manager, 50)
        await in_agreement(manager, folders)
        for sandbox in made:
            await manager.destroy(sandbox.id)
            assert (await manager.record(sandbox.id)).cause is Cause.USER
        await in_agreement(manager, folders)
        waste.unlink()
        await manager.create()
        await manager.reconcile()
        await in_agreement(manager, folders)


async def test_a_fresh_manager_opens_on_a_full_disk_and_destroys(
    small_disk: Path, folders: Folders, opened: Opener
) -> None:
    async with opened(small_disk) as manager:
        id = (await manager.create()).id
    fill(small_disk)
    async with opened(small_disk) as manager:
        await manager.destroy(id)
        assert not await manager.list()
    assert not folders.boxes()


async def test_without_a_free_inode_real_boxes_are_listed_and_destroyed_and_none_is_made(
    small_disk: Path, tmp_path: Path
) -> None:
    local = Local(Local.Config(state_dir=str(small_disk / "local"), cache_dir=str(tmp_path / "cache")))
    try:
        await local.check()
    except ProviderUnavailable as error:
        pytest.skip(str(error))
    remount(small_disk, "nr_inodes=64")

    config = config_of(small_disk, provider="local", admission=AdmissionSettings(min_free_disk=0))

    def opened() -> AsyncSandboxManager:
        return AsyncSandboxManager(config, providers={"local": local})

    async with opened() as manager:
        id = (await manager.create()).id
    use_up_inodes(small_disk)
    try:
        async with opened() as manager:
            assert [record.id for record in await manager.list()] == [id]
            with pytest.raises((StoreFull, CreateFailed)):  # whoever needs a file first
                await manager.create()
            await manager.destroy(id)
            assert not await manager.list()
        assert await local.discover() == {}
    finally:
        await local.destroy(id)
        await local.aclose()


async def test_a_registry_that_became_read_only_loses_nothing(
    small_disk: Path, folders: Folders, opened: Opener
) -> None:
    async with opened(small_disk) as manager:
        sandbox = await manager.create()
    remount(small_disk, "ro")
    with pytest.raises(StoreReadOnly):
        await reconcile_and_create(opened(small_disk))
    assert folders.boxes() == {sandbox.id}
    remount(small_disk, "rw")
    async with opened(small_disk) as manager:
        await manager.reconcile()
        assert [record.id for record in await manager.list()] == [sandbox.id]


async def test_a_damaged_registry_says_so_and_no_box_is_touched(
    tmp_path: Path, folders: Folders, opened: Opener
) -> None:
    async with opened(tmp_path) as manager:
        sandbox = await manager.create()
    registry = tmp_path / "registry.db"
    whole = registry.read_bytes()
    for damaged in (b"no database at all" * 100, whole[:100] + b"\xff" * 8000, whole[: len(whole) // 2], b""):
        registry.write_bytes(damaged)
        with pytest.raises(StoreCorrupt):
            await reconcile_and_create(opened(tmp_path))
        assert registry.read_bytes() == damaged, "it is left as it is"
        assert folders.boxes() == {sandbox.id}
    registry.write_bytes(whole)
    async with opened(tmp_path) as manager:
        assert [record.id for record in await manager.list()] == [sandbox.id]


async def test_a_registry_that_was_moved_away_costs_no_sandbox(
    tmp_path: Path, folders: Folders, opened: Opener
) -> None:
    async with opened(tmp_path) as manager:
        sandbox = await manager.create()
        (tmp_path / "registry.db").rename(tmp_path / "elsewhere")
        with pytest.raises(StoreUnavailable):
            await manager.create()
        with pytest.raises(StoreUnavailable):
            await manager.reconcile()
        assert folders.boxes() == {sandbox.id}
        (tmp_path / "elsewhere").rename(tmp_path / "registry.db")
        assert (await manager.record(sandbox.id)).state is State.READY


async def test_a_registry_that_another_holds_is_waited_for_and_then_named(tmp_path: Path, folders: Folders) -> None:
    store = await Store.open(str(tmp_path / "registry.db"), timeout_s=0.1)
    config = config_of(tmp_path, provider="folders")
    async with AsyncSandboxManager(config, store=store, providers={"folders": folders}) as manager:
        sandbox = await manager.create()
        with closing(sqlite3.connect(tmp_path / "registry.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreUnavailable, match="another process"):
                await manager.create()
            with pytest.raises(StoreUnavailable):
                await manager.destroy(sandbox.id)
            assert [record.id for record in await manager.list()] == [sandbox.id]
            other.execute("ROLLBACK")
        await in_agreement(manager, folders)
        await manager.destroy(sandbox.id)
    await store.aclose()
    assert not folders.boxes()
