"""A process of Inspect's `exec_remote`, over the stream of the box's agent: nothing is injected, and nobody polls."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Self, TypeAlias

from inspect_ai.util import (
    ExecCompleted,
    ExecOutput,
    ExecRemoteAwaitableOptions,
    ExecRemoteProcess,
    ExecRemoteStreamingOptions,
    ExecStderr,
    ExecStdout,
    SandboxEnvironment,
)

from skerry.aio import end, run_to_end
from skerry.errors import NotFound, Unsupported, WrongState
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox

Options: TypeAlias = ExecRemoteStreamingOptions | ExecRemoteAwaitableOptions
_AT_ONCE = 1 << 20
"""Input that is sent before anybody reads; the agent takes four times as much unasked."""


class Process(ExecRemoteProcess):
    """A process that lives on when nobody reads what it says: its last 1 MiB is kept, and read first."""

    def __init__(self, environment: SandboxEnvironment, cmd: list[str], options: Options, inner: AsyncProcess) -> None:
        super().__init__(environment, cmd, options, environment.default_polling_interval())
        self._inner = inner
        self._keeps_stdin = _keeps_stdin(options)
        self._pid = inner.number or 0
        self._killed = self._completed = False
        self._rest = b""
        self._stream = self._events()

    @classmethod
    async def begin(
        cls, environment: SandboxEnvironment, sandbox: AsyncSandbox, cmd: list[str], options: Options
    ) -> Self:
        """Start it; when this returns it runs."""
        given = options.input.encode() if isinstance(options.input, str) else options.input
        keeps_stdin = _keeps_stdin(options)
        takes_input = given is not None or keeps_stdin
        start = partial(sandbox.start, cmd, stdin=takes_input, cwd=options.cwd, env=options.env, user=options.user)
        try:
            inner = await start(background=True)
        except Unsupported:  # of another user, where the agent is not root: it ends when nobody reads any more
            inner = await start()
        self = cls(environment, cmd, options, inner)
        try:
            if given is not None:
                await inner.write(given[:_AT_ONCE])
                self._rest = given[_AT_ONCE:]
            if takes_input and not self._rest and not keeps_stdin:
                await inner.close_stdin()
        except BaseException:
            await run_to_end(self.kill())
            raise
        return self

    async def _feed(self) -> None:
        """Send what is left of the input, while its output is read."""
        await self._inner.write(self._rest)
        if not self._keeps_stdin:
            await self._inner.close_stdin()

    async def _events(self) -> AsyncIterator[ExecOutput]:
        feeding = asyncio.ensure_future(self._feed()) if self._rest else None
        kinds: dict[int, type[ExecStdout | ExecStderr]] = {1: ExecStdout, 2: ExecStderr}
        decoders = {fd: codecs.getincrementaldecoder("utf-8")("replace") for fd in kinds}
        try:
            async for fd, data in self._inner:
                if text := decoders[fd].decode(data):
                    yield kinds[fd](text)
            for fd, decoder in decoders.items():
                if text := decoder.decode(b"", final=True):
                    yield kinds[fd](text)
            exit_code = (await self._inner.wait()).exit_code
            self._completed = True
            if not self._killed:
                yield ExecCompleted(exit_code)
        finally:
            if feeding is not None:
                await end(feeding)

    async def __anext__(self) -> ExecOutput:
        try:
            return await anext(self._stream)
        except asyncio.CancelledError:
            await run_to_end(self.kill())
            raise

    async def write_stdin(self, data: str | bytes) -> None:
        self._refuse_closed("write_stdin")
        if self._completed or self._killed:
            raise RuntimeError("Cannot write to stdin: process has terminated")
        await self._inner.write(data)

    async def close_stdin(self) -> None:
        self._refuse_closed("close_stdin")
        if not (self._completed or self._killed):
            await self._inner.close_stdin()

    def _refuse_closed(self, what: str) -> None:
        if not self._keeps_stdin:
            raise RuntimeError(f"{what}() requires stdin_open=True in ExecRemoteStreamingOptions")

    async def kill(self) -> None:
        """Kill it and all that it has started. Quiet if it has ended; what it said until then can still be read."""
        if self._completed or self._killed:
            return
        self._killed = True
        with suppress(NotFound, WrongState):
            await self._inner.kill()


def _keeps_stdin(options: Options) -> bool:
    return isinstance(options, ExecRemoteStreamingOptions) and options.stdin_open
