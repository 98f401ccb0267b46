"""Images by way of the manager, on a real engine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from engines.api import ask, ask_json
from engines.daemons import Daemon
from engines.images import load

from skerry.config import Config
from skerry.config import load as load_config
from skerry.errors import Conflict, InvalidSpec, Unsupported
from skerry.manager.manager import AsyncSandboxManager
from skerry.providers.base import Progress

BUSYBOX = "skerry-test/busybox"
DOCKERFILE = f"FROM {BUSYBOX}\nRUN echo made by us > /made\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in [name for name in os.environ if name.startswith("SKERRY_") and name != "SKERRY_REQUIRE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SKERRY_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("SKERRY_STATE_DIR", str(tmp_path / "state"))
    return load_config()


@pytest.fixture
def engine(docker_daemon: Daemon) -> Iterator[Daemon]:
    load(docker_daemon.address, "busybox")
    before = {image["Id"] for image in ask_json(docker_daemon.address, "GET", "/images/json")}
    yield docker_daemon
    for image in ask_json(docker_daemon.address, "GET", "/images/json"):
        if image["Id"] not in before:
            ask(docker_daemon.address, "DELETE", f"/images/{image['Id']}", {"force": "1"})


@pytest.fixture
async def manager(config: Config, engine: Daemon) -> AsyncIterator[AsyncSandboxManager]:
    settings = {"docker": {"host": engine.address}}
    async with AsyncSandboxManager(msgspec.structs.replace(config, provider="docker", providers=settings)) as manager:
        yield manager


async def test_a_base_image_is_built_without_a_trace_in_the_registry(manager: AsyncSandboxManager) -> None:
    told: list[Progress] = []
    config = manager.config
    image = await manager.build_base_image(DOCKERFILE, on_progress=told.append)
    assert (await manager.count(), [each async for each in manager.events()], manager.config) == (0, [], config)
    (name,) = image.names
    assert name.startswith("skerry-base:")
    assert told[-1].done == told[-1].total == 2
    assert image.id in [each.id for each in await manager.images()]
    assert (await manager.build_base_image(DOCKERFILE)).id == image.id
    await manager.remove_image(name)


async def test_a_sandbox_is_made_of_what_was_built_and_keeps_it(manager: AsyncSandboxManager, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    image = await manager.build_base_image(tmp_path / "Dockerfile", name="skerry-test/base")
    sandbox = await manager.create(image="skerry-test/base")
    try:
        assert (await sandbox.exec(["cat", "/made"])).stdout == b"made by us\n"
        (used,) = [each.used_by for each in await manager.images() if each.id == image.id]
        assert used == 1
        with pytest.raises(Conflict, match=sandbox.id):
            await manager.remove_image("skerry-test/base")
    finally:
        await manager.destroy(sandbox.id, volumes=True)
    await manager.remove_image("skerry-test/base")


async def test_a_dockerfile_that_cannot_be_read_is_the_callers_to_mend(
    manager: AsyncSandboxManager, tmp_path: Path
) -> None:
    with pytest.raises(InvalidSpec, match="No such file"):
        await manager.build_base_image(tmp_path / "none")
    with pytest.raises(InvalidSpec, match="empty"):
        await manager.build_base_image("\n")
    for network in ("host", "other"):
        with pytest.raises(InvalidSpec, match="network: "):
            await manager.build_base_image(DOCKERFILE, network=network)
    with pytest.raises(Unsupported, match="docker"):
        await manager.build_base_image(DOCKERFILE, builder="qemu")


async def test_a_provider_without_images_refuses_and_names_those_with(config: Config) -> None:
    manager = AsyncSandboxManager(config)
    with pytest.raises(Unsupported, match="docker, firecracker, incus, podman, qemu"):
        await manager.images(provider="mock")
