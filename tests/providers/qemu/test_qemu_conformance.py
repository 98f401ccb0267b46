"""The conformance suite on real virtual machines of QEMU."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from providers.qemu.host import START_S, left_of
from providers.reuse import OnOneBox

from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.qemu import Qemu, QemuConfig


@pytest.mark.timeout(240)
class TestQemu(OnOneBox):
    folder: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _end_with_the_class(cls) -> Iterator[None]:
        """One folder for the class, as its box lives as long."""
        cls.folder = Path(tempfile.mkdtemp(prefix="skerry-qemu-", dir="/tmp"))
        with cls.reusing():
            yield
        left = left_of(cls.folder)
        shutil.rmtree(cls.folder)
        assert left == set()

    @pytest.fixture
    def make_provider(self, qemu_cache: Path) -> Callable[[], Provider]:
        config = QemuConfig(state_dir=str(self.folder), cache_dir=str(qemu_cache), start_timeout_s=START_S)
        return lambda: Qemu(config)

    @pytest.fixture(autouse=True)
    async def _leave_no_volumes(self, provider: Qemu) -> AsyncIterator[None]:
        """Data outlives a sandbox, but not its test."""
        yield
        for volume in await provider.volumes():
            if not volume.in_use:
                await provider.remove_volume(volume.name)

    async def on_host(self) -> set[str]:
        return await asyncio.to_thread(left_of, self.folder)

    def refused(self, provider: Provider) -> list[Spec]:
        return [
            self.spec(provider, root="/srv"),
            self.spec(provider, runtime="runsc"),
            self.spec(provider, network="host"),
            self.spec(provider, cache="read"),
            self.spec(provider, mounts=[{"source": "/srv", "target": "/srv"}]),
        ]
