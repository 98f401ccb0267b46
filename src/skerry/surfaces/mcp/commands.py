"""Tools that run commands: to their end, or in the background."""

from __future__ import annotations

import asyncio
import shlex
import signal as signals
import time
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, Field

from skerry.agent.client import CONTROL_TIMEOUT_S
from skerry.aio import end
from skerry.errors import CallTimeout, InvalidSpec, NotFound
from skerry.model.results import ExecResult, ProcessInfo
from skerry.model.tenants import Scope
from skerry.sandbox.processes import ExecOptions, Exit
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.mcp.caller import Caller
from skerry.surfaces.mcp.outputs import MAX_OUTPUT
from skerry.surfaces.mcp.remembered import Remembered
from skerry.surfaces.mcp.results import Execution, ToolResult, printable
from skerry.surfaces.mcp.tool import CwdArg, EnvArg, SandboxArg, StdinArg, TimeoutArg, Tools

tools = Tools()
ProcessArg = Annotated[int, Field(description="The number that start_process gave", ge=0)]
_MAX_WAIT_S = 60.0
_MOST_KEPT = 2 << 20
"""Bytes that are taken of what an agent says a process has said: it keeps half as much."""
_ROUNDS = 64
"""How often an agent is asked at most whether that was all that it keeps."""
_MOST_ARGUMENTS = 500
"""Letters of a command line in a list."""
_STOP_S = 5.0


class Process(BaseModel):
    process: int = Field(description="What the other tools take as `process`")
    command: str
    running: bool
    exit_code: int | None = Field(description="As in a shell; null while it runs")
    tag: str | None
    started_at: float = Field(description="Seconds since 1970")

    @classmethod
    def of(cls, info: ProcessInfo) -> Process:
        code = info.exit_code if info.signal is None else 128 + info.signal
        command = printable(shlex.join(info.argv))
        return cls(
            process=info.process,
            command=command if len(command) <= _MOST_ARGUMENTS else f"{command[:_MOST_ARGUMENTS]}...",
            running=info.running,
            exit_code=None if info.running else code,
            tag=info.tag,
            started_at=info.started,
        )

    def line(self) -> str:
        how = "runs" if self.running else f"ended with exit code {self.exit_code}"
        return f"{self.process}: {how}: {self.command}"


class ProcessStarted(ToolResult):
    process: int = Field(description="What read_process_output and stop_process take")

    def text(self) -> str:
        return f"Process {self.process} runs. Read what it says with read_process_output."


class ProcessList(ToolResult):
    processes: list[Process]
    more: bool = Field(description="There are more than these")

    def text(self) -> str:
        lines = [each.line() for each in self.processes]
        return "\n".join([*lines, *(["[there are more]"] if self.more else [])]) or "There is no process."


class ProcessOutput(ToolResult):
    process: int
    output: str = Field(description="Stdout and stderr, as they came. Untrusted data")
    missing: int = Field(description="Bytes before `output` that were asked for and are not kept, or had no room")
    cursor: int = Field(description="Give it as `cursor` for what comes next")
    running: bool
    exit_code: int | None = Field(description="As in a shell; null while it runs")

    def text(self) -> str:
        how = "it runs" if self.running else f"it ended with exit code {self.exit_code}"
        lacks = f", {self.missing} bytes before that are missing" if self.missing else ""
        return f"[process {self.process}: {how}{lacks}, cursor {self.cursor}, untrusted data]\n{self.output}"


class ProcessEnded(ToolResult):
    process: int
    exit_code: int = Field(description="As in a shell")

    def text(self) -> str:
        return f"Process {self.process} has ended with exit code {self.exit_code}."


@tools.add(Scope.EXEC, destroys=True, open_world=True, untrusted=True)
async def execute_command(
    caller: Caller,
    sandbox: SandboxArg,
    command: Annotated[str, Field(description="A shell command; pipes and redirections work")],
    cwd: CwdArg = None,
    env: EnvArg = None,
    stdin: StdinArg = None,
    timeout_s: TimeoutArg = None,
) -> Execution:
    """Run a shell command in a sandbox to its end. A command that fails is a result with its exit code. For a server,
    or what takes long, use start_process."""
    box = await caller.sandbox(sandbox)
    return _execution(caller, await box.exec(command, **_options(caller, cwd, env, stdin, timeout_s)))


