from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from engines.daemons import Daemon

from skerry.providers.docker import Docker
from skerry.providers.podman import Podman

EngineT = TypeVar("EngineT", Docker, Podman)


@asynccontextmanager
async def left_empty(engine: type[EngineT], daemon: Daemon, folder: Path, cache: Path) -> AsyncIterator[EngineT]:
    """A provider of its own state folder; it has no boxes at the start, and a test fails that leaves one behind."""
    provider = engine(engine.Config(host=daemon.address, state_dir=str(folder / "state"), cache_dir=str(cache)))
    yield provider
    left = await provider.discover()
    for id in left:
        await provider.destroy(id)
    await provider.aclose()
    assert not left


@pytest.fixture
async def docker(
    docker_daemon: Daemon, docker_images: dict[str, str], tmp_path: Path, cache: Path
) -> AsyncIterator[Docker]:
    async with left_empty(Docker, docker_daemon, tmp_path, cache) as provider:
        yield provider


@pytest.fixture
async def podman(
    podman_daemon: Daemon, podman_images: dict[str, str], tmp_path: Path, cache: Path
) -> AsyncIterator[Podman]:
    async with left_empty(Podman, podman_daemon, tmp_path, cache) as provider:
        yield provider
