"""Processes in a sandbox, as a user holds them."""

from __future__ import annotations

import signal as signals
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypedDict

import msgspec

from skerry.agent.call import WINDOW, Call, OnData
from skerry.agent.client import CONTROL_TIMEOUT_S, AgentClient
from skerry.errors import AgentProtocolError, InvalidSpec
from skerry.ledger.facts import NOT_TOLD, Command
from skerry.model.results import Count, ExecResult, ExitCode, Id, Measure, NotStarted, ProcessInfo, Signal
from skerry.net.stream import Buffer
from skerry.sandbox.connection import Connect

DEFAULT_LIMIT = 16 << 20
MAX_TAIL = 1 << 20
"""The most bytes of the end of an output that an agent keeps."""
MAX_COMMAND = 16 << 20
TIMEOUT_EXIT_CODE = 124
_MOST_FOR_A_LETTER = 8
"""Bytes of a line that a letter takes at most, in JSON, with a little for the quotes."""
_ANSWER_GRACE_S = 30.0
"""Time for the agent to kill a command after its own timeout, and to say so."""

Output = Callable[[bytes], object]


class ExecOptions(TypedDict, total=False):
    """The keywords of `exec` and `run_code`."""

    cwd: str | None
    env: Mapping[str, str] | None
    user: str | None
    stdin: bytes | str | None
    timeout_s: float | None
    """Seconds until it is killed; None and 0 are never."""
    limit: int
    """The most bytes of each output that are kept, its beginning and its end; 16 MiB if nothing is said."""
    combined: bool
    """Let both outputs be one, `stdout`, in the order in which they are written."""
    on_stdout: Output | None
    on_stderr: Output | None


class Exit(msgspec.Struct, frozen=True):
    """End of a process, as the agent tells it."""

    exit_code: ExitCode | None
    signal: Signal | None
    timed_out: bool
    truncated: bool
    duration_s: Measure
    stdout_bytes: Count = 0
    stderr_bytes: Count = 0
    not_started: NotStarted | None = None

    def with_output(self, stdout: Excerpt, stderr: Excerpt) -> ExecResult:
        """The result of a command with what was kept of its outputs."""
        if self.truncated:
            stdout.note_total(self.stdout_bytes)
            stderr.note_total(self.stderr_bytes)
        return msgspec.structs.replace(
            self.result(),
            stdout=stdout.content(),
            stderr=stderr.content(),
            stdout_cut=stdout.cut,
            stderr_cut=stderr.cut,
            truncated=self.truncated or stdout.cut > 0 or stderr.cut > 0,
        )

    def result(self) -> ExecResult:
        code = self.exit_code if self.signal is None else 128 + self.signal
        if self.timed_out:
            code = TIMEOUT_EXIT_CODE
        if code is None:
            raise AgentProtocolError("the agent told neither an exit code nor a signal. Destroy this sandbox")
        return ExecResult(
            exit_code=code,
            truncated=self.truncated,
            timed_out=self.timed_out,
            signal=self.signal,
            duration_s=self.duration_s,
            not_started=self.not_started,
        )


class _Started(msgspec.Struct, frozen=True):
    process: Count
    pid: Id = 0


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
    options = {"cwd": cwd and str(cwd), "env": dict(env or {}) or None, "user": user, "timeout_s": timeout_s or None}
    return params | {name: value for name, value in options.items() if value is not None}


def deadline(timeout_s: float | None) -> float | None:
    """Seconds after which an agent is not waited for that should have ended a command long ago."""
    return timeout_s + _ANSWER_GRACE_S if timeout_s else None


