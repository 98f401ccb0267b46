"""An image with a server of its own, as Discobot's: it comes up, answers at its address, and does so again after a stop
and a start, and after a restart of the engine; on every engine and in machines."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engines import images
from engines.api import ask
from engines.daemons import Daemon
from engines.oci_layouts import Layout
from manager.world import config_of

from skerry.config import Config
from skerry.errors import InvalidSpec
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Filter
from skerry.model.spec import Spec, new_id
from skerry.providers.qemu import Qemu, QemuConfig

from .world import fetch, forwarders, is_refused, notes

pytestmark = pytest.mark.timeout(240)

SERVER = "skerry-test/discobot:1"
ENTRYPOINT, CMD = ["/bin/busybox", "httpd"], ["-f", "-p", "3002", "-h", "/etc"]
PAGE = b"root:x:0:0"


class World(NamedTuple):
    config: Config
    daemon: Daemon
    spec: Spec

    async def restart(self) -> None:
        """The daemon dies and comes back, as at an upgrade."""
        await asyncio.to_thread(self.daemon.kill)
        await asyncio.to_thread(self.daemon.start)


def server_layout(folder: Path) -> Path:
    """The image as an OCI layout: busybox, and the command that Docker would run."""
    with images.busybox() as tar:
        layout = Layout(tar.read())
    layout.config["config"] = {"Entrypoint": ENTRYPOINT, "Cmd": CMD}
    layout.config["history"] = [{"created_by": "a test"}]  # Podman commits no image that tells of fewer layers
    layout.manifest["config"] = layout.add(json.dumps(layout.config).encode(), layout.manifest["config"]["mediaType"])
    layout.refer()
    return layout.write(folder)


@asynccontextmanager
async def installed(daemon: Daemon, folder: Path, cache: Path) -> AsyncIterator[World]:
    """An engine that has the image, and in the end nothing of this test."""
    name = daemon.name
    mine: dict[str, Any] = {"host": daemon.address, "cache_dir": str(cache), "disk": "16M"}
    config = config_of(folder / "state", provider=name, providers={name: mine})
    async with AsyncSandboxManager(config) as manager:
        await manager.import_image(server_layout(folder / "layout"), SERVER)
        yield World(config, daemon, Spec.of(provider=name, image=SERVER, command="image", ports=[3002], data=False))
        left = await manager.list()
        await manager.destroy_all()
        await manager.remove_image(SERVER, force=True)
    assert left == []
    assert notes(folder / "state") == []


class Services:
    """The same of every engine."""

    async def test_a_server_of_an_image_answers_and_does_again_after_stop_and_start(self, world: World) -> None:
        async with AsyncSandboxManager(world.config) as manager:
            sandbox = await manager.create(world.spec)
            address = sandbox.addresses[3002]
            assert PAGE in await asyncio.to_thread(fetch, address, "/passwd")
            await manager.stop(sandbox.id)
            assert not is_refused(address)  # the port is kept, and leads nowhere
            await manager.start(sandbox.id)
            assert PAGE in await asyncio.to_thread(fetch, address, "/passwd")
            status = await sandbox.service.status()
            assert status is not None
            assert status.healthy
            await manager.destroy(sandbox.id)
        assert is_refused(address)
        assert forwarders(sandbox.id) == []

    async def test_it_answers_again_after_a_restart_of_the_engine(self, world: World) -> None:
        async with AsyncSandboxManager(world.config) as manager:
            sandbox = await manager.create(world.spec)
            address = sandbox.addresses[3002]
            await asyncio.to_thread(fetch, address, "/passwd")
        await world.restart()
        assert PAGE in await asyncio.to_thread(fetch, address, "/passwd")
        async with AsyncSandboxManager(world.config) as manager:
            await manager.reconcile()
            assert (await manager.get(sandbox.id)).addresses == {3002: address}
            await manager.destroy(sandbox.id)

    async def test_a_copy_has_an_address_of_its_own_and_the_images_command(self, world: World) -> None:
        async with AsyncSandboxManager(world.config) as manager:
            sandbox = await manager.create(world.spec)
            copy = await manager.fork(sandbox.id)
            assert copy.addresses[3002] != sandbox.addresses[3002]
            for each in (sandbox, copy):
                assert PAGE in await asyncio.to_thread(fetch, each.addresses[3002], "/passwd")
            for each in (copy, sandbox):
                await manager.destroy(each.id)

    async def test_an_image_without_a_command_is_refused(self, world: World, tmp_path: Path) -> None:
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("empty"))
        layout = Layout(made.getvalue()).write(tmp_path / "none")
        async with AsyncSandboxManager(world.config) as manager:
            await manager.import_image(layout, "skerry-test/silent:1")
            try:
                with pytest.raises(InvalidSpec, match="names no command"):
                    await manager.create(world.spec.but(image="skerry-test/silent:1"))
                assert await manager.list(Filter(include_ended=True)) == []
            finally:
                await manager.remove_image("skerry-test/silent:1", force=True)


class TestDocker(Services):
    @pytest.fixture
    async def world(self, docker_daemon: Daemon, tmp_path: Path, cache: Path) -> AsyncIterator[World]:
        async with installed(docker_daemon, tmp_path, cache) as world:
            yield world

    async def test_one_in_gvisor_is_seen_to_listen(self, world: World, gvisor: str) -> None:
        async with AsyncSandboxManager(world.config) as manager:
            sandbox = await manager.create(world.spec.but(runtime=gvisor))
            assert PAGE in await asyncio.to_thread(fetch, sandbox.addresses[3002], "/passwd")
            status = await sandbox.service.status()
            assert status is not None
            assert (status.healthy, status.listening) == (True, [3002])
            await manager.destroy(sandbox.id)

    async def test_a_container_that_is_restarted_by_hand_serves_again(self, world: World) -> None:
        async with AsyncSandboxManager(world.config) as manager:
            sandbox = await manager.create(world.spec)
            await asyncio.to_thread(fetch, sandbox.addresses[3002], "/passwd")
            path = f"/containers/skerry-{sandbox.id}/restart"
            await asyncio.to_thread(ask, world.daemon.address, "POST", path, {"t": "0"})
            assert PAGE in await asyncio.to_thread(fetch, sandbox.addresses[3002], "/passwd")
            await manager.destroy(sandbox.id)


class TestPodman(Services):
    @pytest.fixture
    async def world(self, podman_daemon: Daemon, tmp_path: Path, cache: Path) -> AsyncIterator[World]:
        async with installed(podman_daemon, tmp_path, cache) as world:
            yield world


class TestIncus(Services):
    @pytest.fixture
    async def world(self, incus_daemon: Daemon, tmp_path: Path, cache: Path) -> AsyncIterator[World]:
        async with installed(incus_daemon, tmp_path, cache) as world:
            yield world


@pytest.fixture
async def machines(qemu: Qemu, config: QemuConfig, tmp_path: Path) -> Config:
    mine = {name: getattr(config, name) for name in ("state_dir", "cache_dir", "start_timeout_s")}
    return config_of(tmp_path / "state", provider="qemu", providers={"qemu": mine})


async def test_a_server_in_a_machine_answers_and_does_again_after_stop_and_start(machines: Config) -> None:
    async with AsyncSandboxManager(machines) as manager:
        command = ["busybox", "httpd", "-f", "-p", "3002", "-h", "/etc"]
        sandbox = await manager.create(command=command, ports=[3002], data=False)
        address = sandbox.addresses[3002]
        assert b"root" in await asyncio.to_thread(fetch, address, "/passwd")
        await manager.stop(sandbox.id)
        await manager.start(sandbox.id)
        assert b"root" in await asyncio.to_thread(fetch, address, "/passwd")
        await manager.destroy(sandbox.id)
    assert is_refused(address)


async def test_a_machine_runs_the_command_of_its_image(machines: Config, tmp_path: Path) -> None:
    image = f"services-{new_id()}"
    async with AsyncSandboxManager(machines) as manager:
        await manager.import_image(server_layout(tmp_path / "layout"), image)
        try:
            sandbox = await manager.create(image=image, command="image", ports=[3002], data=False)
            assert PAGE in await asyncio.to_thread(fetch, sandbox.addresses[3002], "/passwd")
            await manager.destroy(sandbox.id)
            with pytest.raises(InvalidSpec, match="names no command"):
                await manager.create(command="image", ports=[3002], data=False)  # the smallest image has none
        finally:
            await manager.remove_image(image)
