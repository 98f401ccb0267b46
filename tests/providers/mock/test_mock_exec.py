"""Commands on the mock: their ends, streams, limits and terminals, over the real client."""

from __future__ import annotations

import asyncio
import signal

import pytest

from skerry.errors import BoxFull, PathNotFound, SkerryError
from skerry.providers.mock import Mock
from skerry.sandbox.sandbox import AsyncSandbox


async def test_a_missing_program_is_127_and_a_text_file_is_126(async_sandbox: AsyncSandbox) -> None:
    missing = await async_sandbox.exec(["nosuch"])
    assert (missing.exit_code, missing.error_text) == (127, "skerry: nosuch: not found\n")
    await async_sandbox.files.write("data", "text")
    assert (await async_sandbox.exec(["./data"])).exit_code == 126


async def test_a_timeout_gives_the_partial_output_and_kills_the_whole_tree(async_sandbox: AsyncSandbox) -> None:
    result = await async_sandbox.exec("echo before; sleep 60 & sleep 60; echo after", timeout_s=1)
    assert (result.timed_out, result.exit_code, result.text, result.duration_s) == (True, 124, "before\n", 1)
    assert (await async_sandbox.metrics()).processes == 1


@pytest.mark.parametrize("command", ["yes", "yes > /dev/null"])
async def test_a_command_that_never_waits_meets_its_timeout(async_sandbox: AsyncSandbox, command: str) -> None:
    result = await async_sandbox.exec(command, timeout_s=2, limit=1000)
    assert result.timed_out
    assert result.duration_s == 2


async def test_output_beyond_the_limit_is_counted_and_dropped(async_sandbox: AsyncSandbox) -> None:
    result = await async_sandbox.exec("seq 100000; echo end >&2", limit=10)
    assert result.stdout == b"1\n2\n3\n[... 588885 bytes left out ...]\n0000\n"
    assert (result.stderr, result.truncated, result.exit_code) == (b"end\n", True, 0)


async def test_more_output_than_the_window_arrives_whole(async_sandbox: AsyncSandbox) -> None:
    result = await async_sandbox.exec(["head", "-c", str(5 << 20), "/dev/zero"])
    assert len(result.stdout) == 5 << 20


async def test_death_by_signal_is_told_apart_from_an_exit_code(async_sandbox: AsyncSandbox) -> None:
    result = await async_sandbox.exec("kill -11 $$")
    assert (result.signal, result.exit_code) == (signal.SIGSEGV, 128 + signal.SIGSEGV)


async def test_stdin_is_binary_and_ends(async_sandbox: AsyncSandbox) -> None:
    data = bytes(range(256)) * 8192
    assert (await async_sandbox.exec(["cat"], stdin=data)).stdout == data
    assert (await async_sandbox.exec(["cat"])).stdout == b""


async def test_cwd_and_user_are_what_was_asked(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    assert (await async_sandbox.exec(["pwd"], cwd="/tmp")).text == "/tmp\n"
    with pytest.raises(PathNotFound, match="/nope"):
        await async_sandbox.exec(["pwd"], cwd="/nope")
    with pytest.raises(SkerryError, match="cannot become"):
        await async_sandbox.exec(["id"], user="root")
    async with AsyncSandbox(provider="mock", provider_object=mock_provider, user="root") as rooted:
        assert (await rooted.exec(["id", "-u"])).text == "0\n"
        assert (await rooted.exec(["id", "-u"], user="1000")).text == "1000\n"


async def test_a_conversation_with_a_process(async_sandbox: AsyncSandbox) -> None:
    async with await async_sandbox.start(
        "read line; echo got $line; read line; echo got $line; read line; echo bye", stdin=True
    ) as process:
        chunks = aiter(process)
        await process.write("one\n")
        assert await anext(chunks) == (1, b"got one\n")
        await process.write("two\n")
        assert await anext(chunks) == (1, b"got two\n")
        await process.close_stdin()
        assert await anext(chunks) == (1, b"bye\n")
        assert (await process.wait()).exit_code == 0


async def test_a_signal_reaches_a_foreground_process(async_sandbox: AsyncSandbox) -> None:
    process = await async_sandbox.start(["sleep", "1000"])
    await process.signal(signal.SIGTERM)
    assert (await process.wait()).signal == signal.SIGTERM


async def test_a_foreground_process_dies_with_its_stream_and_a_background_one_does_not(
    async_sandbox: AsyncSandbox,
) -> None:
    await async_sandbox.start(["cat"], stdin=True)
    kept = await async_sandbox.start("echo here; sleep 100; echo there", background=True, tag="kept")
    await async_sandbox.close()
    assert [(info.tag, info.running) for info in await async_sandbox.processes.list()] == [("kept", True)]
    assert kept.number is not None

    first, second = [await async_sandbox.processes.attach(kept.number) for _ in range(2)]
    assert [data async for _, data in first] == [b"here\n", b"there\n"]
    assert b"".join([data async for _, data in second]) == b"here\nthere\n"
    assert (await first.wait()).duration_s == 100
    (info,) = await async_sandbox.processes.list()
    assert (info.running, info.exit_code) == (False, 0)


async def test_a_cancelled_exec_leaves_no_process(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    mock_provider.program("hang")(lambda ctx: asyncio.Event().wait())
    waiting = asyncio.ensure_future(async_sandbox.exec("sleep 100 & hang"))
    while (await async_sandbox.metrics()).processes == 1:
        pass
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    while (await async_sandbox.metrics()).processes > 1:
        pass


async def test_ping_is_answered_while_work_runs(async_sandbox: AsyncSandbox) -> None:
    process = await async_sandbox.start(["cat"], stdin=True)
    await async_sandbox.ping()
    await process.close_stdin()
    assert (await process.wait()).ok


async def test_the_pids_limit_is_held(mock_provider: Mock) -> None:
    async with AsyncSandbox(provider="mock", provider_object=mock_provider, pids=4) as sandbox:
        refused = await sandbox.exec("cat | cat | cat | cat")
        assert refused.exit_code == 2
        assert "Resource temporarily unavailable" in refused.error_text
        for _ in range(3):
            await sandbox.start(["sleep", "100"], background=True)
        with pytest.raises(BoxFull, match="cannot start a process"):
            await sandbox.exec(["true"])


async def test_there_are_no_terminals(async_sandbox: AsyncSandbox) -> None:
    terminal = await async_sandbox.pty(["sh"])
    with pytest.raises(SkerryError, match="no terminals"):
        await terminal.wait()
