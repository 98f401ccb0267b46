from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from providers.firecracker.fc_world import Make, provider_on, running_in
from vm.firecracker.installing import StandIns, install

from skerry.host import uids
from skerry.model.spec import Spec
from skerry.providers.firecracker import Firecracker
from skerry.providers.machine import images
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance import base as conformance
from skerry.vm.firecracker import probe
from skerry.vm.images import disks


@pytest.fixture
def world_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """For this test alone, which has to leave nothing that runs there."""
    replaced = [(images, "ImageStore"), (disks, "runtime_disk"), (disks, "blank_disk"), (probe, "check_device")]
    for module, name in replaced:
        monkeypatch.setattr(module, name, getattr(module, name))
    folder = Path(tempfile.mkdtemp(prefix="skerry-fc-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    left = running_in(folder)
    shutil.rmtree(folder)
    assert left == set()


@pytest.fixture
def stand_ins(world_folder: Path) -> StandIns:
    return install(world_folder / "bin")


@pytest.fixture
async def provider(world_folder: Path, stand_ins: StandIns) -> AsyncIterator[Firecracker]:
    """It jails its machines, where that can be done; a test fails that leaves a box behind."""
    made = provider_on(world_folder, jailed=uids.are_available())
    yield made
    boxes = await made.discover()
    for id in boxes:
        await made.destroy(id, volumes=True)
    await made.aclose()
    assert not boxes
    assert stand_ins.violations == []


@pytest.fixture
async def make(provider: Firecracker) -> AsyncIterator[Make]:
    made: list[AsyncSandbox] = []

    async def one(**options: object) -> AsyncSandbox:
        spec = Spec.of(**{"provider": "firecracker", "data": False, **options})  # type: ignore[arg-type]
        made.append(await conformance.make(spec, provider))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy(volumes=True)
