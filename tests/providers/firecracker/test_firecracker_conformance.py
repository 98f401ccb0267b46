"""The conformance suite on real machines of a real Firecracker, on hosts that have one and KVM."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from providers.firecracker.fc_world import running_in
from providers.reuse import OnOneBox

from skerry.errors import ProviderUnavailable
from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.firecracker import Firecracker, FirecrackerConfig
from skerry.vm.firecracker import probe

_START_S = 60.0
_IS_REQUIRED = "firecracker" in os.environ.get("SKERRY_REQUIRE", "").split(",")

try:
    probe.find("firecracker", "jailer")
    probe.check_device(in_jail=os.geteuid() == 0)
except ProviderUnavailable as error:
    if not _IS_REQUIRED:
        pytest.skip(f"the whole suite: {error.reason}", allow_module_level=True)


@pytest.fixture(scope="session")
def firecracker_cache(request: pytest.FixtureRequest) -> Path:
    """With a kernel and the image `minimal`; templates are kept there for the next run."""
    request.getfixturevalue("vm_image")
    cache: Path = request.getfixturevalue("vm_cache").parent
    try:
        asyncio.run(Firecracker(FirecrackerConfig(cache_dir=str(cache))).check())
    except ProviderUnavailable as error:
        if _IS_REQUIRED:
            raise
        pytest.skip(error.reason)
    return cache


@pytest.mark.timeout(240)
class TestFirecracker(OnOneBox):
    folder: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _own_folder(cls, firecracker_cache: Path, _end_with_the_class: None) -> Iterator[None]:
        """One for the class, as its box lives as long."""
        cls.folder = Path(tempfile.mkdtemp(prefix="skerry-fc-", dir="/tmp"))
        yield
        shutil.rmtree(cls.folder)

    @pytest.fixture
    def make_provider(self, firecracker_cache: Path) -> Callable[[], Provider]:
        config = FirecrackerConfig(
            state_dir=str(self.folder), cache_dir=str(firecracker_cache), start_timeout_s=_START_S
        )
        return lambda: Firecracker(config)

    @pytest.fixture(autouse=True)
    async def _leave_no_volumes(self, provider: Firecracker) -> AsyncIterator[None]:
        """Data outlives a sandbox, but not its test."""
        yield
        for volume in await provider.volumes():
            if not volume.in_use:
                await provider.remove_volume(volume.name)

    async def on_host(self) -> set[str]:
        return {f"process {pid}" for pid in await asyncio.to_thread(running_in, self.folder)}

    def refused(self, provider: Provider) -> list[Spec]:
        return [
            self.spec(provider, root="/srv"),
            self.spec(provider, runtime="runsc"),
            self.spec(provider, network="host"),
            self.spec(provider, network="bridge"),
            self.spec(provider, cache="read"),
            self.spec(provider, mounts=[{"source": "/srv", "target": "/srv"}]),
        ]
