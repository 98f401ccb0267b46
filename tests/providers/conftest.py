from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared folders are built once for all tests, from this checkout."""
    return tmp_path_factory.mktemp("cache")
