"""Admission: a box is made only while the host has memory for it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from manager.world import Folders, config_of
from skerry.config import load
from skerry.errors import ConfigError, HostFull
from skerry.manager import admission
from skerry.manager.admission import room_for
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Filter
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.docker import Docker, DockerConfig
from skerry.providers.incus import provider as incus
from skerry.providers.incus.info import IncusInfo, _Environment
from skerry.providers.incus.provider import Incus
from skerry.store import Store

M = 1 << 20


class Here(Folders):
    takes_memory_here = True


def box(memory: int | None = None) -> Spec:
    return Spec(provider="folders", memory=memory)


@pytest.fixture
def here(tmp_path: Path) -> Provider:
    return Here(tmp_path / "boxes")


def test_so_much_stays_free(here: Provider) -> None:
    with room_for(box(), here, 256 * M, lambda: 256 * M):
        pass
    with pytest.raises(HostFull, match=r"256M of memory free.*300M must stay free"):
        room_for(box(), here, 300 * M, lambda: 256 * M).__enter__()


def test_what_a_box_may_take_counts(here: Provider) -> None:
    with pytest.raises(HostFull, match="the sandbox may take 512M"):
        room_for(box(512 * M), here, 256 * M, lambda: 700 * M).__enter__()


def test_boxes_that_are_being_made_count_until_they_are(here: Provider) -> None:
    second = room_for(box(400 * M), here, 100 * M, lambda: 800 * M)
    with room_for(box(400 * M), here, 100 * M, lambda: 800 * M), pytest.raises(HostFull, match="400M of it for boxes"):
        second.__enter__()
    with room_for(box(400 * M), here, 100 * M, lambda: 800 * M):
        pass


def test_boxes_elsewhere_and_hosts_that_tell_nothing_are_let_be(tmp_path: Path, here: Provider) -> None:
    with room_for(box(1 << 40), Folders(tmp_path / "elsewhere"), 256 * M, lambda: 0):
        pass
    with room_for(box(1 << 40), here, 256 * M, lambda: None):
        pass
    with room_for(box(1 << 40), here, 0, lambda: 0):
        pass


def test_this_host_tells_or_does_not() -> None:
    free = admission.free_memory()
    assert free is None or free > 0


def test_an_engine_on_another_machine_takes_no_memory_of_this_one() -> None:
    assert Docker(DockerConfig(host="unix:///var/run/docker.sock")).takes_memory_here
    assert not Docker(DockerConfig(host="tcp://engine.test:2375")).takes_memory_here


@pytest.mark.parametrize("is_here", [True, False])
async def test_boxes_of_incus_take_memory_of_the_machine_that_its_daemon_is_on(
    monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    async def look(*_: object) -> IncusInfo:
        return IncusInfo(_Environment(), "unix:///incus.socket", "pool", "dir")

    monkeypatch.setattr(incus, "look", look)
    monkeypatch.setattr(IncusInfo, "is_local", is_here)
    provider = Incus()
    await provider.describe()  # as `enforcement` before a box is made, it asks the daemon where it is
    with suppress(HostFull), room_for(Spec(provider="incus"), provider, 256 * M, lambda: 100 * M):
        assert not is_here


async def test_a_create_on_a_full_host_is_refused_and_leaves_nothing(
    tmp_path: Path, here: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "free_memory", lambda: 100 * M)
    config = config_of(tmp_path, provider="folders", min_free_memory=256 * M)
    store = await Store.open(config.database)
    try:
        async with AsyncSandboxManager(config, store=store, providers={"folders": here}) as manager:
            with pytest.raises(HostFull):
                await manager.create(box())
            assert here.boxes() == set()
            (record,) = await manager.list(Filter(include_ended=True))
            assert (record.cause, "memory" in record.detail) == (Cause.CREATION_FAILED, True)
            manager.set_limits(config_of(tmp_path, provider="folders"))
            await asyncio.wait_for(manager.create(box()), 10)
            assert len(here.boxes()) == 1
    finally:
        await store.aclose()


def test_the_setting_is_a_size(own_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().min_free_memory == 256 * M
    assert load({"min_free_memory": "1G"}).min_free_memory == 1 << 30
    monkeypatch.setenv("SKERRY_MIN_FREE_MEMORY", "0")
    assert load().min_free_memory == 0
    for wrong in ("much", -1):
        with pytest.raises(ConfigError, match="min_free_memory"):
            load({"min_free_memory": wrong})
