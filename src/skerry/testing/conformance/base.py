"""What the parts of the suite share: a provider, a sandbox on it, and a witness on the host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from skerry.providers.base import Provider
from skerry.sandbox import AsyncSandbox
from skerry.spec import Spec

DEADLINE_S = 20.0


class Suite:
    """Subclass it with a `make_provider` fixture and `on_host`."""

    options: dict[str, object] = {}  # noqa: RUF012
    """Spec fields that every sandbox of this run needs, such as an image."""

    @pytest.fixture
    def anyio_backend(self) -> str:
        return "asyncio"

    @pytest.fixture
    def make_provider(self) -> Callable[[], Provider]:
        """Gives another object for the same installation each time, as a new process would have it."""
        raise NotImplementedError("a provider's test gives a `make_provider` fixture")

    @pytest.fixture
    async def provider(self, make_provider: Callable[[], Provider]) -> AsyncIterator[Provider]:
        provider = make_provider()
        yield provider
        await provider.aclose()

    async def on_host(self) -> set[str]:
        """What the host holds of our boxes, seen without asking the provider: processes, containers, mounts."""
        raise NotImplementedError("a provider's test says what its boxes leave on the host")

    def spec(self, provider: Provider, **fields: object) -> Spec:
        return Spec.parse({"provider": provider.name, **self.options, **fields})

    @pytest.fixture
    async def sandbox(self, provider: Provider) -> AsyncIterator[AsyncSandbox]:
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        yield sandbox
        await sandbox.destroy()


PassTime = Callable[[float], Awaitable[object]]


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, pass_time: PassTime = asyncio.sleep) -> None:
    """Wait for something that the other side does in its own time, up to a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        await pass_time(0.01)
