from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from engines.daemons import Daemon
from escape.takeover import SocketCases
from manager.world import config_of

from skerry.manager.manager import AsyncSandboxManager
from skerry.model.spec import Spec, SpecOptions
from skerry.providers.docker import Docker
from skerry.providers.podman import Podman


class TestDocker(SocketCases):
    options: ClassVar[SpecOptions] = {"provider": "docker", "image": "skerry-test/debian", "data": False}

    @pytest.fixture
    def provider(self, docker: Docker) -> Docker:
        return docker

    async def test_root_has_the_environment_that_any_program_gave_and_none_that_the_box_did(
        self, docker: Docker, tmp_path: Path
    ) -> None:
        def program() -> AsyncSandboxManager:
            return AsyncSandboxManager(config_of(tmp_path), providers={"docker": docker})

        async def seen(id: str) -> str:
            async with program() as other:
                return (await other.execute(id, 'echo "$MADE $STARTED $SET $LIE"', user="root")).text

        async with program() as manager:
            box = await manager.create(Spec.of(**self.options).but(env={"MADE": "1"}))
            assert await seen(box.id) == "1   \n"
            await manager.stop(box.id)
            await manager.start(box.id, {"STARTED": "2"})
            await (await manager.get(box.id)).set_env({"SET": "3"})
            await box.call("set_env", {"env": {"MADE": "lie", "LIE": "4"}})
            assert await seen(box.id) == " 2 3 \n"
            await manager.destroy(box.id)


class TestGvisor(SocketCases):
    options: ClassVar[SpecOptions] = {**TestDocker.options, "runtime": "runsc"}
    hides_peers = True
    debugs_by: ClassVar[frozenset[str]] = frozenset({"follow a descriptor"})
    own: ClassVar[frozenset[str]] = frozenset(
        {"follow a descriptor", "read its maps", "read its environment", "read its vector"}
    )
    """gVisor lets root read that of any process; the agent's memory and descriptors are closed to it all the same."""

    @pytest.fixture
    def provider(self, docker: Docker, gvisor: str) -> Docker:
        return docker


class TestPodman(SocketCases):
    options: ClassVar[SpecOptions] = {"provider": "podman", "image": "skerry-test/debian", "data": False}

    @pytest.fixture
    async def provider(
        self, podman_daemon: Daemon, podman_images: dict[str, str], tmp_path: Path, cache: Path
    ) -> AsyncIterator[Podman]:
        config = Podman.Config(host=podman_daemon.address, state_dir=str(tmp_path / "state"), cache_dir=str(cache))
        provider = Podman(config)
        yield provider
        await provider.aclose()
