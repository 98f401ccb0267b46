"""Processes in a sandbox, as a user holds them."""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Self, TypedDict

import msgspec

from skerry.agent.call import Call
from skerry.agent.client import AgentClient
from skerry.errors import AgentProtocolError, InvalidSpec
from skerry.results import ExecResult, ProcessInfo

DEFAULT_LIMIT = 16 << 20
TIMEOUT_EXIT_CODE = 124
_ANSWER_GRACE_S = 30.0
"""How long after a command's own timeout the agent may take to kill it and to say so."""

Output = Callable[[bytes], object]
Connect = Callable[[], Awaitable[AgentClient]]


class ExecOptions(TypedDict, total=False):
    """The keywords of `exec` and `run_code`."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    stdin: bytes | str | None
    timeout_s: float | None
    limit: int
    """How many bytes of each output are kept; 16 MiB if nothing is said."""
    on_stdout: Output | None
    on_stderr: Output | None


class Exit(msgspec.Struct, frozen=True):
    """How a process ended, as the agent tells it."""

    exit_code: Annotated[int, msgspec.Meta(ge=0, le=255)] | None
    signal: Annotated[int, msgspec.Meta(ge=1, le=64)] | None
    timed_out: bool
    truncated: bool
    duration_s: Annotated[float, msgspec.Meta(ge=0)]

    def result(self, stdout: bytes = b"", stderr: bytes = b"", *, cut: bool = False) -> ExecResult:
        if self.timed_out:
            code = TIMEOUT_EXIT_CODE
        elif self.signal is not None:
            code = 128 + self.signal
        elif self.exit_code is not None:
            code = self.exit_code
        else:
            raise AgentProtocolError("the agent told neither an exit code nor a signal. Destroy this sandbox")
        return ExecResult(
            exit_code=code,
            stdout=stdout,
            stderr=stderr,
            truncated=self.truncated or cut,
            timed_out=self.timed_out,
            signal=self.signal,
            duration_s=self.duration_s,
        )


class _Started(msgspec.Struct, frozen=True):
    process: int


class _Processes(msgspec.Struct, frozen=True):
    processes: list[ProcessInfo]


def command_params(
    command: Sequence[str] | str | None,
    *,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """The agent's words for a command: a list is argv, a string is for the shell."""
    params: dict[str, Any] = {}
    if isinstance(command, str):
        params["shell"] = command
    elif command is not None:
        params["argv"] = [str(part) for part in command]
        if not params["argv"]:
            raise InvalidSpec("command: an empty list names no program", field="command")
    if cwd is not None:
        params["cwd"] = str(cwd)
    if env:
        params["env"] = dict(env)
    if user is not None:
        params["user"] = user
    if timeout_s is not None:
        params["timeout_s"] = timeout_s
    return params


def deadline(timeout_s: float | None) -> float | None:
    """When we stop waiting for an agent that should have ended a command long ago."""
    return None if timeout_s is None else timeout_s + _ANSWER_GRACE_S


async def run_buffered(
    client: AgentClient,
    method: str,
    params: dict[str, Any],
    *,
    attachment: bytes = b"",
    stdin: bytes | None = None,
    limit: int = DEFAULT_LIMIT,
    on_stdout: Output | None = None,
    on_stderr: Output | None = None,
) -> ExecResult:
    """Run to the end and keep what it says, at most `limit` bytes of each output."""
    params["limit"] = limit
    if stdin is not None:
        params["stdin"] = True
    kept = (bytearray(), bytearray())
    cut = False
    callbacks = (on_stdout, on_stderr)

    def on_data(fd: int, data: memoryview) -> None:
        nonlocal cut
        room = limit - len(kept[fd - 1])
        cut |= len(data) > room  # an agent that sends more than it may is cut, not believed
        piece = data[:room]
        kept[fd - 1].extend(piece)
        callback = callbacks[fd - 1]
        if callback is not None and piece:
            callback(bytes(piece))

    call = client.open(method, params, attachment=attachment, on_data=on_data)
    call.within(deadline(params.get("timeout_s")))
    try:
        if stdin is not None:
            await call.send(stdin)
            call.end()
        exit = await call.result(Exit)
    finally:
        call.abandon()
    return exit.result(bytes(kept[0]), bytes(kept[1]), cut=cut)


class AsyncProcess:
    """A process to talk with: iterate over (fd, bytes), write to it, signal it, wait for its end.

    A foreground process dies with its stream; one that was started with `background=True` has a number, lives on, and
    can be attached to again from anywhere.
    """

    def __init__(self, connect: Connect, call: Call | None, *, number: int | None = None) -> None:
        self.number = number
        self._connect = connect
        self._call = call

    @classmethod
    async def start(cls, connect: Connect, method: str, params: dict[str, Any], attachment: bytes = b"") -> Self:
        client = await connect()
        if params.get("background"):
            started = await client.call(method, params, type=_Started, attachment=attachment)
            return cls(connect, None, number=started.process)
        call = client.open(method, params, attachment=attachment).within(deadline(params.get("timeout_s")))
        return cls(connect, call)

    async def _stream(self) -> Call:
        if self._call is None:
            client = await self._connect()
            self._call = client.open("attach", {"process": self.number})
        return self._call

    def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        return self._chunks()

    async def _chunks(self) -> AsyncIterator[tuple[int, bytes]]:
        call = await self._stream()
        async for fd, data in call.chunks():
            yield fd, data

    async def write(self, data: bytes | str) -> None:
        """Send to its stdin, or type on its terminal."""
        await (await self._stream()).send(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """No more input; on a terminal this types Ctrl-D."""
        (await self._stream()).end()

    async def wait(self) -> ExecResult:
        """Its end. Output that was not iterated over is dropped, so that it does not stand in the way."""
        call = await self._stream()
        async for _ in call.chunks():
            pass
        return (await call.result(Exit)).result()

    async def signal(self, signal: int, *, tree: bool = False) -> None:
        """Signal its process group, or with `tree` everything that it has started."""
        await self._control("signal", {"signal": int(signal), "tree": tree})

    async def kill(self) -> None:
        """Kill it and everything that it has started."""
        await self.signal(signals.SIGKILL, tree=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of its terminal."""
        await self._control("resize", {"rows": rows, "cols": cols})

    async def _control(self, method: str, params: dict[str, Any]) -> None:
        if self._call is not None and self._call.done:
            return
        target = {"call": self._call.id} if self._call is not None else {"process": self.number}
        client = await self._connect()
        await client.call(method, {**target, **params}, type=dict[str, Any])

    async def detach(self) -> None:
        """Stop listening. A foreground process dies of it, a background one does not notice."""
        if self._call is not None:
            self._call.abandon()
            self._call = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.detach()


class AsyncProcesses:
    """All processes that were started in a sandbox and are still known."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect

    async def list(self) -> list[ProcessInfo]:
        """Those that run, and background ones that have ended."""
        client = await self._connect()
        return (await client.call("processes", type=_Processes)).processes

    async def attach(self, number: int) -> AsyncProcess:
        """A background process by its number: what it said last, then what it says."""
        return AsyncProcess(self._connect, None, number=number)

    async def signal(self, number: int, signal: int, *, tree: bool = False) -> None:
        """Signal a process by its number."""
        await (await self.attach(number)).signal(signal, tree=tree)

    async def kill(self, number: int) -> None:
        """Kill a process and everything that it has started."""
        await (await self.attach(number)).kill()
