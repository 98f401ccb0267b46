from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from providers.local.forks import warm_up, zygotes_of
from providers.making import require

from skerry.host import scope
from skerry.providers.local import Local, LocalConfig
from skerry.providers.local.host import Host
from skerry.providers.local.zygote import Zygotes


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The shared folders are built once for all tests, from this checkout, and so is the zygote started."""
    folder = tmp_path_factory.mktemp("cache")
    yield folder
    Zygotes(Host(folder), folder / "zygotes", lambda _: None).end()


@pytest.fixture
async def local(tmp_path: Path, cache: Path) -> AsyncIterator[Local]:
    """A provider of its own state folder; it has no boxes at the start, and a test fails that leaves one behind."""
    provider = Local(LocalConfig(state_dir=str(tmp_path / "state"), cache_dir=str(cache)))
    await require(provider)
    yield provider
    left = await provider.discover()
    for id in left:
        await provider.destroy(id)
    await provider.aclose()
    assert not left


@pytest.fixture
async def warm(local: Local, cache: Path) -> AsyncIterator[Local]:
    """A provider that has a zygote."""
    if scope.holder().by_scope:
        pytest.skip("boxes are in scopes of systemd here")
    await warm_up(local)
    yield local
    for pid in zygotes_of(cache):  # a test may have stopped it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
