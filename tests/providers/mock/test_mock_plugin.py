"""The fixtures that ship: what a user's test of their own agent looks like."""

from __future__ import annotations

import pytest

from skerry.errors import CallInterrupted, NotFound
from skerry.providers.mock import Context, Mock
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.sync.api import Sandbox


def fix_the_build(sandbox: Sandbox) -> bool:
    """A tiny coding agent, as a user might write one."""
    for attempt in range(3):
        if sandbox.exec(["make", "test"], timeout_s=600).ok:
            return True
        sandbox.files.write("fix.txt", str(attempt))
    return False


def test_an_agent_that_tries_until_the_build_is_green(mock_provider: Mock, sandbox: Sandbox) -> None:
    @mock_provider.program("make")
    async def make(ctx: Context) -> int:
        await ctx.sleep(300)
        return int(ctx.read_file("fix.txt") != b"1")

    begin = mock_provider.clock.now
    assert fix_the_build(sandbox)
    assert mock_provider.clock.now - begin == 900


def test_the_sync_sandbox_has_files_code_and_processes(mock_provider: Mock, sandbox: Sandbox) -> None:
    mock_provider.reply("python", "print(1)", stdout="1\n")
    sandbox.files.write("a", "x")
    assert sandbox.exec("cat a").text == "x"
    assert sandbox.run_code("python", "print(1)").text == "1\n"
    process = sandbox.start("echo one; read x; echo two $x", stdin=True)
    process.write("hi\n")
    assert b"".join(data for _, data in process) == b"one\ntwo hi\n"
    assert process.wait().ok


def test_a_fault_strikes_from_a_sync_test_too(mock_provider: Mock, sandbox: Sandbox) -> None:
    process = sandbox.start(["cat"], stdin=True)
    mock_provider.faults.drop_stream(sandbox.id)
    with pytest.raises(CallInterrupted):
        process.wait()
    sandbox.ping()
    mock_provider.faults.lost_box(sandbox.id)
    with pytest.raises(NotFound):
        sandbox.ping()


async def test_the_async_sandbox_is_ready(async_sandbox: AsyncSandbox) -> None:
    assert (await async_sandbox.exec("echo hello")).text == "hello\n"


def test_each_test_has_a_host_of_its_own(mock_provider: Mock) -> None:
    assert mock_provider.host.boxes == {}
