from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Unpack

import pytest
from engines.incus_cluster import Cluster
from engines.incus_world import World
from engines.incusd import Incusd

from skerry.providers.base import Provider
from skerry.providers.incus import Incus
from skerry.providers.incus.info import Info
from skerry.sandbox import AsyncSandbox
from skerry.spec import Spec, SpecOptions

Make = Callable[..., Awaitable[AsyncSandbox]]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folders are built once for all tests, from this checkout."""
    return tmp_path_factory.mktemp("cache")


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
    made: list[AsyncSandbox] = []

    async def one(provider: Provider = incus, **options: Unpack[SpecOptions]) -> AsyncSandbox:
        spec = Spec.of(**{"provider": "incus", "image": incus_image, "data": False, **options})
        made.append(await AsyncSandbox.create(spec, provider))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy(volumes=True)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that shares neither our files nor our processes."""
    monkeypatch.setattr(Info, "is_local", property(lambda _self: False))
