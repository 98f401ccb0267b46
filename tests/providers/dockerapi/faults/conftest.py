from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engines import fixtures
from engines.daemons import Daemon
from engines.images import load

from .victim import Victims
from .world import World


@pytest.fixture(scope="session")
def fragile_daemon() -> Iterator[Daemon]:
    """One that may be killed, unlike the one that all other tests share."""
    yield from fixtures._started("docker")


@pytest.fixture(scope="session")
def image(fragile_daemon: Daemon) -> str:
    return load(fragile_daemon.address, "busybox")


@pytest.fixture
async def world(fragile_daemon: Daemon, image: str, cache: Path, tmp_path: Path) -> AsyncIterator[World]:
    world = World(fragile_daemon, image, cache, tmp_path)
    try:
        yield world
    finally:
        await world.aclose()


@pytest.fixture(scope="session")
def victims() -> Iterator[Victims]:
    with Victims() as victims:
        yield victims
