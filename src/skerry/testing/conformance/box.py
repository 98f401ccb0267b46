"""The box itself: what it uses, its ports, and the agent's other calls."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import AgentError, NotFound
from skerry.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite


class BoxTests(Suite):
    async def test_metrics_tell_what_the_box_uses(self, sandbox: AsyncSandbox) -> None:
        await sandbox.exec(["true"])
        metrics = await sandbox.metrics()
        assert metrics.uptime_s >= 0
        assert metrics.processes >= 1
        assert metrics.memory_bytes > 0
        assert metrics.disk.total >= metrics.disk.free > 0

    async def test_a_ping_is_answered_while_work_runs(self, sandbox: AsyncSandbox) -> None:
        working = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
        try:
            await sandbox.ping()
        finally:
            working.cancel()
            with pytest.raises(asyncio.CancelledError):
                await working

    async def test_an_unknown_call_is_an_error(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(AgentError, match="no_such_call"):
            await sandbox.call("no_such_call")

    async def test_a_port_where_nothing_listens_is_not_found(self, sandbox: AsyncSandbox) -> None:
        async with await sandbox.connect(9) as tunnel:
            with pytest.raises(NotFound):
                await tunnel.read()
