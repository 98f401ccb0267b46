from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Unpack

import pytest
from manager.world import config_of
from providers.qemu.host import START_S, Make, left_of

from skerry.errors import ProviderUnavailable
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec, SpecOptions
from skerry.providers.qemu import Qemu, QemuConfig
from skerry.sandbox.sandbox import AsyncSandbox


@pytest.fixture(scope="session")
def qemu_cache(vm_cache: Path, vm_image: str) -> Path:
    """With a kernel and the image `minimal`; templates are kept there for the next run."""
    try:
        asyncio.run(Qemu(QemuConfig(cache_dir=str(vm_cache.parent))).check())
    except ProviderUnavailable as error:
        if "qemu" in os.environ.get("SKERRY_REQUIRE", "").split(","):
            raise
        pytest.skip(str(error))
    return vm_cache.parent


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """A state folder for this test alone, which has to leave neither a box nor anything that runs there."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-qemu-", dir="/tmp"))
    yield folder
    left = left_of(folder)
    shutil.rmtree(folder)
    assert left == set()


@pytest.fixture
def config(qemu_cache: Path, state_dir: Path) -> QemuConfig:
    return QemuConfig(state_dir=str(state_dir), cache_dir=str(qemu_cache), start_timeout_s=START_S)


@pytest.fixture
async def qemu(config: QemuConfig) -> AsyncIterator[Qemu]:
    """A provider; a test fails that leaves a box of it behind."""
    provider = Qemu(config)
    yield provider
    boxes = await provider.discover()
    for id in boxes:
        await provider.destroy(id, volumes=True)
    for volume in await provider.volumes():
        await provider.remove_volume(volume.name)
    await provider.aclose()
    assert not boxes


@pytest.fixture
async def make(qemu: Qemu) -> AsyncIterator[Make]:
    """Boxes that are gone after the test."""
    made: list[AsyncSandbox] = []

    async def one(**options: Unpack[SpecOptions]) -> AsyncSandbox:
        made.append(await AsyncSandbox.create(Spec.of(**{"provider": "qemu", "data": False, **options}), qemu))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy(volumes=True)


@pytest.fixture
async def manager(qemu: Qemu, config: QemuConfig, tmp_path: Path) -> AsyncIterator[AsyncSandboxManager]:
    mine = {name: getattr(config, name) for name in ("state_dir", "cache_dir", "start_timeout_s")}
    settings = config_of(tmp_path, provider="qemu", providers={"qemu": mine})
    async with AsyncSandboxManager(settings, reconcile=False) as manager:
        yield manager
