"""The mock keeps every promise that a real provider makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from providers.lifetimes import LifetimeTests

from skerry.model.spec import Spec
from skerry.providers.base import Provider
from skerry.providers.mock import Clock, Host, Mock
from skerry.testing.conformance import ProviderConformance

_TICK_S = 0.01


class TestMock(LifetimeTests, ProviderConformance):
    simulated = True
    host: Host

    @pytest.fixture(autouse=True)
    async def passing_time(self) -> AsyncIterator[None]:
        """The suite waits in real time, so here the virtual clock walks beside it."""
        type(self).host = Host(clock=Clock(autojump=False))

        async def walk() -> None:
            while True:
                await asyncio.sleep(_TICK_S)
                await self.host.clock.advance(_TICK_S)

        walking = asyncio.create_task(walk())
        yield
        walking.cancel()
        await asyncio.wait([walking])

    @pytest.fixture
    def make_provider(self, passing_time: None) -> Callable[[], Provider]:
        return lambda: Mock(host=self.host)

    async def on_host(self) -> set[str]:
        """The boxes in memory, and the processes as the event loop knows them."""
        processes = {task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("mock process")}
        return {*self.host.boxes, *processes}

    def refused(self, provider: Provider) -> list[Spec]:
        return [
            self.spec(provider, root="/srv"),
            self.spec(provider, network="bridge"),
            self.spec(provider, mounts=[{"source": "/srv", "target": "/mnt"}]),
        ]
