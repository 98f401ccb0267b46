from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from engines.daemons import Daemon

from skerry.providers.docker import Docker


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folders are built once for all tests, from this checkout."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def docker(
    docker_daemon: Daemon, docker_images: dict[str, str], tmp_path: Path, cache: Path
) -> AsyncIterator[Docker]:
    """A provider of its own state folder; it has no boxes at the start, and a test fails that leaves one behind."""
    config = Docker.Config(host=docker_daemon.address, state_dir=str(tmp_path / "state"), cache_dir=str(cache))
    provider = Docker(config)
    yield provider
    left = await provider.discover()
    for id in left:
        await provider.destroy(id)
    await provider.aclose()
    assert not left
