"""A process in a sandbox, joined to this one: its streams, its signals, its end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from typing import Any, NamedTuple

import msgspec

from skerry.cli import terminal
from skerry.cli.output import output_data, print_json, say
from skerry.cli.pipes import read_chunk, write_all
from skerry.errors import SkerryError
from skerry.processes import DEFAULT_LIMIT, AsyncProcess
from skerry.results import ExecResult
from skerry.sandbox import AsyncSandbox

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_DETACH = b"\x10\x11"  # Ctrl-P Ctrl-Q, as in Docker


class Job(NamedTuple):
    """A process to start or to join, and how it is joined to us."""

    argv: Sequence[str] | None = None
    """None is the box's shell."""
    stdin: bool = False
    tty: bool = False
    timeout_s: float | None = None
    as_json: bool = False
    env: Mapping[str, str] = {}
    cwd: str | None = None
    user: str | None = None
    background: bool = False
    process: int | None = None
    """Instead of all that: a background process by its number. It lives on when we leave."""

    @property
    def leaves_by_keys(self) -> bool:
        return self.tty and self.process is not None

    async def start(self, sandbox: AsyncSandbox) -> AsyncProcess:
        if self.process is not None:
            return await sandbox.processes.attach(self.process)
        if not self.tty:
            assert self.argv is not None
            return await sandbox.start(
                self.argv, env=self.env, cwd=self.cwd, user=self.user, stdin=self.stdin,
                timeout_s=self.timeout_s, background=self.background,
            )  # fmt: skip
        env = {name: value for name, value in terminal.environment().items() if name not in sandbox.spec.env}
        rows, cols = terminal.size()
        return await sandbox.pty(
            self.argv, rows=rows, cols=cols, env={**env, **self.env}, cwd=self.cwd, user=self.user,
            timeout_s=self.timeout_s, background=self.background,
        )  # fmt: skip


def run_joined(job: Job, opening: AbstractAsyncContextManager[AsyncSandbox]) -> int:
    """Run it to its end in the sandbox that opens, and give the exit code."""
    return asyncio.run(_Run(job, opening).to_end())


class _Run:
    def __init__(self, job: Job, opening: AbstractAsyncContextManager[AsyncSandbox]) -> None:
        self._job = job
        self._opening = opening
        self._ended_by: int | None = None
        self._left = False

    async def to_end(self) -> int:
        """Run under our signals: each of them ends the work, and whatever was opened for it."""
        work = asyncio.ensure_future(self._in_sandbox())
        loop = asyncio.get_running_loop()
        self._end = work.cancel
        for number in (signal.SIGINT, *_ENDING):
            loop.add_signal_handler(number, self._end_by, number)
        try:
            return await work
        except asyncio.CancelledError:
            if self._left:
                return 0
            if self._ended_by is None:
                raise
            return 128 + self._ended_by

    def _end_by(self, number: int) -> None:
        if self._ended_by is None:
            self._ended_by = number
            self._end()

    async def _in_sandbox(self) -> int:
        async with self._opening as sandbox:
            result = await self._run(sandbox)
        if self._job.as_json:
            print_json(_as_data(sandbox, result))
        elif result.timed_out and self._job.timeout_s is not None:
            say(f"the command was ended after {self._job.timeout_s:g} s, as --timeout asks")
        return result.exit_code

    async def _run(self, sandbox: AsyncSandbox) -> ExecResult:
        process = await self._job.start(sandbox)
        kept = _Kept()
        with ExitStack() as modes:
            if self._job.tty:
                modes.enter_context(terminal.raw_mode())
            async with asyncio.TaskGroup() as group:
                self._pass_signals(process, group)
                feeding = group.create_task(self._feed(process)) if self._job.stdin else None
                async for fd, chunk in process:
                    if self._job.as_json:
                        kept.add(fd, chunk)
                    else:
                        await write_all(fd, chunk)
                result = await process.wait()
                if feeding is not None:
                    feeding.cancel()
        return kept.with_output(result)

    def _pass_signals(self, process: AsyncProcess, group: asyncio.TaskGroup) -> None:
        """The first Ctrl-C is the command's, as if it ran here; the next one ends all."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            loop.add_signal_handler(signal.SIGINT, self._end_by, signal.SIGINT)
            group.create_task(_quietly(process.signal(signal.SIGINT)))

        def resize() -> None:
            group.create_task(_quietly(process.resize(*terminal.size())))

        if self._job.process is None:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        if self._job.tty:
            loop.add_signal_handler(signal.SIGWINCH, resize)
            resize()  # it may have changed since we asked

    async def _feed(self, process: AsyncProcess) -> None:
        """Our standard input, to its end, or to the end of whoever reads it."""
        keys = _LeavingKeys() if self._job.leaves_by_keys else None
        with suppress(SkerryError):  # the command has ended, or the stream has, which `wait` tells
            while chunk := await read_chunk(terminal.STDIN):
                await process.write(chunk if keys is None else keys.without(chunk))
                if keys is not None and keys.seen:
                    self._left = True
                    self._end()
                    return
            await process.close_stdin()


class _LeavingKeys:
    """Finds the keys that leave a terminal in what is typed, also when they come one by one."""

    def __init__(self) -> None:
        self._held = b""
        self.seen = False

    def without(self, typed: bytes) -> bytes:
        """What is for the process."""
        before, keys, _ = (self._held + typed).partition(_DETACH)
        self.seen = bool(keys)
        self._held = b"" if keys or not before.endswith(_DETACH[:1]) else _DETACH[:1]
        return before.removesuffix(self._held)


class _Kept:
    """The output that `--json` tells, up to the limit that every buffered command has."""

    def __init__(self) -> None:
        self._output = {1: bytearray(), 2: bytearray()}
        self._truncated = False

    def add(self, fd: int, chunk: bytes) -> None:
        room = DEFAULT_LIMIT - len(self._output[fd])
        self._output[fd] += chunk[:room]
        self._truncated |= len(chunk) > room

    def with_output(self, result: ExecResult) -> ExecResult:
        stdout, stderr = (bytes(self._output[fd]) for fd in (1, 2))
        return msgspec.structs.replace(
            result, stdout=stdout, stderr=stderr, truncated=result.truncated or self._truncated
        )


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    with suppress(SkerryError):  # the command has just ended
        await call


def _as_data(sandbox: AsyncSandbox, result: ExecResult) -> dict[str, Any]:
    return {
        "sandbox": sandbox.id,
        "exit_code": result.exit_code,
        **output_data("stdout", result.stdout),
        **output_data("stderr", result.stderr),
        "truncated": result.truncated,
        "timed_out": result.timed_out,
        "signal": result.signal,
        "duration_s": result.duration_s,
        "enforced": msgspec.to_builtins(dict(sandbox.enforced)),
    }
