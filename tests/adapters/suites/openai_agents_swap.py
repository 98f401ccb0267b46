"""Plugin of pytest that gives the SDK's own tests our sandboxes where they would make processes of this host."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from agents.sandbox import sandboxes
from agents.sandbox.sandboxes import unix_local

import skerry
from skerry.adapters.openai_agents import SkerrySandboxClient, SkerrySandboxClientOptions
from skerry.errors import NotFound
from skerry.sandbox.sandbox import AsyncSandbox

_made: list[str] = []


class Client(SkerrySandboxClient):
    """Ours under the name that the tests ask for, and without the wish that a box is never refused: an environment
    that is not the host's."""

    backend_id = "unix_local"

    def __init__(self, *, inherit_host_environment: bool = False, **options: Any) -> None:
        super().__init__(**json.loads(os.environ.get("SUITE_SANDBOX", "{}")), **options)

    async def _make(self) -> AsyncSandbox:
        sandbox = await super()._make()
        _made.append(sandbox.id)
        return sandbox


@pytest.fixture(autouse=True)
def _end_what_a_test_leaves() -> Iterator[None]:
    """A process of the host ends with the test that made it, so that not all of them end theirs."""
    _made.clear()
    yield
    assert _made, "this test makes no sandbox"
    for id in _made:
        with suppress(NotFound):
            skerry.Sandbox.open(id).destroy()


for module in (sandboxes, unix_local):
    module.UnixLocalSandboxClient = Client
    module.UnixLocalSandboxClientOptions = SkerrySandboxClientOptions
