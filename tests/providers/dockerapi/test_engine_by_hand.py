"""Acts by hand on containers of Docker and Podman, with the engine's own tools."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from engines.api import Refused, ask
from engines.daemons import Daemon
from providers.by_hand import ACTS, Act, ByHandTests, each_watch

from skerry.model.spec import SandboxId
from skerry.providers.base import Provider
from skerry.providers.docker import Docker
from skerry.providers.dockerapi import EngineProvider
from skerry.providers.podman import Podman

pytestmark = pytest.mark.timeout(120)


def hands_on(daemon: Daemon) -> dict[str, Act]:
    """As `docker rm -f`, `docker kill` and so on do it."""

    async def request(method: str, path: str, query: dict[str, str], id: SandboxId) -> None:
        await asyncio.to_thread(ask, daemon.address, method, f"/containers/skerry-{id}{path}", query)

    async def terminate(id: SandboxId) -> None:
        await request("POST", "/kill", {"signal": "TERM"}, id)
        await request("POST", "/wait", {}, id)

    async def pause(id: SandboxId) -> None:
        try:
            await request("POST", "/pause", {}, id)
        except Refused as refused:  # the runtime waits a second for the kernel, which may have much to do
            if "unable to freeze" not in str(refused):
                raise
            await request("POST", "/pause", {}, id)

    return {
        "remove": partial(request, "DELETE", "", {"force": "1", "v": "1"}),
        "kill": partial(request, "POST", "/kill", {}),
        "terminate": terminate,
        "stop": partial(request, "POST", "/stop", {"t": "2"}),
        "pause": pause,
        "restart": partial(request, "POST", "/restart", {"t": "2"}),
    }


class _Engine(ByHandTests):
    def check_kept(self, provider: Provider, id: SandboxId) -> None:
        assert isinstance(provider, EngineProvider)
        if os.geteuid() == 0:
            assert (provider._state_dir / id / "home.ext4").exists()


class TestDocker(_Engine):
    @pytest.mark.parametrize("act", [*ACTS, "terminate"])
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(
        self,
        docker: Docker,
        docker_daemon: Daemon,
        docker_images: dict[str, str],
        tmp_path: Path,
        act: str,
        who: str,
    ) -> None:
        await self.judge(docker, tmp_path, who, act, hands_on(docker_daemon), image=docker_images["busybox"])


class TestPodman(_Engine):
    @pytest.fixture
    async def podman(
        self, podman_daemon: Daemon, podman_images: dict[str, str], tmp_path: Path, cache: Path
    ) -> AsyncIterator[Podman]:
        folder = str(tmp_path / "state")
        provider = Podman(Podman.Config(host=podman_daemon.address, state_dir=folder, cache_dir=str(cache)))
        yield provider
        await provider.aclose()

    @pytest.mark.parametrize("act", [*ACTS, "terminate"])
    @each_watch
    async def test_an_act_by_hand_has_one_verdict(
        self,
        podman: Podman,
        podman_daemon: Daemon,
        podman_images: dict[str, str],
        tmp_path: Path,
        act: str,
        who: str,
    ) -> None:
        await self.judge(podman, tmp_path, who, act, hands_on(podman_daemon), image=podman_images["busybox"])
