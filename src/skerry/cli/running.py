"""A command in a new sandbox, joined to this process: its streams, its signals, its end."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import msgspec

from skerry.cli import terminal
from skerry.cli.output import print_json, say, spinner
from skerry.cli.pipes import read_chunk, write_all
from skerry.errors import SkerryError
from skerry.lifecycle import run_to_end
from skerry.processes import DEFAULT_LIMIT, AsyncProcess
from skerry.providers.base import Provider
from skerry.results import ExecResult
from skerry.sandbox import AsyncSandbox
from skerry.spec import Spec

_ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Job(NamedTuple):
    """What to run and how it is joined to us."""

    argv: Sequence[str] | None
    """None is the box's shell."""
    stdin: bool
    tty: bool
    timeout_s: float | None
    keep: bool
    as_json: bool


def run_job(job: Job, spec: Spec, provider: Provider) -> int:
    """Run it to its end, and give the exit code. Whatever happens, the sandbox goes, unless it is to be kept."""
    return asyncio.run(_Run(job, spec, provider).to_end())


class _Run:
    def __init__(self, job: Job, spec: Spec, provider: Provider) -> None:
        self._job = job
        self._spec = spec
        self._provider = provider
        self._ended_by: int | None = None

    async def to_end(self) -> int:
        """Run under our signals: each of them ends the work, which takes the sandbox with it."""
        work = asyncio.ensure_future(self._in_sandbox())
        loop = asyncio.get_running_loop()
        self._end = work.cancel
        for number in (signal.SIGINT, *_ENDING):
            loop.add_signal_handler(number, self._end_by, number)
        try:
            return await work
        except asyncio.CancelledError:
            if self._ended_by is None:
                raise
            return 128 + self._ended_by
        finally:
            await self._provider.aclose()

    def _end_by(self, number: int) -> None:
        if self._ended_by is None:
            self._ended_by = number
            self._end()

    async def _in_sandbox(self) -> int:
        sandbox: AsyncSandbox | None = None
        try:
            async with spinner("starting a sandbox"):
                sandbox = await AsyncSandbox.create(self._spec, self._provider)
            result = await self._run(sandbox)
        finally:
            if sandbox is not None:
                await run_to_end(self._leave(sandbox))
        if self._job.as_json:
            print_json(_as_data(sandbox, result))
        elif result.timed_out:
            say(f"the command was ended after {self._job.timeout_s:g} s, as --timeout asks")
        return result.exit_code

    async def _leave(self, sandbox: AsyncSandbox) -> None:
        if self._job.keep:
            say(f"kept sandbox {sandbox.id}")
            await sandbox.close()
        else:
            async with spinner("removing the sandbox"):
                await sandbox.destroy()

    async def _run(self, sandbox: AsyncSandbox) -> ExecResult:
        process = await self._start(sandbox)
        kept = _Kept()
        with ExitStack() as modes:
            if self._job.tty:
                modes.enter_context(terminal.raw_mode())
            async with asyncio.TaskGroup() as group:
                self._pass_signals(process, group)
                feeding = group.create_task(_feed(process)) if self._job.stdin else None
                async for fd, chunk in process:
                    if self._job.as_json:
                        kept.add(fd, chunk)
                    else:
                        await write_all(fd, chunk)
                result = await process.wait()
                if feeding is not None:
                    feeding.cancel()
        return kept.with_output(result)

    async def _start(self, sandbox: AsyncSandbox) -> AsyncProcess:
        if not self._job.tty:
            assert self._job.argv is not None
            return await sandbox.start(self._job.argv, stdin=self._job.stdin, timeout_s=self._job.timeout_s)
        env = {name: value for name, value in terminal.environment().items() if name not in self._spec.env}
        rows, cols = terminal.size()
        return await sandbox.pty(self._job.argv, rows=rows, cols=cols, env=env, timeout_s=self._job.timeout_s)

    def _pass_signals(self, process: AsyncProcess, group: asyncio.TaskGroup) -> None:
        """The first Ctrl-C is the command's, as if it ran here; the next one ends all."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            loop.add_signal_handler(signal.SIGINT, self._end_by, signal.SIGINT)
            group.create_task(_quietly(process.signal(signal.SIGINT)))

        def resize() -> None:
            group.create_task(_quietly(process.resize(*terminal.size())))

        loop.add_signal_handler(signal.SIGINT, interrupt)
        if self._job.tty:
            loop.add_signal_handler(signal.SIGWINCH, resize)
            resize()  # it may have changed since we asked


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


async def _feed(process: AsyncProcess) -> None:
    """Our standard input, to its end, or to the end of whoever reads it."""
    with suppress(SkerryError):  # the command has ended, or the stream has, which `wait` tells
        while chunk := await read_chunk(terminal.STDIN):
            await process.write(chunk)
        await process.close_stdin()


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    with suppress(SkerryError):  # the command has just ended
        await call


def _as_data(sandbox: AsyncSandbox, result: ExecResult) -> dict[str, Any]:
    return {
        "sandbox": sandbox.id,
        "exit_code": result.exit_code,
        **_text("stdout", result.stdout),
        **_text("stderr", result.stderr),
        "truncated": result.truncated,
        "timed_out": result.timed_out,
        "signal": result.signal,
        "duration_s": result.duration_s,
        "enforced": msgspec.to_builtins(dict(sandbox.enforced)),
    }


def _text(name: str, data: bytes) -> dict[str, str]:
    """Text as it is; what is not UTF-8 with replacements, and exactly beside it."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: data.decode(errors="replace"), f"{name}_base64": base64.b64encode(data).decode()}
