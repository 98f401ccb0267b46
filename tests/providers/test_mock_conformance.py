"""The conformance suite on the mock: a verified fake, not a stub."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skerry.providers.base import Provider
from skerry.providers.mock import Host, Mock
from skerry.spec import Mount, Spec
from skerry.testing.conformance import ProviderConformance


class TestMock(ProviderConformance):
    simulated = True

    @pytest.fixture
    def make_provider(self) -> Callable[[], Provider]:
        self.host = Host()
        return lambda: Mock(host=self.host)

    async def on_host(self) -> set[str]:
        return set(self.host.boxes)

    def refused(self, provider: Provider) -> list[Spec]:
        return [Spec(provider="mock", mounts=(Mount(source="/tmp", target="/mnt"),))]
