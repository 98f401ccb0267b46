from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skerry.config import variable
from skerry.errors import ProviderUnavailable
from skerry.providers.local import Local

from .outside import LIMITS


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, as it holds sockets."""
    folder = Path(tempfile.mkdtemp(prefix="skerry-storm-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def local(folder: Path) -> dict[str, Any]:
    settings = {"state_dir": str(folder / "state"), "cache_dir": str(folder / "cache"), **LIMITS}
    try:
        asyncio.run(Local(Local.Config(**settings)).check())
    except ProviderUnavailable as error:
        if "local" in (variable("SKERRY_REQUIRE") or "").split(","):
            raise
        pytest.skip(str(error))
    return settings
