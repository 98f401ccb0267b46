"""Orphans: boxes of this installation that no record tells of go when a manager is opened, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from skerry.errors import ProviderUnavailable
from skerry.manager import identity, repair
from skerry.manager.decide import INSTANCE_LABEL
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Owner
from skerry.model.spec import SandboxId, Spec, new_id
from skerry.pool.pool import AsyncSandboxPool
from skerry.providers.base import BoxStatus
from skerry.providers.mock import Mock
from skerry.store import Store

from .world import config_of, until


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repair, "_FIRST_CALL_S", 0.0)


def opened(folder: Path, store: Store, mock: Mock) -> AsyncSandboxManager:
    return AsyncSandboxManager(config_of(folder), store=store, providers={"mock": mock})


async def box_of(mock: Mock, instance: str) -> SandboxId:
    id = new_id()
    await mock.create(id, Spec(provider="mock", labels={INSTANCE_LABEL: instance}))
    return id


async def gone(mock: Mock, id: SandboxId) -> None:
    async def is_gone() -> bool:
        return id not in mock.host.boxes

    await until(is_gone)


async def test_who_opens_a_manager_or_a_pool_clears_orphans_and_keeps_their_volumes(
    tmp_path: Path, store: Store, mock: Mock
) -> None:
    orphan, stranger = await box_of(mock, store.instance), await box_of(mock, "another installation")
    async with opened(tmp_path, store, mock) as manager:
        await gone(mock, orphan)
        assert {volume.sandbox for volume in await mock.volumes()} == {orphan, stranger}
    orphan = await box_of(mock, store.instance)
    async with opened(tmp_path, store, mock) as manager, AsyncSandboxPool(manager, size=1) as pool:
        await pool.wait_for_full(10)
        await gone(mock, orphan)
    assert set(mock.host.boxes) == {stranger}


async def test_what_another_program_is_just_making_is_no_orphan(
    tmp_path: Path, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record comes before its box, and its maker lives."""
    other = Owner(identity.host(), 1, identity._start_time(1) or 0)
    id = new_id()
    await store.reserve(id, Spec(provider="mock"), owner=other, boot_id=store.now().boot, max_sandboxes=9)
    await mock.create(id, Spec(provider="mock", labels={INSTANCE_LABEL: store.instance}))
    orphan = await box_of(mock, store.instance)
    async with opened(tmp_path, store, mock):
        await gone(mock, orphan)
        assert id in mock.host.boxes


async def test_a_record_that_comes_while_the_host_is_asked_saves_its_box(
    tmp_path: Path, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    discover, orphan = mock.discover, await box_of(mock, store.instance)
    made = []
    async with AsyncSandboxManager(
        config_of(tmp_path), store=store, providers={"mock": Mock(host=mock.host)}, reconcile=False
    ) as maker:

        async def meanwhile() -> Mapping[SandboxId, BoxStatus]:
            if not made:
                made.append((await maker.create()).id)
            return await discover()

        monkeypatch.setattr(mock, "discover", meanwhile)
        async with opened(tmp_path, store, mock):
            await gone(mock, orphan)
        assert set(mock.host.boxes) == set(made)


async def test_a_provider_that_hangs_or_fails_keeps_nobody_from_working_or_from_leaving(
    tmp_path: Path, store: Store, mock: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def hang() -> Mapping[SandboxId, BoxStatus]:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async def fail() -> Mapping[SandboxId, BoxStatus]:
        asked.set()
        raise ProviderUnavailable("mock", "it is off", fix="switch it on")

    for answer in (hang, fail):
        asked.clear()
        monkeypatch.setattr(mock, "discover", answer)
        async with asyncio.timeout(5):
            async with opened(tmp_path, store, mock) as manager:
                await manager.destroy((await manager.create()).id)
                await asked.wait()


async def test_one_who_leaves_at_once_leaves_no_task_behind(tmp_path: Path, store: Store, mock: Mock) -> None:
    before = len(asyncio.all_tasks())
    async with opened(tmp_path, store, mock):
        pass
    assert len(asyncio.all_tasks()) == before
