"""Commands and code that a client waits for: to their end at once, or as they speak. They end if it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated

import msgspec

from skerry.aio import end
from skerry.errors import InvalidSpec, SkerryError
from skerry.ledger.facts import Command
from skerry.model.tenants import Scope
from skerry.sandbox.processes import AsyncProcess, ExecOptions, command_params
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.rest.output import ExecView, ExitView, Output
from skerry.surfaces.rest.route import EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import closing, comment, frame, send_events

routes = Routes("exec")

Timeout = Annotated[float, msgspec.Meta(ge=0, le=86400 * 366)]
MAX_LIMIT = 16 << 20
_LIMIT = 4 << 20


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a command runs."""

    cwd: str | None = None
    env: dict[str, str] = {}
    """Variables beside those that it has anyway."""
    user: str | None = None
    stdin: str | None = None
    stdin_base64: bytes | None = None
    """The same, for what is no text."""
    timeout_s: Timeout | None = None
    """Seconds until it is killed; 0 is never, and if nothing is said it is as the sandbox's spec says."""
    limit: Annotated[int, msgspec.Meta(ge=0, le=MAX_LIMIT)] | None = None
    """The most bytes of each output that are kept, its beginning and its end: 4 MiB if nothing is said. Streamed, the
    most that are sent: any number if nothing is said."""
    combined: bool = False
    """Let both outputs be one, `stdout`, in the order in which they are written."""

    def __post_init__(self) -> None:
        if self.stdin is not None and self.stdin_base64 is not None:
            raise InvalidSpec("stdin: give it as text or as base64, not both", field="stdin")

    @property
    def input(self) -> bytes | None:
        return self.stdin_base64 if self.stdin is None else self.stdin.encode()

    def options(self) -> ExecOptions:
        return {
            "cwd": self.cwd,
            "env": self.env,
            "user": self.user,
            "stdin": self.input,
            "timeout_s": self.timeout_s,
            "limit": _LIMIT if self.limit is None else self.limit,
            "combined": self.combined,
        }


class ExecCommand(CommandOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command: a list is a program with its arguments, a string is for the shell."""

    command: tuple[str, ...] | str


class RunCode(CommandOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code in a language; without one, in that of the sandbox's spec."""

    code: str
    language: str | None = None


@routes.post("/sandboxes/{id}/exec", Scope.EXEC)
async def run(call: Call, id: str, body: ExecCommand) -> ExecView:
    """Run a command to its end. One that fails, is missing or takes too long is an answer as any other. If the client
    goes away meanwhile, it is killed."""
    sandbox = await call.sandbox(id)
    return ExecView.of(await sandbox.exec(body.command, **body.options()))


@routes.post("/sandboxes/{id}/exec/stream", Scope.EXEC, content_type=EVENTS)
async def stream(call: Call, id: str, body: ExecCommand) -> Streamed:
    """Run a command, and tell what it says as it says it: events `stdout` and `stderr`, then `exit`. It is held up
    while the client does not read, and killed if the client goes away."""
    sandbox = await call.sandbox(id)
    return await send_events(call, speaking(call, sandbox, body, body.command), lasting=False)


@routes.post("/sandboxes/{id}/code", Scope.EXEC)
async def run_code(call: Call, id: str, body: RunCode) -> ExecView:
    """Run code to its end, as a command."""
    sandbox = await call.sandbox(id)
    return ExecView.of(await sandbox.run_code(body.language, body.code, **body.options()))


@routes.post("/sandboxes/{id}/code/stream", Scope.EXEC, content_type=EVENTS)
async def stream_code(call: Call, id: str, body: RunCode) -> Streamed:
    """Run code, and tell what it says as it says it."""
    sandbox = await call.sandbox(id)
    if body.language is None and sandbox.spec.language is None:
        raise InvalidSpec("language: none was given, and the spec has none", field="language")
    return await send_events(call, speaking(call, sandbox, body, None), lasting=False)


async def speaking(
    call: Call, sandbox: AsyncSandbox, body: ExecCommand | RunCode, command: tuple[str, ...] | str | None, **tags: str
) -> AsyncIterator[bytes]:
    """What a command says, as events; `tags` are in the data of each. It is killed if this is closed before its end."""
    process = await _begin(call, sandbox, body, command)
    typing = asyncio.create_task(_type(process, body.input))
    try:
        yield comment("begun")
        async with closing(spoken(process, **tags)) as said:
            async for piece in said:
                yield piece
    finally:
        await process.detach()  # it dies of that, if it has not ended
        await end(typing)


async def _begin(
    call: Call, sandbox: AsyncSandbox, body: ExecCommand | RunCode, command: tuple[str, ...] | str | None
) -> AsyncProcess:
    """Start it in the foreground: it dies with whoever listens."""
    connect, user = sandbox.connection.of_user(body.user, sandbox.spec.user)
    timeout_s = sandbox.spec.timeout_s if body.timeout_s is None else body.timeout_s
    params = command_params(command, cwd=body.cwd, env=body.env, user=user, timeout_s=timeout_s)
    params |= {"stdin": body.input is not None, "combined": body.combined}
    if body.limit is not None:
        params["limit"] = body.limit
    method, how, code = "exec", "exec", b""
    if isinstance(body, RunCode):
        method, how, code = "exec_code", "code", body.code.encode()
        params["language"] = body.language or sandbox.spec.language
    ledger, options = call.manager.handles.ledger, params | {"user": body.user}
    told = Command.begin(ledger, sandbox.id, how, command, options, size=len(code))
    return await AsyncProcess.start(connect, method, params, code, told=told)


async def _type(process: AsyncProcess, input: bytes | None) -> None:
    """Give it its input while it speaks: if it is not heard meanwhile, both may wait for each other."""
    if input is not None:
        with suppress(SkerryError):  # of which its output tells as well
            await process.write(input)
            await process.close_stdin()


async def spoken(process: AsyncProcess, **tags: str) -> AsyncIterator[bytes]:
    """What a process says, and its end, as events; `tags` are in the data of each."""
    output = Output(**tags)
    async with closing(aiter(process)) as said:
        async for fd, data in said:
            for piece in output.add(fd, data):
                yield piece
    for piece in output.end():
        yield piece
    yield frame("exit", {**tags, **msgspec.structs.asdict(ExitView.of(await process.wait()))})
