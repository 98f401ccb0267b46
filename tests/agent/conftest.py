from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from skerry.sandbox.sandbox import AsyncSandbox

from .guest_process import Guest


@pytest.fixture
def guest() -> Iterator[Guest]:
    """The agent as a process of this host; what it complains about fails the test."""
    with Guest() as running:
        yield running


@pytest.fixture
async def sandbox(guest: Guest) -> AsyncIterator[AsyncSandbox]:
    """A sandbox whose agent is a process of this host, without any isolation."""
    made = guest.sandbox()
    yield made
    await made.close()
