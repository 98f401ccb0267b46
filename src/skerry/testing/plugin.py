"""The pytest plugin that ships with skerry: sandboxes in memory for tests of your own agents.

    async def test_my_agent_fixes_the_bug(mock_provider, async_sandbox):
        mock_provider.program("pytest")(lambda ctx: ctx.print("1 passed"))
        await my_agent(async_sandbox)
        assert (await async_sandbox.files.read_text("fixed.py")) == "..."

Nothing of skerry is imported until a test asks for one of the fixtures.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from skerry.providers.mock import Mock
    from skerry.sandbox.sandbox import AsyncSandbox
    from skerry.sync.api import Sandbox

pytest.register_assert_rewrite("skerry.testing.conformance")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--skerry-provider", help="the provider that the conformance suite is run against")
    parser.addoption("--skerry-image", help="what its boxes are made of")
    parser.addoption("--skerry-runtime", help="what its boxes are run by")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs_real_unix: a conformance check for boxes with a real shell and terminals")


@pytest.fixture
def mock_provider() -> Mock:
    """A fresh mock provider with a host of its own; register programs and replies, inject faults, turn its clock."""
    from skerry.providers.mock import Mock

    return Mock()


@pytest.fixture
async def async_sandbox(mock_provider: Mock) -> AsyncIterator[AsyncSandbox]:
    """A ready sandbox on `mock_provider`, gone after the test. Needs an async test plugin, such as anyio's."""
    from skerry.sandbox.sandbox import AsyncSandbox

    async with AsyncSandbox(provider="mock", provider_object=mock_provider) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox(mock_provider: Mock) -> Iterator[Sandbox]:
    """A ready sandbox on `mock_provider` for tests without async, gone after the test."""
    from skerry.sync.api import Sandbox

    with Sandbox(provider="mock", provider_object=mock_provider) as ready:
        yield ready