@tools.add(Scope.EXEC, destroys=True, open_world=True, untrusted=True)
async def execute_code(
    caller: Caller,
    sandbox: SandboxArg,
    code: Annotated[str, Field(description="The program; without a context each call runs in a new interpreter")],
    language: Annotated[
        str, Field(description="python, bash, sh, node, ruby, perl, php, lua, r, go, java or deno")
    ] = "python",
    cwd: CwdArg = None,
    env: EnvArg = None,
    stdin: StdinArg = None,
    timeout_s: TimeoutArg = None,
    context: Annotated[
        str | None,
        Field(
            description="A name of your choice: code with the same one shares variables and imports. "
            "Values and plots come back, as images too. python, bash, javascript, or a Jupyter kernel of the image",
            max_length=128,
        ),
    ] = None,
    restart: Annotated[bool, Field(description="Empty the context first")] = False,
) -> Remembered:
    """Run code in a sandbox to its end. Files stay from call to call; variables only with a `context`."""
    box = await caller.sandbox(sandbox)
    if context is not None:
        if stdin is not None:
            raise InvalidSpec("stdin: code in a context has none", field="stdin")
        interpreter = await box.interpreter(language, name=context, cwd=cwd)
        if restart:
            await interpreter.restart()
        limit, begin = max(MAX_OUTPUT, caller.limits.output_bytes), time.monotonic()
        done = await interpreter.run(code, timeout_s=caller.time(timeout_s), env=env, limit=limit)
        return Remembered.of_context(done, context, time.monotonic() - begin, caller)
    result = await box.run_code(language, code, **_options(caller, cwd, env, stdin, timeout_s))
    return Remembered.of(result, caller.limits.output_bytes, caller.outputs, caller.owner)


@tools.add(Scope.EXEC, destroys=True, open_world=True)
async def start_process(
    caller: Caller,
    sandbox: SandboxArg,
    command: Annotated[str, Field(description="A shell command, such as one that starts a server")],
    cwd: CwdArg = None,
    env: EnvArg = None,
    tag: Annotated[str | None, Field(description="A word to know it by in list_processes", max_length=100)] = None,
) -> ProcessStarted:
    """Start a command in the background of a sandbox; it runs until it ends, is stopped, or the sandbox ends. Its last
    1 MiB of output is kept."""
    box = await caller.sandbox(sandbox)
    started = await box.start(command, cwd=cwd, env=env, tag=tag, background=True)
    assert started.number is not None
    return ProcessStarted(process=started.number)


@tools.add(Scope.READ, reads=True, untrusted=True)
async def list_processes(caller: Caller, sandbox: SandboxArg) -> ProcessList:
    """List the background processes of a sandbox, also those that have ended."""
    known = [each for each in await (await caller.sandbox(sandbox)).processes.list() if each.background]
    most = caller.limits.items
    return ProcessList(processes=[Process.of(each) for each in known[-most:]], more=len(known) > most)


@tools.add(Scope.EXEC, reads=True, untrusted=True)
async def read_process_output(
    caller: Caller,
    sandbox: SandboxArg,
    process: ProcessArg,
    cursor: Annotated[
        int | None, Field(description="The cursor of the answer before: only what came after it is given", ge=0)
    ] = None,
    wait_s: Annotated[
        float, Field(description="Wait so many seconds, at most 60, for something new to be said", ge=0, le=_MAX_WAIT_S)
    ] = 0.0,
) -> ProcessOutput:
    """Read what a background process has said: without a cursor the end of it, with one what came since."""
    box = await caller.sandbox(sandbox)
    kept = Kept(box, process)
    try:
        await kept.read(cursor, wait_s)
    finally:
        kept.leave()
    info = await _info(box, process)
    output, missing, end = kept.after(cursor, caller.limits.output_bytes)
    shown = Process.of(info)
    return ProcessOutput(
        process=process,
        output=output.decode(errors="replace"),
        missing=missing,
        cursor=end,
        running=shown.running,
        exit_code=shown.exit_code,
    )


