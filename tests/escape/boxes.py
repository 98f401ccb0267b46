"""Boxes to attack the host from, of any provider."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import ClassVar

import pytest

from skerry.model.spec import Spec, SpecOptions
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import make

USERS = pytest.mark.parametrize("user", [None, "root"], ids=["user", "root"])
END_S = 15.0

Make = Callable[[SpecOptions], Awaitable[AsyncSandbox]]


class Boxes:
    """A subclass gives a fixture `provider`, and says what its boxes are made of."""

    options: ClassVar[SpecOptions] = {}
    is_virtual: ClassVar[bool] = False
    """The box has a kernel of its own that may answer anything: only the host's side is judged."""

    @pytest.fixture
    async def make(self, provider: Provider) -> AsyncIterator[Make]:
        """Boxes that are gone after the test, whatever they did to stay."""
        made: list[AsyncSandbox] = []

        async def one(options: SpecOptions) -> AsyncSandbox:
            made.append(await make(Spec.of(**self.options).but(**options), provider))
            return made[-1]

        yield one
        async with asyncio.timeout(END_S):
            for sandbox in made:
                await sandbox.destroy()
        assert await provider.discover() == {}

    @pytest.fixture
    async def box(self, make: Make) -> AsyncSandbox:
        return await make({})


def with_rules(make: Make) -> Make:
    """The same boxes, but with rules for their network."""

    def one(options: SpecOptions) -> Awaitable[AsyncSandbox]:
        return make({**options, "network": "rules"})

    return one


def as_user(user: str | None) -> SpecOptions:
    return {} if user is None else {"user": user}
