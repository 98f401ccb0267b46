from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from skerry.config import variable
from skerry.errors import ProviderUnavailable
from skerry.providers.local import Local, LocalConfig


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folders are built once for all tests, from this checkout."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
async def local(tmp_path: Path, cache: Path) -> AsyncIterator[Local]:
    """A provider of its own state folder; it has no boxes at the start, and a test fails that leaves one behind."""
    provider = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(cache)))
    try:
        await provider.check()
    except ProviderUnavailable as error:
        if "local" in (variable("SKERRY_REQUIRE") or "").split(","):
            raise
        pytest.skip(str(error))
    yield provider
    left = await provider.discover()
    for id in left:
        await provider.destroy(id)
    await provider.aclose()
    assert not left
