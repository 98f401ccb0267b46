from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from surfaces.server.mcp_world import really
from surfaces.server.world import Served, serving

from skerry.providers.mock import Mock


@pytest.fixture
async def served(tmp_path: Path, own_registry: None, mock_provider: Mock) -> AsyncIterator[Served]:
    """A server whose sandboxes are the mock's."""
    async with serving(tmp_path, mock_provider) as served:
        yield served


@pytest.fixture
async def real(own_registry: None, folder: Path) -> AsyncIterator[Served]:
    """A server whose sandboxes are real, and end with the test."""
    async with really(folder) as served:
        yield served
