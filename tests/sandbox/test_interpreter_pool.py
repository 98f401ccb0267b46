"""Warm interpreters: a sandbox of a pool has them ready, and they know what it is given at the hand-out."""

from __future__ import annotations

from pathlib import Path

import pytest
from manager.world import config_of

from skerry.manager.manager import AsyncSandboxManager
from skerry.pool.pool import AsyncSandboxPool

pytestmark = pytest.mark.timeout(90)


async def test_a_sandbox_of_a_pool_has_its_interpreters_ready(own_registry: None, folder: Path) -> None:
    async with (
        AsyncSandboxManager(config_of(folder, provider="local")) as manager,
        AsyncSandboxPool(manager, size=1, interpreters=["python", "bash"]) as pool,
    ):
        await pool.wait_for_full(60)
        async with await pool.acquire(env={"GIVEN": "later"}) as sandbox:
            assert {each.name for each in await sandbox.interpreters.list()} == {"python", "bash"}
            python = await sandbox.interpreter()
            done = await python.run("import os; os.environ['GIVEN']")
            assert (done.text, done.execution_count) == ("'later'", 1)
            assert (await (await sandbox.interpreter("bash")).run("echo $GIVEN")).stdout == "later\n"


async def test_a_pool_whose_interpreters_the_boxes_lack_says_so(own_registry: None, folder: Path) -> None:
    async with (
        AsyncSandboxManager(config_of(folder, provider="local")) as manager,
        AsyncSandboxPool(manager, size=1, interpreters=["cobol"]) as pool,
    ):
        with pytest.raises(TimeoutError):
            await pool.wait_for_full(8)
        assert "cobol" in pool.stats().last_error
