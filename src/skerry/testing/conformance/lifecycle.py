"""Boxes come and go whole, whoever made them and whatever happens on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest

from skerry import lifecycle
from skerry.errors import AgentError, Conflict, NotFound, SkerryError, WrongState
from skerry.providers.base import BoxState, Provider
from skerry.sandbox import AsyncSandbox
from skerry.spec import new_id
from skerry.testing.conformance.base import Suite, eventually


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
            await lifecycle.create_or_nothing(provider, sandbox.id, sandbox.spec)
        await sandbox.ping()

    async def test_a_destroyed_sandbox_says_so(self, provider: Provider) -> None:
        sandbox = await AsyncSandbox.create(self.spec(provider), provider)
        await sandbox.destroy()
        with pytest.raises(WrongState, match="destroyed"):
            await sandbox.exec(["true"])

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
            await lifecycle.create_or_nothing(provider, new_id(), self.spec(provider))
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
        sandbox = await AsyncSandbox.create(self.spec(provider, lifetime_s=0.5), provider)
        await self._expect_end(provider, sandbox)

    async def test_a_box_ends_by_itself_when_it_is_idle(self, provider: Provider) -> None:
        sandbox = await AsyncSandbox.create(self.spec(provider, idle_s=0.3), provider)
        await self._expect_end(provider, sandbox)

    async def test_a_running_process_keeps_a_box_from_being_idle(self, provider: Provider) -> None:
        sandbox = await AsyncSandbox.create(self.spec(provider, idle_s=0.3), provider)
        try:
            assert (await sandbox.exec(["sleep", "1"])).ok
        finally:
            await sandbox.destroy()

    async def test_the_lifetime_can_be_changed(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        await sandbox.set_lifetime(lifetime=0.2)
        await self._expect_end(provider, sandbox)

    async def _expect_end(self, provider: Provider, sandbox: AsyncSandbox) -> None:
        async def ended() -> bool:
            status = (await provider.discover()).get(sandbox.id)
            return status is None or status.state is not BoxState.RUNNING

        # a provider with a clock of its own tells how time passes on it
        await eventually(ended, "the box ends by itself", getattr(provider, "pass_time", asyncio.sleep))
        with pytest.raises((AgentError, NotFound)):
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
        assert caught.value.code in ("agent_unreachable", "call_interrupted", "not_found")
