"""Sandboxes that a test makes on a provider, gone after it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Unpack

import pytest

from skerry.config import variable
from skerry.errors import ProviderUnavailable
from skerry.model.spec import Spec, SpecOptions
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox

Make = Callable[..., Awaitable[AsyncSandbox]]


async def require(provider: Provider) -> None:
    """Skip a test where its provider cannot be used, but not if SKERRY_REQUIRE has that."""
    try:
        await provider.check()
    except ProviderUnavailable as error:
        if provider.name in (variable("SKERRY_REQUIRE") or "").split(","):
            raise
        pytest.skip(str(error))


@asynccontextmanager
async def making(usual: Provider, **defaults: Unpack[SpecOptions]) -> AsyncIterator[Make]:
    """Yield a function that makes a sandbox: of `defaults`, and on `usual`, unless it is told otherwise."""
    made: list[AsyncSandbox] = []

    async def one(provider: Provider = usual, **options: Unpack[SpecOptions]) -> AsyncSandbox:
        spec = Spec.of(**{"provider": usual.name, **defaults, **options})
        made.append(await AsyncSandbox.create(spec, provider))
        return made[-1]

    yield one
    for sandbox in made:
        await sandbox.destroy(volumes=True)
