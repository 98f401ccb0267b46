"""Virtual time: it jumps when everybody waits, or moves by hand, and nothing else moves it."""

from __future__ import annotations

import asyncio
import time

from skerry.providers.base import BoxState
from skerry.providers.mock import Clock, Context, Mock
from skerry.sandbox.sandbox import AsyncSandbox


async def test_a_long_sleep_takes_its_time_but_not_yours(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    begin, virtual = time.monotonic(), mock_provider.clock.now
    result = await async_sandbox.exec(["sleep", "3600"])
    assert result.duration_s == 3600
    assert mock_provider.clock.now - virtual == 3600
    assert time.monotonic() - begin < 5


async def test_commands_side_by_side_share_the_time(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    begin = mock_provider.clock.now
    results = await asyncio.gather(*(async_sandbox.exec(["sleep", str(seconds)]) for seconds in (10, 30, 20)))
    assert [result.duration_s for result in results] == [10, 30, 20]
    assert mock_provider.clock.now - begin == 30


async def test_a_process_in_the_background_does_not_pull_the_clock(
    mock_provider: Mock, async_sandbox: AsyncSandbox
) -> None:
    begin = mock_provider.clock.now
    sleeper = await async_sandbox.start(["sleep", "1000"], background=True)
    for _ in range(3):
        await async_sandbox.ping()
    assert mock_provider.clock.now == begin
    await async_sandbox.exec(["sleep", "10"])
    (info,) = await async_sandbox.processes.list()
    assert info.running
    assert (await sleeper.wait()).duration_s == 1000


async def test_time_waits_for_a_host_that_answers(async_sandbox: AsyncSandbox) -> None:
    process = await async_sandbox.start("echo ready; sleep 1000")
    async for _, data in process:
        if data == b"ready\n":
            await process.kill()
    assert (await process.wait()).signal == 9


async def test_input_that_never_comes_meets_the_timeout(async_sandbox: AsyncSandbox) -> None:
    process = await async_sandbox.start(["cat"], stdin=True, timeout_s=5)
    result = await process.wait()
    assert (result.timed_out, result.duration_s) == (True, 5)


async def test_a_clock_without_autojump_moves_by_hand() -> None:
    mock = Mock(clock=Clock(autojump=False))
    ticks = []

    @mock.program("ticker")
    async def ticker(ctx: Context) -> None:
        while True:
            ticks.append(mock.clock.now)
            await ctx.sleep(2)

    async with AsyncSandbox(provider="mock", provider_object=mock) as sandbox:
        begin = mock.clock.now
        await sandbox.start(["ticker"], background=True)
        waiting = asyncio.ensure_future(sandbox.exec(["sleep", "60"], timeout_s=5))
        await mock.clock.advance(4.5)
        assert not waiting.done()
        await mock.clock.advance(0.5)
        result = await waiting
    assert (result.timed_out, result.duration_s) == (True, 5)
    assert [tick - begin for tick in ticks] == [0, 2, 4]


async def test_a_lifetime_ends_the_box_and_can_be_renewed() -> None:
    mock = Mock(clock=Clock(autojump=False))
    async with AsyncSandbox(provider="mock", provider_object=mock, lifetime=60) as sandbox:
        await mock.clock.advance(50)
        await sandbox.set_lifetime(lifetime=60)
        await mock.clock.advance(50)
        await sandbox.ping()
        await mock.clock.advance(10)
        assert (await mock.discover())[sandbox.id].state is BoxState.DEAD


async def test_an_idle_box_ends_and_a_busy_one_does_not() -> None:
    mock = Mock(clock=Clock(autojump=False))
    async with AsyncSandbox(provider="mock", provider_object=mock, idle=10) as sandbox:
        busy = await sandbox.start(["sleep", "25"], background=True)
        await mock.clock.advance(24)
        await sandbox.ping()
        assert busy.number is not None
        await mock.clock.advance(9)
        assert (await sandbox.exec("true")).ok
        await mock.clock.advance(9)
        await sandbox.ping()  # only looks
        assert (await mock.discover())[sandbox.id].state is BoxState.RUNNING
        await mock.clock.advance(2)
        assert (await mock.discover())[sandbox.id].state is BoxState.DEAD
