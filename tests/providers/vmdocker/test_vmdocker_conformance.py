"""What every provider promises of its boxes' lives, in machines that are none: the rest is Docker's, proved there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from engines.daemons import Daemon
from providers.lifetimes import LifetimeTests
from providers.vmdocker.conftest import IMAGE
from providers.vmdocker.fakes import FakeMachines

from skerry.model.spec import Spec
from skerry.net.http import HttpClient
from skerry.providers.base import Provider
from skerry.providers.vmdocker import VmDocker, VmDockerConfig
from skerry.testing.conformance.ends import EndTests
from skerry.testing.conformance.lifecycle import LifecycleTests
from skerry.testing.conformance.limits import LimitTests
from skerry.testing.conformance.network import NetworkTests
from skerry.testing.conformance.verbs import VerbTests


class TestVmDocker(LifetimeTests, LifecycleTests, LimitTests, NetworkTests, VerbTests, EndTests):
    keeps_files_on_stop = False
    idle_processes = 2  # the agent, and the relay that we reach it by
    options: ClassVar[dict[str, object]] = {"image": IMAGE, "project": "conformance"}
    daemon: Daemon

    @pytest.fixture(scope="class")
    @classmethod
    def folder_of_class(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("projects")

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _image(cls, folder_of_class: Path, docker_daemon: Daemon, root: Path) -> None:
        config = VmDockerConfig(state_dir=str(folder_of_class))
        provider = VmDocker(config, machines=FakeMachines(docker_daemon.address))
        asyncio.run(_import(provider, root))

    @pytest.fixture
    def make_provider(self, docker_daemon: Daemon, folder_of_class: Path, cache: Path) -> Callable[[], Provider]:
        type(self).daemon = docker_daemon
        config = VmDockerConfig(state_dir=str(folder_of_class), cache_dir=str(cache))
        return lambda: VmDocker(config, machines=FakeMachines(docker_daemon.address))

    async def on_host(self) -> set[str]:
        """Containers, and what is noted of them."""
        answer = await HttpClient(self.daemon.address).request("GET", "/containers/json", query={"all": True})
        return {name for each in answer.json(list[dict[str, Any]]) for name in each["Names"]}

    def refused(self, provider: Provider) -> list[Spec]:
        return [
            self.spec(provider, root="/srv"),
            self.spec(provider, network="bridge"),
            self.spec(provider, mounts=[{"source": "/srv", "target": "/srv"}]),
        ]


async def _import(provider: VmDocker, root: Path) -> None:
    await provider.import_image(root, IMAGE, lambda _: None)
    await provider.aclose()
