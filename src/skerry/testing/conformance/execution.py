"""Exec is exact: codes, outputs, signals, timeouts, trees, terminals."""

from __future__ import annotations

import asyncio

import pytest

from skerry.errors import CallInterrupted, InterpreterNotFound, InvalidSpec, NotFound, PathNotFound
from skerry.processes import AsyncProcess
from skerry.sandbox import AsyncSandbox
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


class ExecTests(Suite):
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
        assert result.exit_code == 127
        assert b"no-such-program" in result.stderr

    async def test_a_file_that_cannot_be_run_is_126(self, sandbox: AsyncSandbox) -> None:
        await sandbox.files.write("plain", "text", mode=0o644)
        assert (await sandbox.exec(["./plain"])).exit_code == 126

    async def test_death_by_signal_is_told_apart_from_an_exit_code(self, sandbox: AsyncSandbox) -> None:
        result = await sandbox.exec("kill -9 $$")
        assert (result.signal, result.exit_code) == (9, 137)
        assert (await sandbox.exec("exit 137")).signal is None

    async def test_a_timeout_returns_in_time_with_what_was_said(self, sandbox: AsyncSandbox) -> None:
        async with asyncio.timeout(10):
            result = await sandbox.exec("echo early; sleep 1000", timeout_s=0.5)
        assert (result.timed_out, result.exit_code, result.stdout) == (True, 124, b"early\n")

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
        result = await sandbox.exec("head -c 5000000 /dev/zero; echo end >&2", limit=1000)
        assert result.exit_code == 0
        assert (len(result.stdout), result.truncated, result.stderr) == (1000, True, b"end\n")

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

    async def test_a_terminal_has_the_size_that_was_asked_for(self, sandbox: AsyncSandbox) -> None:
        terminal = await sandbox.pty(["sh", "-c", "test -t 0 && test -t 1 && echo terminal; read x; echo got-$x"])
        assert b"terminal" in await output_until(terminal, b"terminal")
        await terminal.resize(50, 132)
        await terminal.write("typed\n")
        assert b"got-typed" in await output_until(terminal, b"got-typed")
        assert (await terminal.wait()).exit_code == 0

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