class Excerpt:
    """Beginning and end of an output of any length, and how much is missing between them."""

    def __init__(self, limit: int, tail: int | None = None) -> None:
        """Keep so many bytes, `tail` of them at the end, half of them if nothing is said."""
        self._tail_room = limit // 2 if tail is None else tail
        self._head_room = limit - self._tail_room
        self._head = bytearray()
        self._tail = bytearray()
        self._count = 0
        self._total = 0

    def add(self, data: Buffer) -> None:
        self._count += len(data)
        room = self._head_room - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._tail_room + (1 << 16):
            self._trim()

    def note_total(self, count: int) -> None:
        """Note how much there was, where the agent sent only a part of it."""
        self._total = count

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_room)]

    @property
    def cut(self) -> int:
        """Bytes that are missing."""
        self._trim()
        return max(self._count, self._total) - len(self._head) - len(self._tail)

    def content(self) -> bytes:
        """All that is kept, and in the place of what is missing how much that is."""
        cut = self.cut
        missing = b"\n[... %d bytes left out ...]\n" % cut if cut and self._head_room else b""
        return bytes(self._head + missing + self._tail)


async def open_command(
    client: AgentClient,
    method: str,
    params: dict[str, Any],
    attachment: bytes = b"",
    *,
    on_data: OnData | None = None,
    window: int = WINDOW,
) -> Call:
    """Begin an `exec` or `exec_code` of any length: what is too long for a frame follows it. Raises InvalidSpec."""
    env = params.get("env", {})
    texts = [*params.get("argv", ()), params.get("shell", ""), *env, *env.values()]
    if sum(len(text) + 1 for text in texts) * _MOST_FOR_A_LETTER > client.max_line:
        long = {name: params[name] for name in ("argv", "shell", "env") if name in params}
        params = {name: value for name, value in params.items() if name not in long}
        try:
            attachment = msgspec.json.encode(long)
        except ValueError as error:
            raise InvalidSpec(f"this cannot be sent to the agent: {error}") from None
    rest = memoryview(attachment)[client.max_attachment :]
    if len(rest) > MAX_COMMAND:
        much = f"more than {MAX_COMMAND >> 20} MiB"
        raise InvalidSpec(f"command: it is {much}: write it to a file in the sandbox, and run that", field="command")
    if rest:
        params = {**params, "more": len(rest)}
    head = attachment[: client.max_attachment]
    call = client.open(method, params, attachment=head, on_data=on_data, window=window)
    call.within(deadline(params.get("timeout_s")))
    try:
        await call.send(rest)
    except BaseException:
        call.abandon()
        raise
    return call


