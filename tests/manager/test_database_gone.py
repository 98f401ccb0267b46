"""A PostgreSQL that goes away in the middle and comes back: a clear error meanwhile, and no sandbox is lost for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from store.server import Server, running

from skerry.errors import StoreUnavailable
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import SandboxId, Spec
from skerry.store import Store

from .world import Folders, config_of, in_agreement


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path / "boxes")


@pytest.fixture
async def manager(tmp_path: Path, server: Server, folders: Folders) -> AsyncIterator[AsyncSandboxManager]:
    store = await Store.open(server.url("public"), timeout_s=1)
    config = config_of(tmp_path, provider="folders")
    async with AsyncSandboxManager(config, store=store, providers={"folders": folders}) as manager:
        yield manager
        await manager.destroy_all()
    await store.aclose()


async def test_a_database_that_is_gone_costs_no_sandbox(
    manager: AsyncSandboxManager, server: Server, folders: Folders
) -> None:
    kept, ended = await manager.create(), await manager.create()
    server.crash()
    try:
        with pytest.raises(StoreUnavailable):
            await manager.create()
        with pytest.raises(StoreUnavailable):
            await manager.destroy(ended.id)
        with pytest.raises(StoreUnavailable):
            await manager.reconcile()
        assert folders.boxes() == {kept.id, ended.id}
    finally:
        server.start()
    await manager.destroy(ended.id)
    await manager.reconcile()
    assert folders.boxes() == {kept.id} == {record.id for record in await manager.list()}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_database_that_goes_while_a_box_is_made_leaves_neither_box_nor_record(
    manager: AsyncSandboxManager, server: Server, folders: Folders, when: str
) -> None:
    create = folders.create

    async def create_without_database(id: SandboxId, spec: Spec) -> None:
        if when == "before":
            server.crash()
        await create(id, spec)
        if when == "after":
            server.crash()

    folders.create = create_without_database  # type: ignore[method-assign]
    try:
        with pytest.raises(StoreUnavailable):
            await manager.create(name="half")
    finally:
        server.start()
    folders.create = create  # type: ignore[method-assign]
    await manager.reconcile()
    await in_agreement(manager, folders)
    await manager.create(name="half")
