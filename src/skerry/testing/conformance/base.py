"""What the parts of the suite share: a provider, a sandbox on it, and a witness on the host."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skerry.manager.create import create_or_nothing
from skerry.manager.providers import admit
from skerry.model.spec import Network, Spec, new_id
from skerry.providers.base import BoxState, Provider
from skerry.sandbox.sandbox import AsyncSandbox

DEADLINE_S = 20.0


class Suite:
    """Subclass it with a `make_provider` fixture and `on_host`."""

    simulated = False
    """True for a provider whose boxes are no real Unix, with no memory and processors to limit."""
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

    @pytest.fixture(autouse=True)
    def _only_on_a_real_unix(self, request: pytest.FixtureRequest, provider: Provider) -> None:
        if self.simulated and request.node.get_closest_marker("needs_real_unix") is not None:
            pytest.skip("needs a real Unix: this provider's boxes have a tiny shell and no terminals")

    async def on_host(self) -> set[str]:
        """What the host holds of our boxes, seen without asking the provider: processes, containers, mounts."""
        raise NotImplementedError("a provider's test says what its boxes leave on the host")

    def spec(self, provider: Provider, **fields: object) -> Spec:
        return Spec.parse({"provider": provider.name, **self.options, **fields})

    @asynccontextmanager
    async def box(self, provider: Provider, *, volumes: bool = True, **fields: Any) -> AsyncIterator[AsyncSandbox]:
        """A sandbox, gone at the end of the block."""
        sandbox = await make(self.spec(provider, **fields), provider)
        try:
            yield sandbox
        finally:
            await sandbox.destroy(volumes=volumes)

    @pytest.fixture
    async def sandbox(self, provider: Provider) -> AsyncIterator[AsyncSandbox]:
        async with self.box(provider, volumes=False) as sandbox:
            yield sandbox

    async def expect_end(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        """Wait until a box ends by itself; a provider with a clock of its own tells how time passes on it."""

        async def ended() -> bool:
            status = (await provider.discover()).get(sandbox.id)
            return status is None or status.state is not BoxState.RUNNING

        await eventually(ended, "the box ends by itself", getattr(provider, "pass_time", asyncio.sleep))


async def make(spec: Spec, provider: Provider) -> AsyncSandbox:
    """Make a sandbox; one whose network has rules is as its provider made it, and no gate serves it, as the gate is
    another program and does not know this provider object."""
    if spec.network is not Network.RULES:
        return await AsyncSandbox.create(spec, provider)
    enforced, id = await admit(provider, spec), new_id()
    held = await create_or_nothing(provider, id, spec)
    sandbox = AsyncSandbox.of_box(id, spec, provider)
    sandbox.enforced = {**enforced, **held}
    return sandbox


PassTime = Callable[[float], Awaitable[object]]


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, pass_time: PassTime = asyncio.sleep) -> None:
    """Wait for something that the other side does in its own time, up to a deadline."""
    end = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < end, f"not within {DEADLINE_S:g} s: {what}"
        await pass_time(0.01)
