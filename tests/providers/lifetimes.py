"""A lifetime holds on every provider, whatever the agent in the box does and whoever sets the host's clock."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from manager.world import HostClock, config_of, opened_manager, set_wall_clock

from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause, Record
from skerry.model.states import State
from skerry.providers.base import Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite

HOUR_S = 3600.0
JUMPS_S = [sign * jump for jump in (HOUR_S, 30 * 8766 * HOUR_S) for sign in (1, -1)]
_PATIENCE_S = 50.0


class LifetimeTests(Suite):
    def _opened(
        self, provider: Provider, folder: Path, host_clock: HostClock
    ) -> AbstractAsyncContextManager[AsyncSandboxManager]:
        return opened_manager(config_of(folder, provider=provider.name), provider, host_clock)

    async def _taken_over(self, manager: AsyncSandboxManager, provider: Provider, lifetime_s: float) -> AsyncSandbox:
        """A box whose agent was talked out of its end, as whoever took it over may do."""
        sandbox = await manager.create(self.spec(provider, lifetime_s=lifetime_s))
        await sandbox.call("set_lifetime", {"lifetime_s": None, "idle_s": None})
        return sandbox

    async def test_an_open_manager_ends_what_its_agent_does_not(self, provider: Provider, tmp_path: Path) -> None:
        async with self._opened(provider, tmp_path, HostClock()) as manager:
            sandbox = await self._taken_over(manager, provider, 5.0)
            end = time.monotonic() + _PATIENCE_S
            while (record := await manager.record(sandbox.id)).is_live:
                assert time.monotonic() < end, record
                await asyncio.sleep(0.05)
            assert record.cause is Cause.LIFETIME
            assert sandbox.id not in await provider.discover()

    async def test_a_wall_clock_that_jumps_ends_nothing_and_the_next_to_open_the_registry_ends_what_is_overdue(
        self, provider: Provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        host_clock = HostClock()
        async with self._opened(provider, tmp_path, host_clock) as manager:
            sandbox = await self._taken_over(manager, provider, HOUR_S)
        for jump_s in JUMPS_S:
            with monkeypatch.context() as patch:
                set_wall_clock(patch, jump_s)
                record = await self._seen_next(provider, tmp_path, sandbox, host_clock)
            assert (record.state, record.cause) == (State.READY, None), jump_s
        host_clock.pass_time(HOUR_S + 6)
        record = await self._seen_next(provider, tmp_path, sandbox, host_clock, reconcile=False)
        assert (record.state, record.cause) == (State.DESTROYED, Cause.LIFETIME)
        assert sandbox.id not in await provider.discover()

    async def _seen_next(
        self,
        provider: Provider,
        folder: Path,
        sandbox: AsyncSandbox,
        host_clock: HostClock,
        *,
        reconcile: bool = True,
    ) -> Record:
        """What the next program makes of it."""
        async with self._opened(provider, folder, host_clock) as manager:
            if reconcile:
                assert await manager.reconcile() == []
            return await manager.record(sandbox.id)
