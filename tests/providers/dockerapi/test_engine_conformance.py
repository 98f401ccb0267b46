"""The conformance suite on real containers: Docker with runc and gVisor, and Podman, with and without Python inside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from engines.daemons import Daemon
from providers.reuse import OnOneBox

from skerry.model.spec import Spec, new_id
from skerry.net.http import HttpClient
from skerry.providers.base import BoxState, Provider
from skerry.providers.docker import Docker
from skerry.providers.dockerapi import EngineProvider
from skerry.providers.podman import Podman


class _Engine(OnOneBox):
    daemon: Daemon
    cls: ClassVar[type[EngineProvider]]
    image: ClassVar[str]

    def _make(self, daemon: Daemon, images: dict[str, str], folder: Path, cache: Path) -> Callable[[], Provider]:
        type(self).daemon = daemon
        self.options = {"image": images[self.image], **self.more}
        self.state = folder / "state"
        return lambda: self.cls(self.cls.Config(host=daemon.address, state_dir=str(self.state), cache_dir=str(cache)))

    more: ClassVar[dict[str, object]] = {}

    @pytest.fixture(scope="class")
    @classmethod
    def folder_of_class(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("boxes")

    @pytest.fixture(autouse=True)
    def _leave_no_volumes(self, provider: Provider) -> Iterator[None]:
        """Data outlives a sandbox, but not its test; what a box still has cannot be removed."""
        yield
        asyncio.run(remove_volumes(type(self).daemon.address))

    _ids: ClassVar[set[str]] = set()
    """Every box that was ever seen, so that what is left of one is seen without its container."""

    async def on_host(self) -> set[str]:
        """Containers, processes, mounts and disks that bear the name of a box."""
        answer = await HttpClient(self.daemon.address).request("GET", "/containers/json", query={"all": True})
        names = [name for each in answer.json(list[dict[str, Any]]) for name in each["Names"]]
        folders = [path.name for path in self.state.glob("*-*-*")]
        ids = type(self)._ids
        ids |= {name.removeprefix("/skerry-") for name in names} | set(folders)
        found = {f"container {name}" for name in names} | {f"folder {name}" for name in folders}
        mounts = Path("/proc/self/mounts").read_text()
        found |= {f"mount of {id}" for id in ids if f"/run/skerry/mounts/{id}/" in mounts}
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found |= {f"process {entry.parent.name} of {id}" for id in ids.intersection(words)}
        return found

    async def test_a_paused_box_is_stopped_and_starts_again(self, provider: Provider) -> None:
        box = cast("EngineProvider", provider)
        spec, id = self.spec(provider), new_id()
        await box.create(id, spec)
        try:
            await box.pause(id)
            await box.stop(id)
            assert (await box.discover())[id].state is BoxState.STOPPED
            await box.start(id, spec)
            assert (await box.discover())[id].state is BoxState.RUNNING
        finally:
            await box.destroy(id, volumes=True)

    def refused(self, provider: Provider) -> list[Spec]:
        return [
            self.spec(provider, root="/srv"),
            self.spec(provider, runtime="no-such-runtime"),
            self.spec(provider, disk=1 << 24, data=True),
        ]


async def remove_volumes(address: str) -> None:
    http = HttpClient(address)
    answer = await http.request("GET", "/volumes", query={"filters": {"label": ["skerry.sandbox"]}})
    for volume in answer.json(dict[str, list[dict[str, object]] | None])["Volumes"] or []:
        await http.request("DELETE", f"/volumes/{volume['Name']}")


class _Docker(_Engine):
    cls = Docker

    @pytest.fixture
    def make_provider(
        self, docker_daemon: Daemon, docker_images: dict[str, str], folder_of_class: Path, cache: Path
    ) -> Callable[[], Provider]:
        return self._make(docker_daemon, docker_images, folder_of_class, cache)


class TestDockerWithBusybox(_Docker):
    image = "busybox"


class TestDockerWithDebian(_Docker):
    image = "debian"


@pytest.mark.usefixtures("gvisor")
class _Gvisor(_Docker):
    more: ClassVar[dict[str, object]] = {"runtime": "runsc"}
    idle_processes = 2  # the agent, and the relay that we reach it by
    memory_may_end_box = True


class TestGvisorWithBusybox(_Gvisor):
    image = "busybox"


class TestGvisorWithDebian(_Gvisor):
    image = "debian"


class _Podman(_Engine):
    cls = Podman

    @pytest.fixture
    def make_provider(
        self, podman_daemon: Daemon, podman_images: dict[str, str], folder_of_class: Path, cache: Path
    ) -> Callable[[], Provider]:
        return self._make(podman_daemon, podman_images, folder_of_class, cache)


class TestPodmanWithBusybox(_Podman):
    image = "busybox"


class TestPodmanWithDebian(_Podman):
    image = "debian"
