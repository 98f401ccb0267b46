"""Jobs: a command in a sandbox, joined to the streams, the signals and the end of this process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, NamedTuple

import msgspec

from skerry.aio import backoff, run_to_end
from skerry.cli import terminal
from skerry.cli.options import duration, environment
from skerry.cli.output import output_data, print_json, say, spinner, to_data
from skerry.cli.registry import create_sandbox, open_manager
from skerry.config import Config
from skerry.errors import AgentUnreachable, CallInterrupted, SkerryError
from skerry.manager.manager import AsyncSandboxManager
from skerry.model.records import Cause
from skerry.model.results import ExecResult
from skerry.model.spec import SandboxId, Spec
from skerry.sandbox.processes import DEFAULT_LIMIT, AsyncProcess, Excerpt
from skerry.sandbox.sandbox import AsyncSandbox

_log = logging.getLogger("skerry.cli")

_ENDING = (*terminal.ENDING, signal.SIGQUIT)
_DETACH = b"\x10\x11"  # Ctrl-P Ctrl-Q, as in Docker
_GONE_S = 2.0
"""How long a box may take to be gone once its stream is closed."""


class Job(NamedTuple):
    """Process to start or to attach to, and what joins it to us."""

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
    """Number of a background process, instead of all that. It lives on when we leave."""

    def time_in(self, sandbox: AsyncSandbox) -> float | None:
        """Seconds until it is ended: its own, or those of any command in the sandbox that somebody waits for."""
        if self.timeout_s is None and not (self.tty or self.background):
            return sandbox.spec.timeout_s or None
        return self.timeout_s

    async def start(self, sandbox: AsyncSandbox) -> AsyncProcess:
        """Start it, or attach to it."""
        if self.process is not None:
            return await sandbox.processes.attach(self.process)
        if not self.tty:
            assert self.argv is not None
            return await sandbox.start(
                self.argv, env=self.env, cwd=self.cwd, user=self.user, stdin=self.stdin,
                timeout_s=self.time_in(sandbox), background=self.background,
            )  # fmt: skip
        env = {name: value for name, value in terminal.environment().items() if name not in sandbox.spec.env}
        rows, cols = terminal.size()
        return await sandbox.pty(
            self.argv, rows=rows, cols=cols, env={**env, **self.env}, cwd=self.cwd, user=self.user,
            timeout_s=self.timeout_s, background=self.background,
        )  # fmt: skip


def make_job(
    argv: Sequence[str],
    as_json: bool,
    timeout: str | None,
    *,
    interactive: bool = False,
    tty: bool = False,
    detach: bool = False,
    env: Iterable[str] = (),
    cwd: str | None = None,
    user: str | None = None,
) -> Job:
    """Job of the options of a command line. Raises InvalidSpec for a wrong timeout."""
    return Job(
        argv=argv or None,
        stdin=interactive or tty,
        tty=tty,
        timeout_s=duration(timeout, "--timeout"),
        as_json=as_json,
        env=environment(env),
        cwd=cwd,
        user=user,
        background=detach,
    )


def run_job(job: Job, opening: AbstractAsyncContextManager[AsyncSandbox]) -> int:
    """Run a job to its end in the sandbox that `opening` opens, and give the exit code."""
    return asyncio.run(_Run(job, opening).to_end())


@asynccontextmanager
async def new_sandbox(config: Config, spec: Spec, *, keep: bool, pool: bool) -> AsyncIterator[AsyncSandbox]:
    """Create a sandbox, and destroy it however the job ends, unless it is to be kept."""
    async with open_manager(config) as manager:
        manager.end_overdue()
        sandbox = await create_sandbox(manager, spec, ephemeral=not keep, pool=pool)
        try:
            yield sandbox
        except BaseExceptionGroup as group:
            if group.subgroup((CallInterrupted, AgentUnreachable)) is None:
                raise
            cause = await _cause_of_end(manager, sandbox.id)
            if cause is None:
                raise
            raise AgentUnreachable(f"the sandbox ended before its command did: {cause}") from group
        finally:
            if keep:
                say(f"kept sandbox {sandbox.id}")
            else:
                await run_to_end(_remove(sandbox))


async def _remove(sandbox: AsyncSandbox) -> None:
    async with spinner("removing the sandbox"):
        await sandbox.destroy(grace_s=0)  # its command has ended, and what that left ends with it
    _log.info("sandbox %s is destroyed", sandbox.id)


async def _cause_of_end(manager: AsyncSandboxManager, id: SandboxId) -> Cause | None:
    """Cause of a sandbox's end; None if it lives on."""
    for delay_s in backoff(0.05, 0.8, _GONE_S):
        record = await manager.look_after(id)
        if record.cause is not None:
            return record.cause
        await asyncio.sleep(delay_s)
    return None


