"""Exec is exact: codes, outputs, signals, timeouts, trees, terminals."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import (
    ArgumentsTooLong,
    CallInterrupted,
    InterpreterNotFound,
    InvalidSpec,
    NotFound,
    PathNotFound,
    UserNotFound,
)
from skerry.net.stream import Stream
from skerry.providers.base import Provider
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.testing.conformance.base import Suite, eventually


async def output_until(process: AsyncProcess, text: bytes) -> bytes:
    """Read a process's output until it has said something."""
    said = b""
    async with asyncio.timeout(10):
        async for _, data in process:
            said += data
            if text in said:
                return said
    raise AssertionError(f"it ended without saying {text!r}: {said!r}")


class _Lines:
    """Receiver of lines from a stream."""

    def __init__(self, stream: Stream) -> None:
        self._text = b""
        self._lines: asyncio.Queue[bytes] = asyncio.Queue()
        stream.start(self)

    def received(self, data: memoryview) -> None:
        *lines, self._text = (self._text + bytes(data)).split(b"\n")
        for line in lines:
            self._lines.put_nowait(line)

    def closed(self, error: Exception | None) -> None:
        self._lines.put_nowait(b"closed")

    async def next(self) -> bytes:
        return await asyncio.wait_for(self._lines.get(), 10)


