from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from providers.making import require
from surfaces.e2b.envd.envd_world import Client, Sandboxed, serving

from skerry.model.spec import Spec
from skerry.providers.local import Local, LocalConfig
from skerry.sandbox.sandbox import AsyncSandbox


@pytest.fixture(scope="session")
def agent_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("envd-cache")


@pytest.fixture
async def boxed(tmp_path: Path, agent_cache: Path) -> AsyncIterator[Sandboxed]:
    """A sandbox of its own on this host, as envd's calls know it."""
    provider = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(agent_cache)))
    await require(provider)
    sandbox = await AsyncSandbox.create(Spec(provider="local"), provider)
    try:
        yield Sandboxed(sandbox)
    finally:
        await sandbox.destroy(grace_s=0)
        left = await provider.discover()
        await provider.aclose()
    assert not left


@pytest.fixture
async def envd(boxed: Sandboxed) -> AsyncIterator[Client]:
    """A client of envd's calls, over HTTP."""
    async with serving(boxed) as client:
        yield client
