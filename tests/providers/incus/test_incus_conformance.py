"""The conformance suite on real containers of a real Incus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import ClassVar

import pytest
from engines.daemons import NotStartable
from engines.incusd import Incusd
from escape import host
from providers.reuse import OnOneBox

from skerry.model.spec import Spec
from skerry.net.http import HttpClient
from skerry.providers.base import Provider
from skerry.providers.incus import Incus


class _Incus(OnOneBox):
    daemon: Incusd
    _ids: ClassVar[set[str]] = set()
    """Every box that was ever seen, so that what is left of one is seen without its container."""

    @pytest.fixture
    def make_provider(self, incus_daemon: Incusd, incus_image: str, cache: Path) -> Callable[[], Provider]:
        type(self).daemon = incus_daemon
        self.options = {"image": incus_image}
        config = Incus.Config(host=incus_daemon.address, cache_dir=str(cache), pool=self.pool(incus_daemon))
        return lambda: Incus(config)

    def pool(self, daemon: Incusd) -> str:
        return ""

    @pytest.fixture(autouse=True)
    async def _leave_no_volumes(self, provider: Incus) -> AsyncIterator[None]:
        """Data outlives a sandbox, but not its test."""
        yield
        for volume in await provider.volumes():
            if not volume.in_use:
                await provider.remove_volume(volume.name)

    async def on_host(self) -> set[str]:
        """Containers, processes, mounts and cgroups that bear the name of a box."""
        answer = await HttpClient(self.daemon.address).request("GET", "/1.0/instances")
        paths = answer.json(dict[str, object])["metadata"]
        assert isinstance(paths, list)
        names = [str(path).rpartition("/")[2] for path in paths]
        ids = type(self)._ids
        ids |= {name.removeprefix("skerry-") for name in names}
        found = {f"container {name}" for name in names}
        mounts = Path("/proc/self/mounts").read_text()
        found |= {f"mount of {id}" for id in ids if id in mounts}
        groups = host.control_groups("lxc.payload.skerry-")
        found |= {f"cgroup of {id}" for id in ids if any(id in name for name in groups)}
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = entry.read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            found |= {f"process {entry.parent.name} of {id}" for id in ids.intersection(words)}
        return found

    def refused(self, provider: Provider) -> list[Spec]:
        return [
            self.spec(provider, root="/srv"),
            self.spec(provider, runtime="runsc"),
            self.spec(provider, network="host"),
            self.spec(provider, target="elsewhere"),
        ]


class TestIncus(_Incus):
    def pool(self, daemon: Incusd) -> str:
        """One that holds limits, where there can be one."""
        try:
            return daemon.add_pool_with_quotas()
        except NotStartable:
            return ""
