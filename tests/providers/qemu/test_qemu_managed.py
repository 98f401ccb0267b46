"""Machines in the registry: warm ones, stopped ones that are started again, and copies of one."""

from __future__ import annotations

import pytest

from skerry.manager.manager import AsyncSandboxManager
from skerry.model.states import State
from skerry.pool.pool import AsyncSandboxPool

pytestmark = pytest.mark.timeout(240)


async def test_a_pool_hands_out_machines_that_are_up(manager: AsyncSandboxManager) -> None:
    async with AsyncSandboxPool(manager, size=1, provider="qemu", data=False) as pool:
        await pool.wait_for_full(120)
        sandbox = await pool.acquire(name="job", env={"TOKEN": "secret"}, lifetime="1h")
        assert pool.stats().hits == 1
        assert (await sandbox.exec('echo "$TOKEN"')).stdout == b"secret\n"
        await manager.destroy(sandbox.id)


async def test_a_sandbox_is_stopped_started_forked_and_restored(manager: AsyncSandboxManager) -> None:
    sandbox = await manager.create(data=False)
    await sandbox.files.write("work", "one")
    await manager.snapshot(sandbox.id, "before")
    await sandbox.files.write("work", "two")
    copy = await manager.fork(sandbox.id)
    assert await copy.files.read_text("work") == "two"
    await manager.destroy(copy.id)
    await manager.stop(sandbox.id)
    assert (await manager.record(sandbox.id)).state is State.STOPPED
    await manager.start(sandbox.id)
    assert await sandbox.files.read_text("work") == "two"
    sandbox = await manager.restore(sandbox.id, "before")
    assert await sandbox.files.read_text("work") == "one"
    await manager.destroy(sandbox.id)
    await manager.remove_snapshot("before")
