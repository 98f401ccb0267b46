from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from skerry.manager.manager import AsyncSandboxManager
from skerry.providers.mock import Host, Mock
from skerry.store import Store

from .world import HostClock, config_of

settings.register_profile("soak", max_examples=20_000)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def mock(host: Host) -> Mock:
    return Mock(host=host)


@pytest.fixture
def host_clock() -> HostClock:
    return HostClock()


@pytest.fixture
async def store(tmp_path: Path, host_clock: HostClock) -> AsyncIterator[Store]:
    store = await Store.open(str(tmp_path / "registry.db"), now=host_clock)
    yield store
    await store.aclose()


@pytest.fixture
async def manager(tmp_path: Path, mock: Mock, store: Store) -> AsyncIterator[AsyncSandboxManager]:
    async with AsyncSandboxManager(config_of(tmp_path), store=store, providers={"mock": mock}) as manager:
        yield manager
        await manager.destroy_all()
