"""Boxes come and go whole, whoever made them and whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from skerry.errors import AgentError, Conflict, CreateFailed, NotFound, SandboxGone, SkerryError
from skerry.manager.create import create_or_nothing
from skerry.model.spec import new_id
from skerry.providers.base import BoxState, Provider
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite


class LifecycleTests(Suite):
    async def test_a_created_box_runs_and_is_discovered(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        await sandbox.ping()
        assert (await provider.discover())[sandbox.id].state is BoxState.RUNNING

    async def test_the_witness_sees_a_live_box(self, sandbox: AsyncSandbox) -> None:
        assert await self.on_host()

    async def test_destroy_leaves_nothing_on_the_host(self, provider: Provider) -> None:
        before = await self.on_host()
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        await sandbox.start(["sleep", "1000"], background=True)
        await sandbox.destroy()
        assert await self.on_host() == before
        assert sandbox.id not in await provider.discover()

    async def test_destroy_twice_is_quiet(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        await provider.destroy(sandbox.id)
        await provider.destroy(sandbox.id)

    async def test_destroy_of_what_never_was_is_quiet(self, provider: Provider) -> None:
        await provider.destroy(new_id())

    async def test_dial_of_what_never_was_is_not_found(self, provider: Provider) -> None:
        with pytest.raises(NotFound):
            await provider.dial(new_id())

    async def test_a_taken_id_is_refused_and_its_box_left_alone(
        self, provider: Provider, sandbox: AsyncSandbox
    ) -> None:
        with pytest.raises(Conflict):
            await create_or_nothing(provider, sandbox.id, sandbox.spec)
        await sandbox.ping()

    async def test_a_destroyed_sandbox_says_so(self, provider: Provider) -> None:
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        await sandbox.destroy()
        with pytest.raises(SandboxGone, match="destroyed"):
            await sandbox.exec(["true"])

    async def test_a_box_that_others_removed_is_gone_for_every_call(self, provider: Provider) -> None:
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        process = await sandbox.start("echo up; sleep 1000")
        async for _ in process:
            break
        await provider.destroy(sandbox.id)
        for attempt in (process.wait(), sandbox.exec(["true"]), sandbox.files.read("x"), sandbox.ping()):
            with pytest.raises(SandboxGone) as raised:
                await attempt
            assert not raised.value.retryable
        await sandbox.destroy()

    async def test_ten_at_once_do_not_see_each_other(self, provider: Provider) -> None:
        sandboxes = await asyncio.gather(*(AsyncSandbox.create(self.spec(provider), provider) for _ in range(10)))
        try:
            await asyncio.gather(*(each.files.write("mine", each.id) for each in sandboxes))
            for each in sandboxes:
                assert await each.files.read_text("mine") == each.id
        finally:
            await asyncio.gather(*(each.destroy() for each in sandboxes))

    async def test_creates_cancelled_at_any_moment_leave_nothing(self, provider: Provider) -> None:
        before = await self.on_host()
        known = set(await provider.discover())
        for delay_ms in (0, 0, 1, 2, 3, 5, 8, 12, 20, 40):
            creating = asyncio.create_task(AsyncSandbox.create(self.spec(provider), provider))
            await asyncio.sleep(delay_ms / 1000)
            creating.cancel()
            with suppress(asyncio.CancelledError):
                await (await creating).destroy()  # it was quicker
        assert await self.on_host() == before
        assert set(await provider.discover()) <= known

    async def test_a_failing_create_leaves_nothing(self, provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
        before = await self.on_host()

        class Broken(Exception):
            pass

        create = provider.create

        async def create_then_break(id: object, spec: object) -> None:
            await create(id, spec)  # type: ignore[arg-type]
            raise Broken

        monkeypatch.setattr(provider, "create", create_then_break)
        with pytest.raises(Broken):
            await create_or_nothing(provider, new_id(), self.spec(provider))
        assert await self.on_host() == before

    async def test_another_process_reaches_the_box_again(
        self, make_provider: Callable[[], Provider], sandbox: AsyncSandbox
    ) -> None:
        await sandbox.files.write("note", "still here")
        process = await sandbox.start(["sleep", "1000"], background=True)
        await sandbox.close()
        again = await AsyncSandbox.open(sandbox.id, make_provider())
        assert await again.files.read_text("note") == "still here"
        assert [each.process for each in await again.processes.list() if each.running] == [process.number]
        await again.close()

    async def test_a_fresh_provider_destroys_what_another_made(
        self, provider: Provider, make_provider: Callable[[], Provider]
    ) -> None:
        before = await self.on_host()
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        await sandbox.close()
        other = make_provider()
        assert sandbox.id in await other.discover()
        await other.destroy(sandbox.id)
        assert await self.on_host() == before
        assert sandbox.id not in await provider.discover()

    async def test_a_box_ends_by_itself_when_its_lifetime_is_over(self, provider: Provider) -> None:
        await self._expect_end_and_destroy(provider, await self._short_lived(provider, "lifetime_s", 0.5))

    async def test_a_box_ends_by_itself_when_it_is_idle(self, provider: Provider) -> None:
        await self._expect_end_and_destroy(provider, await self._short_lived(provider, "idle_s", 0.3))

    async def _short_lived(self, provider: Provider, field: str, seconds: float) -> AsyncSandbox:
        """A box that ends soon; a host that has much to do may need longer than that to bring it up."""
        try:
            return await AsyncSandbox.create(self.spec(provider, **{field: seconds}), provider)
        except CreateFailed:
            return await AsyncSandbox.create(self.spec(provider, **{field: 20 * seconds}), provider)

    async def test_a_running_process_keeps_a_box_from_being_idle(self, provider: Provider) -> None:
        async with self.box(provider) as sandbox:
            process = await sandbox.start(["sleep", "1"])
            await sandbox.set_lifetime(idle=0.3)
            assert (await process.wait()).ok

    async def test_the_lifetime_can_be_changed(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        await sandbox.set_lifetime(lifetime=0.2)
        await self._expect_end_and_destroy(provider, sandbox)

    async def _expect_end_and_destroy(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        await self.expect_end(provider, sandbox)
        with pytest.raises(SandboxGone):
            await sandbox.ping()
        await sandbox.destroy()

    async def test_a_box_whose_agent_ended_is_an_error_not_a_result(
        self, provider: Provider, sandbox: AsyncSandbox
    ) -> None:
        async def end_it_and_use_it() -> None:
            await sandbox.call("shutdown")  # whose own answer may die with the box on its way
            for _ in range(1000):
                await sandbox.exec(["true"])

        with pytest.raises(SkerryError) as caught:
            await end_it_and_use_it()
        assert caught.value.code == "sandbox_gone"


class BoxTests(Suite):
    """The box itself: what it uses, its ports, and the agent's other calls."""

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
        with pytest.raises(AgentError, match="no_such_call") as raised:
            await sandbox.call("no_such_call")
        assert raised.value.rpc_code == -32601

    async def test_a_port_where_nothing_listens_is_not_found(self, sandbox: AsyncSandbox) -> None:
        async with await sandbox.connect(9) as tunnel:
            with pytest.raises(NotFound):
                await tunnel.read()