class _Run:
    """A job in the sandbox that `opening` opens."""

    def __init__(self, job: Job, opening: AbstractAsyncContextManager[AsyncSandbox]) -> None:
        self._job = job
        self._opening = opening
        self._ended_by: int | None = None
        self._left = False

    async def to_end(self) -> int:
        """Run it and give the exit code; a signal ends it, and whatever was opened for it."""
        work = asyncio.ensure_future(self._in_sandbox())
        self._end = work.cancel
        try:
            with terminal.on_signals(self._end_by, _ENDING):
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
            print_json({**result_data(sandbox, result), "enforced": to_data(dict(sandbox.enforced))})
        elif result.timed_out and (timeout_s := self._job.time_in(sandbox)) is not None:
            asked = "--timeout asks" if self._job.timeout_s is not None else "the sandbox's timeout says"
            say(f"the command was ended after {timeout_s:g} s, as {asked}")
        return result.exit_code

    async def _run(self, sandbox: AsyncSandbox) -> ExecResult:
        process = await self._job.start(sandbox)
        _log.info("sandbox %s runs the command", sandbox.id)
        output = {fd: Excerpt(DEFAULT_LIMIT) for fd in (1, 2)}  # for --json
        with terminal.raw_mode() if self._job.tty else nullcontext():
            async with asyncio.TaskGroup() as group:
                self._pass_signals(process, group)
                feeding = group.create_task(self._feed(process)) if self._job.stdin else None
                async for fd, chunk in process:
                    if self._job.as_json:
                        output[fd].add(chunk)
                    else:
                        await terminal.write_all(fd, chunk)
                result = await process.wait()
                if feeding is not None:
                    feeding.cancel()
        _log.info("sandbox %s: the command ended with exit code %d", sandbox.id, result.exit_code)
        stdout, stderr = output.values()
        return msgspec.structs.replace(
            result,
            stdout=stdout.content(),
            stderr=stderr.content(),
            stdout_cut=stdout.cut,
            stderr_cut=stderr.cut,
            truncated=stdout.cut > 0 or stderr.cut > 0,
        )

    def _pass_signals(self, process: AsyncProcess, group: asyncio.TaskGroup) -> None:
        """Pass the first Ctrl-C to the command, as if it ran here; the next one ends all."""
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            loop.add_signal_handler(signal.SIGINT, self._end_by, signal.SIGINT)
            group.create_task(_ignore_end(process.signal(signal.SIGINT)))

        def resize() -> None:
            group.create_task(_ignore_end(process.resize(*terminal.size())))

        if self._job.process is None:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        if self._job.tty:
            loop.add_signal_handler(signal.SIGWINCH, resize)
            resize()  # it may have changed since we asked

    async def _feed(self, process: AsyncProcess) -> None:
        """Pass our standard input on, to its end or to the end of its reader."""
        keys = _DetachKeys() if self._job.tty and self._job.process is not None else None
        try:
            while chunk := await terminal.read_chunk(terminal.STDIN):
                await process.write(chunk if keys is None else keys.without(chunk))
                if keys is not None and keys.seen:
                    self._left = True
                    self._end()
                    return
            await process.close_stdin()
        except SkerryError as error:  # the command has ended, or the stream has, which `wait` tells
            _log.debug("standard input is read no more: %s", error)


class _DetachKeys:
    """Finds the keys that leave a terminal, also when they come one by one."""

    def __init__(self) -> None:
        self._held = b""
        self.seen = False

    def without(self, typed: bytes) -> bytes:
        """Typed bytes that are for the process."""
        before, keys, _ = (self._held + typed).partition(_DETACH)
        self.seen = bool(keys)
        self._held = b"" if keys or not before.endswith(_DETACH[:1]) else _DETACH[:1]
        return before.removesuffix(self._held)


async def _ignore_end(call: Coroutine[Any, Any, None]) -> None:
    try:
        await call
    except SkerryError as error:
        _log.debug("the command has just ended: %s", error)


def result_data(sandbox: AsyncSandbox, result: ExecResult) -> dict[str, Any]:
    """Result of a command, for JSON."""
    return {
        "sandbox": sandbox.id,
        "exit_code": result.exit_code,
        **output_data("stdout", result.stdout),
        **output_data("stderr", result.stderr),
        "truncated": result.truncated,
        "stdout_cut": result.stdout_cut,
        "stderr_cut": result.stderr_cut,
        "timed_out": result.timed_out,
        "signal": result.signal,
        "duration_s": result.duration_s,
        "not_started": result.not_started,
    }
