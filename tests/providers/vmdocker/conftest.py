from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from engines.daemons import Daemon
from engines.images import busybox
from providers.vmdocker.fakes import FakeMachines

from skerry.providers.vmdocker import VmDocker, VmDockerConfig

IMAGE = "skerry-test/in-a-machine"


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root file system, to be imported."""
    path = tmp_path_factory.mktemp("root") / "busybox.tar"
    with busybox() as tar:
        path.write_bytes(tar.read())
    return path


@pytest.fixture
def machines(docker_daemon: Daemon) -> Iterator[FakeMachines]:
    machines = FakeMachines(docker_daemon.address)
    yield machines
    machines.wipe()


@pytest.fixture
def open_again(machines: FakeMachines, tmp_path: Path, cache: Path) -> Callable[[], VmDocker]:
    """Another object for the same installation, as another process would have it."""
    config = VmDockerConfig(state_dir=str(tmp_path / "state"), cache_dir=str(cache), idle_s=100)
    return lambda: VmDocker(config, machines=machines)


@pytest.fixture
async def vmdocker(open_again: Callable[[], VmDocker], root: Path) -> AsyncIterator[VmDocker]:
    """It has an image, and no machine; a test fails that leaves a box."""
    provider = open_again()
    await provider.import_image(root, IMAGE, lambda _: None)
    yield provider
    left = await provider.discover()
    for id in left:
        await provider.destroy(id, volumes=True)
    for volume in await provider.volumes():
        await provider.remove_volume(volume.name)
    await provider.aclose()
    assert not left