class ExecTests(Suite):
    async def test_json_rpc_lines_without_a_greeting_are_answered(
        self, provider: Provider, sandbox: AsyncSandbox
    ) -> None:
        await sandbox.exec("true")  # on the stream that the box was started through
        stream = await provider.dial(sandbox.id)
        try:
            lines = _Lines(stream)
            if stream.token is not None:
                stream.write(
                    b'{"jsonrpc":"2.0","id":0,"method":"auth","params":{"token":"%s"}}\n' % stream.token.encode()
                )
                assert await lines.next() == b'{"jsonrpc":"2.0","id":0,"result":{}}'
            stream.write(b'{"jsonrpc":"2.0","id":1,"method":"exec","params":{"cmd":"echo out; exit 3"}}\n')
            ran = b'{"exit_code":3,"stdout":"out\\n","stderr":""}'
            assert await lines.next() == b'{"jsonrpc":"2.0","id":1,"result":%s}' % ran
        finally:
            stream.close()

    async def test_the_exit_code_is_the_commands_own(self, sandbox: AsyncSandbox) -> None:
        assert (await sandbox.exec(["true"])).exit_code == 0
        assert (await sandbox.exec(["false"])).exit_code == 1
        assert (await sandbox.exec("exit 42")).exit_code == 42

    async def test_stdout_and_stderr_are_kept_apart(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
        assert not result.truncated
        assert not result.timed_out
        assert result.signal is None
        assert result.duration_s >= 0

    async def test_arguments_arrive_as_they_are(self, sandbox: AsyncSandbox) -> None:
        odd = ["", " ", "a b", "*", "$HOME", "'", '"', "\\", "-n", "é\n"]
        result = await sandbox.exec(["printf", "%s|", *odd])
        assert result.stdout == "".join(f"{arg}|" for arg in odd).encode()

    async def test_a_missing_program_is_a_result(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec(["no-such-program"])
        assert (result.exit_code, result.not_started) == (127, "not_found")
        assert b"no-such-program" in result.stderr

    async def test_a_file_that_cannot_be_run_is_126(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("plain", "text", mode=0o644)
        result = await sandbox.exec(["./plain"])
        assert (result.exit_code, result.not_started) == (126, "cannot_run")

    async def test_a_programs_own_126_and_127_are_told_apart(self, sandbox: AsyncSandbox) -> None:
        for code in (126, 127):
            result = await sandbox.exec(f"exit {code}")
            assert (result.exit_code, result.not_started) == (code, None)

    async def test_a_user_that_is_not_there_is_an_error_that_names_it(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(UserNotFound, match="nobody-here") as raised:
            await sandbox.exec(["true"], user="nobody-here")
        assert raised.value.field == "user"
        assert (await sandbox.exec(["true"])).ok

    async def test_a_box_for_a_user_that_is_not_there_is_not_made(self, provider: Provider) -> None:
        with pytest.raises(UserNotFound, match="nobody-here"):
            await AsyncSandbox.create(self.spec(provider, user="nobody-here"), provider)

    async def test_commands_and_code_may_be_long(self, sandbox: AsyncSandbox) -> None:
        words = [str(n % 10) * 100_000 for n in range(13)]
        assert (await sandbox.exec(["printf", "%s", *words])).stdout == "".join(words).encode()
        assert (await sandbox.exec("echo " + "x" * 2_500_000)).stdout == b"x" * 2_500_000 + b"\n"
        assert (await sandbox.run_code("sh", "echo " + "y" * 2_500_000)).stdout == b"y" * 2_500_000 + b"\n"
        given = await sandbox.exec("cat; echo " + "z" * 1_500_000, stdin=b"input ")
        assert given.stdout == b"input " + b"z" * 1_500_000 + b"\n"
        process = await sandbox.start("echo " + "x" * 1_500_000 + "; echo up", background=True)
        assert await output_until(process, b"up") is not None
        assert (await process.wait()).ok
        (listed,) = [each for each in await sandbox.processes.list() if each.process == process.number]
        assert sum(map(len, listed.argv)) < 1 << 20

    @pytest.mark.needs_real_unix
    async def test_arguments_that_no_kernel_takes_are_an_error(self, sandbox: AsyncSandbox) -> None:
        for argv in (["true", "x" * 200_000], ["true", *["x" * 100_000] * 100]):
            with pytest.raises(ArgumentsTooLong):
                await sandbox.exec(argv)
        assert (await sandbox.exec(["true"])).ok

    async def test_death_by_signal_is_told_apart_from_an_exit_code(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("kill -9 $$")
        assert (result.signal, result.exit_code) == (9, 137)
        assert (await sandbox.exec("exit 137")).signal is None

    async def test_a_timeout_returns_in_time_with_what_was_said(self, sandbox: AsyncSandbox) -> None:
        async with asyncio.timeout(10):
            result = await sandbox.exec("echo early; sleep 1000", timeout_s=0.5)
        assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, b"early\n")

    @pytest.mark.needs_real_unix
    async def test_a_timeout_kills_the_whole_tree(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("trap '' TERM; sleep 1001 & sleep 1002 & sleep 1000", timeout_s=0.3)
        assert result.timed_out
        await self._expect_no_other_process(sandbox)

    async def test_cancelling_kills_the_whole_tree(self, sandbox: AsyncSandbox) -> None:
        running = asyncio.create_task(sandbox.exec("echo up > started; sleep 1001 & sleep 1000"))
        await eventually(lambda: sandbox.files.exists("started"), "the command started")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await self._expect_no_other_process(sandbox)

    async def test_losing_the_stream_kills_the_foreground_and_keeps_the_background(self, sandbox: AsyncSandbox) -> None:
        background = await sandbox.start(["sleep", "1000"], background=True)
        foreground = await sandbox.start("echo up; sleep 1001")
        await output_until(foreground, b"up")
        await sandbox.close()
        with pytest.raises(CallInterrupted):
            await foreground.wait()

        async def only_the_background() -> bool:
            return [each.process for each in await sandbox.processes.list() if each.running] == [background.number]

        await eventually(only_the_background, "the foreground process died")

    async def _expect_no_other_process(self, sandbox: AsyncSandbox) -> None:
        async def alone() -> bool:
            return (await sandbox.metrics()).processes <= self.idle_processes

        await eventually(alone, "every process of the tree is gone")

    idle_processes = 1
    """How many processes an idle box has, its agent included."""

    async def test_what_a_command_leaves_behind_does_not_hold_it_up(self, sandbox: AsyncSandbox) -> None:
        async with asyncio.timeout(10):
            result = await sandbox.exec("sleep 1000 & echo done")
        assert result.stdout == b"done\n"

    async def test_cwd_and_env_are_as_asked(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec('pwd; echo "$ONE"', cwd="/tmp", env={"ONE": "1 é"})
        assert result.stdout == "/tmp\n1 é\n".encode()

    async def test_a_missing_cwd_is_an_error_that_names_it(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(PathNotFound, match="/no/such/folder"):
            await sandbox.exec(["true"], cwd="/no/such/folder")

    async def test_the_hosts_environment_is_not_in_the_box(
        self, sandbox: AsyncSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PLANTED_SECRET", "do-not-tell")
        assert b"do-not-tell" not in (await sandbox.exec(["env"])).stdout

    async def test_stdin_is_passed_whole(self, sandbox: AsyncSandbox) -> None:
        data = bytes(range(256)) * 12_000
        result = await sandbox.exec(["cat"], stdin=data)
        assert result.stdout == data

    async def test_without_stdin_a_command_reads_an_end(self, sandbox: AsyncSandbox) -> None:
        async with asyncio.timeout(10):
            assert (await sandbox.exec(["cat"])).stdout == b""

    async def test_more_output_than_is_kept_is_cut_and_does_not_block(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("head -c 5000000 /dev/zero; echo last; echo end >&2", limit=1000)
        assert result.exit_code == 0
        missing = b"\n[... 4999005 bytes left out ...]\n"
        assert result.stdout == bytes(500) + missing + bytes(495) + b"last\n"
        assert (result.truncated, result.stdout_cut, result.stderr_cut, result.stderr) == (True, 4999005, 0, b"end\n")

    async def test_the_end_of_a_long_output_comes_whole_whatever_its_limit(self, sandbox: AsyncSandbox) -> None:
        for limit in (2_000_000, 3_000_000, 3_000_010):
            result = await sandbox.exec("head -c 3000000 /dev/zero; echo 123456789", limit=limit)
            cut = max(0, 3_000_010 - limit)
            assert (result.stdout_cut, result.truncated) == (cut, cut > 0)
            assert result.stdout.endswith(bytes(1000) + b"123456789\n")

    async def test_both_outputs_can_be_had_in_order(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("echo 1; echo 2 >&2; echo 3; echo 4 >&2", combined=True)
        assert (result.output, result.stdout, result.stderr) == (b"1\n2\n3\n4\n", b"1\n2\n3\n4\n", b"")

    async def test_a_timeout_of_zero_is_none(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("sleep 0.1; echo done", timeout_s=0)
        assert (result.stdout, result.timed_out) == (b"done\n", False)

    async def test_output_is_exact_to_the_byte(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec(["head", "-c", "3000001", "/dev/zero"])
        assert result.stdout == bytes(3_000_001)
        assert not result.truncated

    async def test_output_streams_to_callbacks_as_it_comes(self, sandbox: AsyncSandbox) -> None:
        out: list[bytes] = []
        err: list[bytes] = []
        await sandbox.exec("echo one; echo two >&2", on_stdout=out.append, on_stderr=err.append)
        assert (b"".join(out), b"".join(err)) == (b"one\n", b"two\n")

    async def test_a_process_can_be_talked_with(self, sandbox: AsyncSandbox) -> None:
        process = await sandbox.start(["cat"], stdin=True)
        await process.write("ping\n")
        assert await output_until(process, b"ping\n") == b"ping\n"
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0

    async def test_a_reader_that_does_not_read_holds_up_only_that_process(self, sandbox: AsyncSandbox) -> None:
        flood = await sandbox.start(["yes"])
        assert (await sandbox.exec(["true"])).ok
        await sandbox.ping()
        await flood.kill()
        assert (await flood.wait()).signal == 9

    async def test_a_process_can_be_signalled(self, sandbox: AsyncSandbox) -> None:
        process = await sandbox.start("echo up; sleep 1000")
        await output_until(process, b"up")
        await process.signal(15)
        assert (await process.wait()).signal == 15

    async def test_a_background_process_is_attached_to_again_by_several(self, sandbox: AsyncSandbox) -> None:
        process = await sandbox.start("echo before; read line; echo after $line", background=True, stdin=True)
        assert process.number is not None
        first = await sandbox.processes.attach(process.number)
        second = await sandbox.processes.attach(process.number)
        await output_until(first, b"before\n")
        await output_until(second, b"before\n")
        await first.write("x\n")
        assert b"after x\n" in await output_until(second, b"after")
        assert (await first.wait()).exit_code == 0
        assert (await second.wait()).exit_code == 0
        third = await sandbox.processes.attach(process.number)
        assert b"".join([data async for _, data in third]) == b"before\nafter x\n"

    async def test_who_wants_no_replay_hears_only_what_comes(self, sandbox: AsyncSandbox) -> None:
        process = await sandbox.start("echo before; cat", background=True, stdin=True)
        assert process.number is not None
        assert process.pid
        await output_until(await sandbox.processes.attach(process.number), b"before\n")
        late = await sandbox.processes.attach(process.number, replay=False)
        heard = asyncio.create_task(output_until(late, b"after\n"))
        while not heard.done():  # nothing tells when it begins to hear
            async with process.input() as call:
                await call.send(b"after\n")
            await asyncio.wait({heard}, timeout=0.1)
        assert b"before" not in await heard
        await process.close_stdin()
        assert (await process.wait()).exit_code == 0

    async def test_a_process_without_stdin_takes_no_input(self, sandbox: AsyncSandbox) -> None:
        process = await sandbox.start(["sleep", "1000"], background=True)
        with pytest.raises(InvalidSpec):
            async with process.input() as call:
                await call.send(b"x")
        await process.signal(9, alone=True, wait=True)
        (known,) = [each for each in await sandbox.processes.list() if each.process == process.number]
        assert not known.running

    async def test_processes_are_listed_with_their_tags(self, sandbox: AsyncSandbox) -> None:
        process = await sandbox.start(["sleep", "1000"], background=True, tag="server")
        listed = {each.process: each for each in await sandbox.processes.list()}
        assert process.number is not None
        found = listed[process.number]
        assert (found.argv, found.tag, found.running) == (["sleep", "1000"], "server", True)
        await process.kill()
        assert (await process.wait()).signal == 9
        after = {each.process: each for each in await sandbox.processes.list()}[process.number]
        assert (after.running, after.signal) == (False, 9)

    async def test_an_unknown_process_is_not_found(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(NotFound):
            await sandbox.processes.kill(99999)

    async def test_fifty_commands_at_once_do_not_mix(self, sandbox: AsyncSandbox) -> None:
        results = await asyncio.gather(*(sandbox.exec(["echo", str(n)]) for n in range(50)))
        assert [result.text for result in results] == [f"{n}\n" for n in range(50)]

    @pytest.mark.needs_real_unix
    async def test_a_terminal_has_the_size_that_was_asked_for(self, sandbox: AsyncSandbox) -> None:
        terminal = await sandbox.pty(["sh", "-c", "test -t 0 && test -t 1 && echo terminal; read x; echo got-$x"])
        assert b"terminal" in await output_until(terminal, b"terminal")
        await terminal.resize(50, 132)
        await terminal.write("typed\n")
        assert b"got-typed" in await output_until(terminal, b"got-typed")
        assert (await terminal.wait()).exit_code == 0

    @pytest.mark.needs_real_unix
    async def test_ctrl_c_interrupts_what_runs_on_a_terminal(self, sandbox: AsyncSandbox) -> None:
        terminal = await sandbox.pty(["sh", "-c", "echo up; exec sleep 1000"])
        await output_until(terminal, b"up")
        await terminal.write(b"\x03")
        assert (await terminal.wait()).exit_code == 130

    async def test_code_runs_in_its_language(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.run_code("sh", "echo code\nexit 4\n")
        assert (result.exit_code, result.stdout) == (4, b"code\n")

    async def test_a_missing_interpreter_is_an_error_that_names_it(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(InterpreterNotFound, match="lua"):
            await sandbox.run_code("lua", "print(1)", env={"PATH": "/nowhere"})

    async def test_an_unknown_language_is_refused(self, sandbox: AsyncSandbox) -> None:
        with pytest.raises(InvalidSpec, match="klingon"):
            await sandbox.run_code("klingon", "Qapla")
