from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from surfaces.e2b.e2b_world import E2b, e2b_serving

from skerry.providers.mock import Mock


@pytest.fixture
async def e2b(tmp_path: Path, own_registry: None, mock_provider: Mock) -> AsyncIterator[E2b]:
    """A server for E2B's clients whose sandboxes are the mock's."""
    async with e2b_serving(tmp_path, mock_provider) as e2b:
        yield e2b
