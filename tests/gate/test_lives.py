"""The network of a container over all that happens to it: stopped, paused, restarted by hand, restored, forked."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from engines.api import ask
from engines.daemons import Daemon

from skerry.config import Config
from skerry.gate.client import GateClient
from skerry.manager.manager import AsyncSandboxManager
from skerry.sandbox.sandbox import AsyncSandbox

from .own_gate import config_with_gate, end_gates, eventually, web

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def config(docker_daemon: Daemon) -> Iterator[Config]:
    """An installation on Docker; its gate is ended after the test."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-", dir="/tmp"))
    settings = {"docker": {"host": docker_daemon.address, "cache_dir": str(folder / "cache")}}
    yield config_with_gate(folder, provider="docker", providers=settings)
    end_gates(folder)
    shutil.rmtree(folder)


@pytest.fixture
async def manager(config: Config) -> AsyncIterator[AsyncSandboxManager]:
    async with AsyncSandboxManager(config) as manager:
        yield manager
        await manager.destroy_all()


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with web() as port:
        yield port


async def make(manager: AsyncSandboxManager, images: dict[str, str], port: int) -> AsyncSandbox:
    return await manager.create(image=images["busybox"], allow=[f"web.test:{port}"], data=False)


async def fetch(sandbox: AsyncSandbox, port: int, *options: str, user: str | None = None) -> str:
    """What busybox gets, without a proxy if it is told so."""
    argv = ["wget", "-q", "-O", "-", *options, f"http://web.test:{port}/"]
    done = await sandbox.exec(argv, user=user, timeout_s=30)
    return (done.stdout or done.stderr).decode()


async def test_a_container_that_was_stopped_or_paused_has_its_network_again(
    manager: AsyncSandboxManager, docker_images: dict[str, str], port: int
) -> None:
    sandbox = await make(manager, docker_images, port)
    assert await fetch(sandbox, port) == "hello"
    await manager.stop(sandbox.id)
    await sandbox.network.allow("example.org")  # what changes meanwhile holds then
    await manager.start(sandbox.id, env={"MINE": "1"})
    told = (await sandbox.exec("echo $MINE $http_proxy")).text
    assert told.split() == ["1", "http://127.200.0.1:3128"]
    assert await fetch(sandbox, port, "-Y", "off") == "hello"
    await manager.pause(sandbox.id)
    await manager.resume(sandbox.id)
    assert await fetch(sandbox, port, "-Y", "off") == "hello"


async def test_a_container_that_was_restarted_by_hand_gets_its_network_back(
    config: Config, docker_daemon: Daemon, docker_images: dict[str, str], port: int
) -> None:
    async with AsyncSandboxManager(config) as manager:
        sandbox = await make(manager, docker_images, port)
    restart = f"/containers/skerry-{sandbox.id}/restart"
    await asyncio.to_thread(ask, docker_daemon.address, "POST", restart, {"t": "2"})  # and nobody but the gate is there

    def is_up() -> bool:
        status = asyncio.run(GateClient(config).status())
        return status is not None and any(box.up for box in status.boxes)

    await eventually(is_up, "its network")
    async with AsyncSandboxManager(config, reconcile=False) as manager:
        assert await fetch(await manager.get(sandbox.id), port, "-Y", "off") == "hello"
        await manager.destroy_all()


async def test_what_is_restored_or_forked_has_the_network_of_its_rules(
    manager: AsyncSandboxManager, docker_images: dict[str, str], port: int
) -> None:
    sandbox = await make(manager, docker_images, port)
    await manager.snapshot(sandbox.id, "before")
    try:
        restored = await manager.restore(sandbox.id, "before")
        assert await fetch(restored, port) == "hello"
        fork = await manager.fork(sandbox.id)
        assert fork.spec.allow == sandbox.spec.allow
        assert await fetch(fork, port) == "hello"
        other = await manager.fork(sandbox.id, allow=[], network="rules")
        assert "hello" not in await fetch(other, port)
    finally:
        await manager.destroy_all()
        await manager.remove_snapshot("before")


async def test_other_users_of_the_box_are_told_of_its_proxy_too(
    manager: AsyncSandboxManager, docker_images: dict[str, str], port: int
) -> None:
    sandbox = await make(manager, docker_images, port)
    told = await sandbox.exec("echo $http_proxy $(id -u)", user="1234")
    assert told.text.split() == ["http://127.200.0.1:3128", "1234"]
    assert await fetch(sandbox, port, user="1234") == "hello"