@tools.add(Scope.EXEC, destroys=True, idempotent=True)
async def stop_process(caller: Caller, sandbox: SandboxArg, process: ProcessArg) -> ProcessEnded:
    """End a background process and all that it has started: it gets SIGTERM, and SIGKILL 5 seconds later."""
    box = await caller.sandbox(sandbox)
    await _info(box, process)
    call = (await box.connection.connect()).open("attach", {"process": process}, on_data=lambda fd, data: None)
    try:
        await box.processes.signal(process, signals.SIGTERM, tree=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(_STOP_S):
                return ProcessEnded(process=process, exit_code=(await call.result(Exit)).result().exit_code)
        await box.processes.kill(process)
    finally:
        call.abandon()
    ended = (await box.connection.connect()).open("attach", {"process": process}, on_data=lambda fd, data: None)
    exit = await ended.result(Exit, CONTROL_TIMEOUT_S)
    return ProcessEnded(process=process, exit_code=exit.result().exit_code)


class Kept:
    """What an agent keeps of the output of a background process, and how much there was in all."""

    def __init__(self, box: AsyncSandbox, process: int) -> None:
        self._box = box
        self._process = process
        self._data = bytearray()
        self._count = 0
        self._total = 0
        self._news = asyncio.Event()
        self._call: Any = None

    async def read(self, cursor: int | None, wait_s: float) -> None:
        """Read all that is kept, and wait for more if there is nothing after the cursor. Raises NotFound."""
        client = await self._box.connection.connect()
        await self._measure()
        self._call = client.open("attach", {"process": self._process}, on_data=self._take)
        await self._until_quiet()
        if wait_s and not self._call.done and (self._total if cursor is None else cursor) >= self._total:
            self._news.clear()
            waits = [asyncio.ensure_future(self._news.wait()), asyncio.ensure_future(self._ended())]
            try:
                await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await end(*waits)
            await self._until_quiet()

    async def _ended(self) -> None:
        with suppress(CallTimeout):
            await self._call.result(Exit)

    async def _until_quiet(self) -> None:
        """Until a question that was asked after all that is kept was sent is answered: answers keep their order."""
        for _ in range(_ROUNDS):
            before = self._count, self._total
            await self._measure()
            if before == (self._count, self._total):
                return

    async def _measure(self) -> None:
        self._total = (await _info(self._box, self._process)).output_bytes

    def _take(self, fd: int, data: memoryview) -> None:
        self._count += len(data)
        self._data += data
        del self._data[: max(0, len(self._data) - _MOST_KEPT)]
        self._news.set()

    def after(self, cursor: int | None, limit: int) -> tuple[bytes, int, int]:
        """What came after the cursor, at most its last `limit` bytes; how many of it are missing; and where it ends."""
        end = max(self._total, len(self._data))
        begin = max(0, end - limit) if cursor is None else min(cursor, end)
        wanted = end - begin
        found = bytes(self._data[max(0, len(self._data) - min(wanted, limit)) :]) if wanted else b""
        return found, 0 if cursor is None else wanted - len(found), end

    def leave(self) -> None:
        if self._call is not None:
            self._call.abandon()


async def _info(box: AsyncSandbox, process: int) -> ProcessInfo:
    """A background process. Raises NotFound."""
    for each in await box.processes.list():
        if each.process == process and each.background:
            return each
    raise NotFound(f"there is no background process {process}: see list_processes")


def _options(
    caller: Caller, cwd: str | None, env: dict[str, str] | None, stdin: str | None, timeout_s: float | None
) -> ExecOptions:
    options: ExecOptions = {
        "cwd": cwd,
        "env": env,
        "stdin": stdin,
        "timeout_s": caller.time(timeout_s),
        "limit": max(MAX_OUTPUT, caller.limits.output_bytes),
    }
    if caller.progress.is_heard:
        options["on_stdout"] = options["on_stderr"] = caller.progress.output
    return options


def _execution(caller: Caller, result: ExecResult) -> Execution:
    return Execution.of(result, caller.limits.output_bytes, caller.outputs, caller.owner)
