"""Inspect's own check of sandbox environments, whole, on the sandbox that SUITE_SANDBOX describes: fields of a spec, as
JSON. It runs in the environment of Inspect."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from skerry.adapters.inspect_ai import SkerryConfig, SkerrySandboxEnvironment

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def sandbox_env() -> AsyncIterator[SandboxEnvironment]:
    kind = SkerrySandboxEnvironment
    config = SkerryConfig(**json.loads(os.environ.get("SUITE_SANDBOX", "{}")))
    await kind.task_init("self_check", config)
    try:
        environments = await kind.sample_init("self_check", config, {})
        yield environments["default"]
        await kind.sample_cleanup("self_check", config, environments, interrupted=False)
    finally:
        await kind.task_cleanup("self_check", config, cleanup=True)
