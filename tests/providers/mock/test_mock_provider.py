"""The mock's provider verbs, and its faults."""

from __future__ import annotations

import asyncio

import pytest

from skerry import providers
from skerry.agent.client import AgentClient
from skerry.errors import (
    AgentProtocolError,
    AgentUnreachable,
    CallInterrupted,
    CallTimeout,
    Conflict,
    CreateFailed,
    DiskFull,
    LimitReached,
    NotFound,
    ProviderUnavailable,
    SandboxGone,
    SkerryError,
    Unsupported,
    WrongState,
)
from skerry.manager.create import create_or_nothing
from skerry.manager.providers import admit
from skerry.model.spec import Mount, Spec, new_id
from skerry.providers.base import BoxState
from skerry.providers.mock import Clock, Host, Mock
from skerry.sandbox.sandbox import AsyncSandbox

SPEC = Spec(provider="mock")


class TestVerbs:
    def test_it_is_found_by_its_name(self) -> None:
        assert isinstance(providers.load("mock"), Mock)

    async def test_by_name_a_sandbox_is_found_again_in_the_same_program(self) -> None:
        async with AsyncSandbox(provider="mock") as sandbox:
            await sandbox.files.write("note", "here")
            again = await AsyncSandbox.open(sandbox.id, "mock")
            assert await again.files.read_text("note") == "here"
            await again.close()

    async def test_a_taken_id_is_refused_and_left_alone(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        with pytest.raises(Conflict):
            await mock_provider.create(async_sandbox.id, SPEC)
        await async_sandbox.ping()

    async def test_destroy_is_quiet_about_what_is_not_there(self, mock_provider: Mock) -> None:
        id = new_id()
        await mock_provider.destroy(id)
        await mock_provider.create(id, SPEC)
        await mock_provider.destroy(id)
        await mock_provider.destroy(id)
        assert await mock_provider.discover() == {}
        with pytest.raises(NotFound):
            await mock_provider.dial(id)

    async def test_a_fresh_provider_finds_what_another_made(self) -> None:
        host = Host()
        id = new_id()
        await Mock(host=host).create(id, SPEC.but(labels={"team": "a"}))
        again = Mock(host=host)
        status = (await again.discover())[id]
        assert (status.state, status.labels) == (BoxState.RUNNING, {"team": "a"})
        sandbox = await AsyncSandbox.open(id, again)
        assert (await sandbox.exec("echo back")).text == "back\n"
        await sandbox.destroy()
        assert host.boxes == {}

    @pytest.mark.parametrize(
        "spec",
        [
            SPEC.but(root="/srv"),
            SPEC.but(network="bridge"),
            SPEC.but(network="rules"),
            SPEC.but(mounts=[Mount(source="/srv", target="/mnt")]),
        ],
    )
    async def test_what_it_cannot_honour_is_refused_before_anything_exists(
        self, mock_provider: Mock, spec: Spec
    ) -> None:
        with pytest.raises(Unsupported):
            await admit(mock_provider, spec)
        assert await mock_provider.discover() == {}

    async def test_pause_freezes_processes_agent_and_time(self) -> None:
        mock = Mock(clock=Clock(autojump=False))
        async with AsyncSandbox(provider="mock", provider_object=mock, lifetime=100) as sandbox:
            process = await sandbox.start("sleep 10; echo done", background=True)
            await mock.clock.advance(4)
            await mock.pause(sandbox.id)
            assert (await mock.discover())[sandbox.id].state is BoxState.PAUSED
            answer = asyncio.ensure_future(sandbox.ping())
            await mock.clock.advance(1000)
            assert not answer.done()
            await mock.resume(sandbox.id)
            await answer
            waiting = asyncio.ensure_future(process.wait())
            await mock.clock.advance(5.5)
            assert not waiting.done()
            await mock.clock.advance(0.5)
            assert (await waiting).ok

    async def test_stop_keeps_the_files_and_ends_the_processes(
        self, mock_provider: Mock, async_sandbox: AsyncSandbox
    ) -> None:
        await async_sandbox.files.write("kept", "x")
        await async_sandbox.start(["sleep", "1000"], background=True)
        await mock_provider.stop(async_sandbox.id)
        assert (await mock_provider.discover())[async_sandbox.id].state is BoxState.STOPPED
        with pytest.raises(WrongState, match="start it"):
            await async_sandbox.ping()
        await mock_provider.start(async_sandbox.id)
        assert await async_sandbox.files.read("kept") == b"x"
        assert await async_sandbox.processes.list() == []

    async def test_a_box_is_outdated_when_the_name_of_its_image_means_another(self, mock_provider: Mock) -> None:
        async with AsyncSandbox(provider="mock", provider_object=mock_provider, image="app") as sandbox:
            status = (await mock_provider.discover())[sandbox.id]
            assert not status.outdated
            mock_provider.host.images["app"] = "another id"
            now = (await mock_provider.discover())[sandbox.id]
            assert (now.outdated, now.image) == (True, status.image)
            async with AsyncSandbox(provider="mock", provider_object=mock_provider, image="app") as newer:
                assert (await mock_provider.discover())[newer.id].image == "another id"

    async def test_a_watch_that_is_ended_says_that_the_provider_is_away(self, mock_provider: Mock) -> None:
        watch = mock_provider.watch()
        id = new_id()
        await mock_provider.create(id, SPEC)
        seen = asyncio.ensure_future(anext(watch))
        assert (await seen).id == id
        mock_provider.faults.end_watch()

        async def watch_on() -> None:
            async for _ in watch:
                pass

        with pytest.raises(ProviderUnavailable):
            await watch_on()
        assert mock_provider.host.watchers == set()

    async def test_shutdown_ends_the_box(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        await async_sandbox.call("shutdown")
        await mock_provider.clock.settle()
        assert (await mock_provider.discover())[async_sandbox.id].state is BoxState.DEAD

    async def test_a_hundred_boxes_do_not_see_each_other(self, mock_provider: Mock) -> None:
        async def use(number: int) -> str:
            async with AsyncSandbox(provider="mock", provider_object=mock_provider) as sandbox:
                await sandbox.files.write("mine", str(number))
                await sandbox.exec(["sleep", "1"])
                return (await sandbox.exec("cat mine")).text

        assert await asyncio.gather(*map(use, range(100))) == [str(number) for number in range(100)]
        assert await mock_provider.discover() == {}


class TestFaults:
    async def test_a_failed_create_leaves_half_a_box_to_be_undone(self, mock_provider: Mock) -> None:
        mock_provider.faults.fail_create(LimitReached("no room"))
        id = new_id()
        with pytest.raises(LimitReached, match="no room"):
            await mock_provider.create(id, SPEC)
        assert (await mock_provider.discover())[id].state is BoxState.DEAD
        mock_provider.faults.fail_create()
        with pytest.raises(CreateFailed):
            await create_or_nothing(mock_provider, new_id(), SPEC)
        assert set(await mock_provider.discover()) == {id}
        await mock_provider.create(new_id(), SPEC)

    async def test_a_slow_boot_takes_virtual_time_and_too_slow_a_one_fails(self, mock_provider: Mock) -> None:
        begin = mock_provider.clock.now
        mock_provider.faults.slow_boot(20)
        await mock_provider.create(new_id(), SPEC)
        assert mock_provider.clock.now - begin == 20
        mock_provider.faults.slow_boot(90)
        with pytest.raises(CreateFailed, match="within 30 s"):
            await mock_provider.create(new_id(), SPEC)

    async def test_a_create_that_is_cancelled_while_it_boots_leaves_nothing(self) -> None:
        mock = Mock(clock=Clock(autojump=False))
        mock.faults.slow_boot(5)
        creating = asyncio.ensure_future(create_or_nothing(mock, new_id(), SPEC))
        await mock.clock.advance(1)
        creating.cancel()
        await mock.clock.advance(5)
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert await mock.discover() == {}

    async def test_a_dead_agent_cannot_be_dialled(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        await async_sandbox.ping()
        mock_provider.faults.dead_agent(async_sandbox.id)
        with pytest.raises(AgentUnreachable):
            await async_sandbox.ping()
        assert (await mock_provider.discover())[async_sandbox.id].state is BoxState.RUNNING
        mock_provider.faults.dead_agent()
        with pytest.raises(CreateFailed):
            await mock_provider.create(new_id(), SPEC)

    async def test_a_hanging_agent_answers_nothing(self, mock_provider: Mock) -> None:
        mock_provider.faults.hang()
        id = new_id()
        await mock_provider.create(id, SPEC)
        with pytest.raises(AgentUnreachable):
            await AgentClient.greet(await mock_provider.dial(id), timeout_s=0.05)

    async def test_a_living_agent_can_begin_to_hang(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        client = await AgentClient.greet(await mock_provider.dial(async_sandbox.id))
        mock_provider.faults.hang(async_sandbox.id)
        with pytest.raises(CallTimeout):
            await client.call("ping", type=dict, timeout_s=0.05)
        client.close()

    async def test_garbage_is_a_broken_protocol(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        mock_provider.faults.garbage_frames(async_sandbox.id)
        with pytest.raises(AgentProtocolError):
            await async_sandbox.exec(["true"])

    async def test_a_lost_box_is_gone(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        running = await async_sandbox.start(["cat"], stdin=True)
        mock_provider.faults.lost_box(async_sandbox.id)
        with pytest.raises(SandboxGone):
            await running.wait()
        assert await mock_provider.discover() == {}
        with pytest.raises(SandboxGone):
            await async_sandbox.ping()

    async def test_a_dropped_stream_fails_its_calls_and_is_dialled_again(
        self, mock_provider: Mock, async_sandbox: AsyncSandbox
    ) -> None:
        process = await async_sandbox.start("sleep 1; cat", stdin=True)
        await async_sandbox.ping()
        mock_provider.faults.drop_stream(async_sandbox.id)
        with pytest.raises(CallInterrupted):
            await process.wait()
        assert await async_sandbox.processes.list() == []

    async def test_a_full_disk_takes_no_more(self, mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
        mock_provider.faults.full_disk(async_sandbox.id)
        with pytest.raises(DiskFull):
            await async_sandbox.files.write("f", "x")
        assert (await async_sandbox.exec("echo still running")).ok

    async def test_faults_wait_for_the_creates_to_come_in_order(self, mock_provider: Mock) -> None:
        mock_provider.faults.fail_create(times=2)
        outcomes = []
        for _ in range(3):
            try:
                await mock_provider.create(new_id(), SPEC)
                outcomes.append("ready")
            except SkerryError as error:
                outcomes.append(error.code)
        assert outcomes == ["create_failed", "create_failed", "ready"]
