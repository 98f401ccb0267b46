from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines.incus_cluster import Cluster
from engines.incus_world import World
from engines.incusd import Incusd
from providers.making import Make, making

from skerry.providers.incus import Incus
from skerry.providers.incus.info import IncusInfo


@pytest.fixture
async def incus(incus_daemon: Incusd, incus_image: str, cache: Path) -> AsyncIterator[Incus]:
    """A provider; it has no boxes at the start, and a test fails that leaves one behind."""
    provider = Incus(Incus.Config(host=incus_daemon.address, cache_dir=str(cache)))
    yield provider
    left = await provider.discover()
    for id in left:
        await provider.destroy(id, volumes=True)
    for volume in await provider.volumes():
        await provider.remove_volume(volume.name)
    await provider.aclose()
    assert not left


@pytest.fixture
async def world(incus_cluster: Cluster, cache: Path, tmp_path: Path) -> AsyncIterator[World]:
    world = World(incus_cluster, cache, tmp_path)
    yield world
    await world.revive()
    provider = Incus(Incus.Config(host=incus_cluster.address, cache_dir=str(cache)))
    for id in await provider.discover():
        await provider.destroy(id, volumes=True)
    for volume in await provider.volumes():
        await provider.remove_volume(volume.name)
    await provider.aclose()
    assert world.places() == {}


@pytest.fixture
async def make(incus: Incus, incus_image: str) -> AsyncIterator[Make]:
    async with making(incus, image=incus_image, data=False) as make:
        yield make


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that shares neither our files nor our processes."""
    monkeypatch.setattr(IncusInfo, "is_local", property(lambda _self: False))
