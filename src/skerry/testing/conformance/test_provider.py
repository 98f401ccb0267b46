"""The suite against any provider by its name: `skerry check NAME`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skerry.config import load
from skerry.providers.base import Provider
from skerry.testing.conformance import ProviderConformance


class TestProvider(ProviderConformance):
    @pytest.fixture
    def make_provider(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Provider]:
        name = request.config.getoption("--skerry-provider")
        if name is None:
            pytest.skip("--skerry-provider NAME says which")
        # A state folder of its own: the sandboxes that are there are none of its business.
        settings = load({"state_dir": str(tmp_path / "state")})
        self.make: Callable[[], Provider] = lambda: settings.load_provider(name)
        return self.make

    async def on_host(self) -> set[str]:
        """No outside witness is known for any provider: ask an object that has made nothing itself."""
        provider = self.make()
        try:
            return set(await provider.discover())
        finally:
            await provider.aclose()
