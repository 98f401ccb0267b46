"""Managers to test side by side: one of this process, and one of a server that this process runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from manager.world import config_of
from surfaces.server.world import Served, serving

from skerry.manager.manager import AsyncSandboxManager
from skerry.providers.mock import Mock
from skerry.remote.manager import AsyncRemoteManager
from skerry.store import Store


@pytest.fixture
async def served(tmp_path: Path, own_registry: None, mock_provider: Mock) -> AsyncIterator[Served]:
    """A server whose sandboxes are the mock's."""
    async with serving(tmp_path, mock_provider) as served:
        yield served


@pytest.fixture(params=["mock-embedded", "mock-remote", "local-embedded", "local-remote"])
def place(request: pytest.FixtureRequest, own_registry: None, tmp_path: Path) -> tuple[str, str, Path]:
    """A provider, where its manager is, and a folder for its state."""
    kind, _, where = request.param.partition("-")
    return kind, where, request.getfixturevalue("folder") if kind == "local" else tmp_path


@pytest.fixture
async def manager(place: tuple[str, str, Path], mock_provider: Mock) -> AsyncIterator[AsyncSandboxManager]:
    """A manager whose sandboxes are the mock's or real boxes, here or on a server."""
    kind, where, folder = place
    provider = mock_provider if kind == "mock" else None
    config = config_of(folder, provider=kind)
    async with AsyncExitStack() as stack:
        if where == "embedded":
            store = await Store.open(config.database)
            stack.push_async_callback(store.aclose)
            providers = None if provider is None else {kind: provider}
            yield await stack.enter_async_context(AsyncSandboxManager(config, store=store, providers=providers))
        else:
            served = await stack.enter_async_context(serving(folder, provider, config=config))
            remote = AsyncRemoteManager(served.url, await served.token(), config=config)
            yield await stack.enter_async_context(remote)