async def run_buffered(
    client: AgentClient, method: str, params: dict[str, Any], options: ExecOptions, attachment: bytes = b""
) -> ExecResult:
    """Run to the end and keep what it says, at most `limit` bytes of each output: its beginning and its end."""
    stdin, limit = options.get("stdin"), options.get("limit", DEFAULT_LIMIT)
    tail = min(limit // 2, MAX_TAIL)
    params |= {"limit": limit, "tail": tail}
    if stdin is not None:
        params["stdin"] = True
    if options.get("combined"):
        params["combined"] = True
    kept = (Excerpt(limit, tail), Excerpt(limit, tail))
    left = [limit, limit]
    callbacks = (options.get("on_stdout"), options.get("on_stderr"))

    def on_data(fd: int, data: memoryview) -> None:
        kept[fd - 1].add(data)  # an agent that sends more than it may is cut, not believed
        piece = data[: left[fd - 1]]
        left[fd - 1] -= len(piece)
        callback = callbacks[fd - 1]
        if callback is not None and piece:
            callback(bytes(piece))

    call = await open_command(client, method, params, attachment, on_data=on_data)
    try:
        if stdin is not None:
            await call.send(stdin.encode() if isinstance(stdin, str) else stdin)
            call.end()
        exit = await call.result(Exit)
    finally:
        call.abandon()
    return exit.with_output(*kept)


class AsyncProcess:
    """A process to talk with: iterate over (fd, bytes), write to it, signal it, wait for its end.

    A foreground process dies with its stream; one that was started with `background=True` has a number, lives on, and
    can be attached to again from anywhere.
    """

    def __init__(
        self,
        connect: Connect,
        call: Call | None,
        *,
        number: int | None = None,
        pid: int | None = None,
        replay: bool = True,
        told: Command = NOT_TOLD,
    ) -> None:
        """`told` is what the ledger has of it. Without `replay` it tells only what it says from now on."""
        self.number = number
        self.pid = pid
        """Its pid in the sandbox, if it lives on by itself."""
        self._replay = {} if replay else {"replay": False}
        self._told = told
        self._connect = connect
        self._call = call

    @classmethod
    async def start(
        cls, connect: Connect, method: str, params: dict[str, Any], attachment: bytes = b"", *, told: Command
    ) -> Self:
        with told.failing():
            call = await open_command(await connect(), method, params, attachment)
            if params.get("background"):
                started = await call.result(_Started, CONTROL_TIMEOUT_S)
                return cls(connect, None, number=started.process, pid=started.pid, told=told)
        return cls(connect, call, told=told)

    async def _stream(self) -> Call:
        if self._call is None:
            client = await self._connect()
            if self._call is None:  # who reads and who writes may both be first
                self._call = client.open("attach", {"process": self.number, **self._replay})
        return self._call

    async def __aiter__(self) -> AsyncIterator[tuple[int, bytes]]:
        async for fd, data in (await self._stream()).chunks():
            yield fd, data

    async def write(self, data: bytes | str) -> None:
        """Send to its stdin, or type on its terminal."""
        await (await self._stream()).send(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """No more input; on a terminal this types Ctrl-D."""
        (await self._stream()).end()

    async def wait(self) -> ExecResult:
        """Its end. Output that was not iterated over is dropped, so that it does not stand in the way."""
        with self._told.failing():
            call = await self._stream()
            async for _ in call.chunks():
                pass
            result = (await call.result(Exit)).result()
        self._told.end(result)
        return result

    async def signal(self, signal: int, *, tree: bool = False, alone: bool = False, wait: bool = False) -> None:
        """Signal its process group, with `tree` everything that it has started, or with `alone` only itself; and with
        `wait` until it is no more."""
        await self._control("signal", {"signal": int(signal), "tree": tree, "alone": alone, "wait": wait})

    async def kill(self) -> None:
        """Kill it and everything that it has started."""
        await self.signal(signals.SIGKILL, tree=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Change the size of its terminal."""
        await self._control("resize", {"rows": rows, "cols": cols})

    @asynccontextmanager
    async def input(self, *, close: bool = False, terminal: bool | None = None) -> AsyncIterator[Call]:
        """A way to write to a process that lives on, without listening to it: send pieces to the call. It is left when
        the process has taken all; with `close` it gets no more. Raises InvalidSpec if it has no stdin, or if whether it
        has a terminal is not as said."""
        params = {"process": self.number, "close": close, **({} if terminal is None else {"terminal": terminal})}
        call = (await self._connect()).open("input", params)
        try:
            yield call
            call.end()
            await call.result(dict[str, Any])
        finally:
            call.abandon()

    async def _control(self, method: str, params: dict[str, Any]) -> None:
        if self._call is not None and self._call.done:
            return
        target = {"call": self._call.id} if self._call is not None else {"process": self.number}
        await (await self._connect()).call(method, {**target, **params}, type=dict[str, Any])

    async def detach(self) -> None:
        """Stop listening. A foreground process dies of it, a background one does not notice."""
        if self._call is not None:
            self._call.abandon()
            self._call = None
            if self.number is None:
                self._told.leave()

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
        return (await (await self._connect()).call("processes", type=_Processes)).processes

    async def attach(self, number: int, *, replay: bool = True) -> AsyncProcess:
        """A background process by its number: what it said last, unless there is to be no `replay`, then what it
        says."""
        return AsyncProcess(self._connect, None, number=number, replay=replay)

    async def signal(self, number: int, signal: int, *, tree: bool = False) -> None:
        """Signal a process by its number."""
        await (await self.attach(number)).signal(signal, tree=tree)

    async def kill(self, number: int) -> None:
        """Kill a process and everything that it has started."""
        await (await self.attach(number)).kill()
