from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from providers.local.conftest import cache, local

from skerry.providers.local import Local
from skerry.sandbox.interpreter import AsyncInterpreter
from skerry.sandbox.sandbox import AsyncSandbox

__all__ = ["cache", "local"]


@pytest.fixture
async def sandbox(local: Local, own_registry: None, tmp_path: Path) -> AsyncIterator[AsyncSandbox]:
    """A real box."""
    async with AsyncSandbox(provider_object=local) as sandbox:
        yield sandbox


@pytest.fixture
async def python(sandbox: AsyncSandbox) -> AsyncInterpreter:
    return await sandbox.interpreter("python", engine="builtin")
