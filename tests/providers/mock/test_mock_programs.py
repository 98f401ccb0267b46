"""How to test your own agent on the mock: programs, replies, servers."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import InterpreterNotFound, InvalidSpec
from skerry.providers.mock import Context, Mock
from skerry.sandbox.sandbox import AsyncSandbox


async def test_a_program_is_a_function_of_its_context(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    @mock_provider.program("pytest")
    async def run_tests(ctx: Context) -> int:
        source = ctx.read_file("app.py").decode()
        await ctx.sleep(30)
        await ctx.print("1 failed" if "bug" in source else "1 passed")
        return int("bug" in source)

    await async_sandbox.files.write("app.py", "bug = 1")
    failed = await async_sandbox.exec(["pytest", "-q"])
    assert (failed.exit_code, failed.text, failed.duration_s) == (1, "1 failed\n", 30)

    await async_sandbox.exec("echo fixed > app.py")
    assert (await async_sandbox.exec("pytest && echo done")).text == "1 passed\ndone\n"


async def test_a_program_sees_its_arguments_environment_and_input(
    mock_provider: Mock, async_sandbox: AsyncSandbox
) -> None:
    @mock_provider.program("greet")
    async def greet(ctx: Context) -> None:
        name = (await ctx.stdin.read_all()).decode()
        await ctx.print(*ctx.argv, ctx.env["GREETING"], name, ctx.cwd)

    result = await async_sandbox.exec(["greet", "-v"], env={"GREETING": "hello"}, stdin="Ada", cwd="/tmp")
    assert result.text == "greet -v hello Ada /tmp\n"


async def test_a_plain_function_is_a_program_too(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    mock_provider.program("fails")(lambda ctx: 3)
    assert (await async_sandbox.exec(["fails"])).exit_code == 3


async def test_a_program_writes_files_and_runs_others(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    @mock_provider.program("build")
    async def build(ctx: Context) -> int:
        ctx.write_file("out.txt", "built")
        return await ctx.run(["cat", "out.txt"])

    assert (await async_sandbox.exec(["build"])).text == "built"


async def test_a_program_that_raises_fails_and_shows_why(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    @mock_provider.program("broken")
    def broken(ctx: Context) -> int:
        raise ValueError("a bug in the test")

    result = await async_sandbox.exec(["broken"])
    assert result.exit_code == 1
    assert "ValueError: a bug in the test" in result.error_text


async def test_a_program_may_wait_for_the_test_itself(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    allowed = asyncio.Event()

    @mock_provider.program("gate")
    async def gate(ctx: Context) -> None:
        await ctx.print("waiting")
        await allowed.wait()
        await ctx.print("through")

    process = await async_sandbox.start(["gate"])
    said = []
    async for _, data in process:
        said.append(data)
        allowed.set()
    assert said == [b"waiting\n", b"through\n"]


async def test_a_program_that_uses_too_much_memory_is_killed(mock_provider: Mock) -> None:
    @mock_provider.program("hungry")
    async def hungry(ctx: Context) -> None:
        ctx.use_memory(64 << 20)
        await ctx.sleep(1)

    async with AsyncSandbox(provider="mock", provider_object=mock_provider, memory="32M") as sandbox:
        assert (await sandbox.exec(["hungry"])).signal == 9
        assert (await sandbox.exec("head -c 50000000 /dev/zero | sort | wc -c")).text == "0\n"
    async with AsyncSandbox(provider="mock", provider_object=mock_provider, memory="128M") as sandbox:
        assert (await sandbox.exec(["hungry"])).ok


async def test_code_is_answered_by_the_reply_that_fits(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    mock_provider.reply("python", "print(6 * 7)", stdout="42\n")
    mock_provider.reply("python", lambda code: "import numpy" in code, stderr="no numpy\n", exit_code=1)

    assert (await async_sandbox.run_code("python", "print(6 * 7)")).text == "42\n"
    assert (await async_sandbox.run_code("python", "import numpy")).exit_code == 1
    assert (await async_sandbox.exec(["python3", "-c", "print(6 * 7)"])).text == "42\n"
    assert (await async_sandbox.exec("echo 'print(6 * 7)' > x.py; python3 x.py")).text == "42\n"

    unknown = await async_sandbox.run_code("python", "print(1)")
    assert unknown.exit_code == 1
    assert "no reply is registered" in unknown.error_text


async def test_a_reply_may_take_time_and_answer_everything(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    mock_provider.reply("node", stdout="ok", takes_s=90)
    assert (await async_sandbox.run_code("javascript", "whatever()")).duration_s == 90
    assert (await async_sandbox.run_code("node", "whatever()", timeout_s=5)).timed_out


async def test_a_language_without_replies_has_no_interpreter(async_sandbox: AsyncSandbox) -> None:
    with pytest.raises(InterpreterNotFound, match="python"):
        await async_sandbox.run_code("python", "print(1)")
    assert (await async_sandbox.exec(["python3", "-c", "1"])).exit_code == 127
    assert (await async_sandbox.run_code("bash", "echo 42")).text == "42\n"


def test_a_reply_for_no_known_language_is_refused(mock_provider: Mock) -> None:
    with pytest.raises(InvalidSpec, match="klingon"):
        mock_provider.reply("klingon", "x")


async def test_the_host_reaches_a_server_in_the_box(mock_provider: Mock, async_sandbox: AsyncSandbox) -> None:
    @mock_provider.program("echod")
    async def echod(ctx: Context) -> None:
        listener = ctx.listen(8080)
        while True:
            peer = await listener.accept()
            await peer.writer.write((await peer.reader.read_all()).upper())
            peer.close()

    server = await async_sandbox.start(["echod"], background=True)
    async with await async_sandbox.connect(8080) as tunnel:
        await tunnel.write(b"hello")
        await tunnel.close_write()
        assert await tunnel.read() == b"HELLO"
        assert await tunnel.read() == b""
    await server.kill()
