"""The suite against any provider by its name: `skerry check NAME`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

from skerry.config import load
from skerry.providers.base import Capability, HasVolumes, Isolation, Provider
from skerry.testing.conformance import ProviderConformance


class TestProvider(ProviderConformance):
    @pytest.fixture
    def make_provider(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Provider]:
        name = request.config.getoption("--skerry-provider")
        if name is None:
            pytest.skip("--skerry-provider NAME says which")
        fields = {field: request.config.getoption(f"--skerry-{field}") for field in ("image", "runtime")}
        self.options = {field: value for field, value in fields.items() if value is not None}
        self.idle_processes = 2  # the agent, and where there is no other way to it, a relay
        self.memory_may_end_box = True
        # A state folder of its own: the sandboxes that are there are none of its business.
        settings = load({"state_dir": str(tmp_path / "state")})

        def make() -> Provider:
            provider = settings.load_provider(name)
            self.simulated = provider.isolation is Isolation.NONE
            return provider

        self.make: Callable[[], Provider] = make
        return make

    @pytest.fixture(autouse=True)
    async def _leave_no_volumes(self, provider: Provider) -> AsyncIterator[None]:
        """Data outlives a sandbox, but not its test."""
        if Capability.VOLUMES not in provider.capabilities:
            yield
            return
        has_volumes = cast("HasVolumes", provider)
        known = {volume.name for volume in await has_volumes.volumes()}
        yield
        for volume in await has_volumes.volumes():
            if volume.name not in known:
                await has_volumes.remove_volume(volume.name)

    async def on_host(self) -> set[str]:
        """No outside witness is known for any provider: ask an object that has made nothing itself."""
        provider = self.make()
        try:
            return set(await provider.discover())
        finally:
            await provider.aclose()
