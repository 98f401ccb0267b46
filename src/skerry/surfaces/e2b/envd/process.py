"""Calls about processes, `process.Process` of E2B's wire."""

from __future__ import annotations

import asyncio
import base64
import binascii
import signal as signals
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute

from skerry.agent.call import Call
from skerry.errors import FileError, InvalidSpec, PathNotFound
from skerry.model.results import ExecResult
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.users import find_process, processes
from skerry.surfaces.e2b.envd.codes import RpcError
from skerry.surfaces.e2b.envd.connect import client_stream, server_stream, timeout_of, unary
from skerry.surfaces.e2b.envd.context import account_of, envd_of, named_user, resolve

_PIECE = 1 << 16
_KEEP_ALIVE: dict[str, Any] = {"event": {"keepalive": {}}}
_TAKEN_S = 120.0
"""Seconds that a process may take nothing of what is written to it."""
_SIGNALS: dict[str | int, int] = {
    "SIGNAL_SIGTERM": signals.SIGTERM, "SIGNAL_SIGKILL": signals.SIGKILL, 15: signals.SIGTERM, 9: signals.SIGKILL,
}  # fmt: skip


class Size(msgspec.Struct):
    cols: int = 80
    rows: int = 24


class Pty(msgspec.Struct):
    size: Size | None = None

    def rows_and_cols(self) -> tuple[int, int]:
        size = self.size or Size()
        return size.rows or 24, size.cols or 80


class Config(msgspec.Struct):
    cmd: str = ""
    args: list[str] = []
    envs: dict[str, str] = {}
    cwd: str | None = None


class Selector(msgspec.Struct):
    pid: int | str | None = None
    tag: str | None = None

    async def find(self, request: Request, *, ended: bool = False) -> AsyncProcess:
        """The process that is meant. Raises NotFound, and RpcError."""
        sandbox = envd_of(request).sandbox
        if self.tag is not None:
            return await find_process(sandbox, tag=self.tag, ended=ended)
        text = str(self.pid)
        if not (text.isascii() and text.isdecimal()):
            raise RpcError("invalid_argument", "process: give a pid, or a tag")
        return await find_process(sandbox, pid=int(text[:10]), ended=ended)


class Input(msgspec.Struct):
    stdin: str | None = None
    pty: str | None = None

    @property
    def data(self) -> bytes:
        text = self.stdin if self.stdin is not None else self.pty
        if text is None:
            raise RpcError("unimplemented", "invalid input type")
        try:
            padded = text.replace("-", "+").replace("_", "/").rstrip("=")
            return base64.b64decode(padded + "=" * (-len(padded) % 4), validate=True)
        except (binascii.Error, ValueError):
            raise RpcError("invalid_argument", "input: it is not base64") from None


class StartRequest(msgspec.Struct):
    process: Config | None = None
    pty: Pty | None = None
    tag: str | None = None
    stdin: bool | None = None


class ProcessRequest(msgspec.Struct):
    process: Selector = msgspec.field(default_factory=Selector)


class UpdateRequest(ProcessRequest):
    pty: Pty | None = None


class InputRequest(ProcessRequest):
    input: Input = msgspec.field(default_factory=Input)


class SignalRequest(ProcessRequest):
    signal: str | int = 0


class ListRequest(msgspec.Struct): ...


class _DataEvent(msgspec.Struct):
    input: Input = msgspec.field(default_factory=Input)


class StreamInputRequest(msgspec.Struct):
    start: ProcessRequest | None = None
    data: _DataEvent | None = None
    keepalive: dict[str, Any] | None = None


def routes() -> list[BaseRoute]:
    place = "/process.Process/"
    return [
        server_stream(place + "Start", StartRequest, start, keep_alive=_KEEP_ALIVE, is_timed=False),
        server_stream(place + "Connect", ProcessRequest, connect, keep_alive=_KEEP_ALIVE),
        unary(place + "List", ListRequest, list_processes),
        unary(place + "SendInput", InputRequest, send_input),
        client_stream(place + "StreamInput", StreamInputRequest, stream_input),
        unary(place + "CloseStdin", ProcessRequest, close_stdin),
        unary(place + "SendSignal", SignalRequest, send_signal),
        unary(place + "Update", UpdateRequest, update),
    ]


async def start(request: Request, message: StartRequest) -> AsyncIterator[dict[str, Any]]:
    """Start a process, and tell what becomes of it. It lives on when the client goes, but not beyond its time."""
    config = message.process or Config()
    if not config.cmd:
        raise RpcError("invalid_argument", "process: it names no command")
    account = await account_of(request, named_user(request))
    cwd = resolve(config.cwd or "", account.user.home)
    try:
        process = await account.start(
            [config.cmd, *config.args],
            cwd=cwd,
            env={**envd_of(request).envs, **config.envs},
            stdin=message.stdin is not False,
            pty=None if message.pty is None else message.pty.rows_and_cols(),
            timeout_s=timeout_of(request),
            tag=message.tag,
        )
    except PathNotFound:
        raise RpcError("invalid_argument", f"cwd '{cwd}' does not exist") from None
    except FileError as error:
        raise RpcError("invalid_argument", f"cwd '{cwd}' cannot be entered: {error}") from None
    async for event in _events(request, process, is_terminal=message.pty is not None):
        yield event


async def connect(request: Request, message: ProcessRequest) -> AsyncIterator[dict[str, Any]]:
    """Tell what becomes of a process from now on; of one that has just ended, how."""
    process = await message.process.find(request, ended=True)
    info = next((each for each in await processes(envd_of(request).sandbox) if each.process == process.number), None)
    async for event in _events(request, process, is_terminal=info is not None and info.pty):
        yield event


async def _events(request: Request, process: AsyncProcess, *, is_terminal: bool) -> AsyncIterator[dict[str, Any]]:
    names = {1: "pty"} if is_terminal else {1: "stdout", 2: "stderr"}
    async with process:
        yield {"event": {"start": {"pid": process.pid}}}
        async for fd, data in process:
            for at in range(0, len(data), _PIECE):
                text = base64.b64encode(data[at : at + _PIECE]).decode()
                yield {"event": {"data": {names.get(fd, "stderr"): text}}}
        result = await process.wait()
    if result.timed_out:
        raise RpcError("deadline_exceeded", "the process ran longer than its timeout, and was killed")
    if result.signal == signals.SIGKILL:
        await envd_of(request).sandbox.ping()  # raises if it was the whole sandbox that was killed
    yield {"event": {"end": _end(result)}}


def _end(result: ExecResult) -> dict[str, Any]:
    """The end of a process in the words of Go's `os.ProcessState`."""
    if result.signal is not None:
        status = f"signal: {(signals.strsignal(result.signal) or str(result.signal)).lower()}"
        return {"exitCode": -1, "exited": False, "status": status, "error": status}
    status = f"exit status {result.exit_code}"
    failed = {"error": status} if result.exit_code else {}
    return {"exitCode": result.exit_code, "exited": True, "status": status, **failed}


async def list_processes(request: Request, _message: ListRequest) -> dict[str, Any]:
    """Processes that run."""
    found = []
    for each in await processes(envd_of(request).sandbox):
        if not (each.running and each.background):
            continue
        cmd, *args = each.argv or [""]
        config = {"cmd": cmd, "args": args, "envs": each.env, "cwd": each.cwd}
        found.append({"config": config, "pid": each.pid, **({} if each.tag is None else {"tag": each.tag})})
    return {"processes": found}


async def send_input(request: Request, message: InputRequest) -> dict[str, Any]:
    """Write to a process, or type on its terminal; the answer comes when it has taken all."""
    process = await message.process.find(request)
    data = message.input.data
    try:
        async with process.input(terminal=message.input.stdin is None) as call:
            await call.send(data)
    except InvalidSpec as error:
        raise RpcError("failed_precondition", f"error writing to stdin: {error}") from None
    return {}


async def stream_input(request: Request, messages: AsyncIterator[StreamInputRequest]) -> dict[str, Any]:
    """Write to a process what comes, in its order, for as long as the client likes."""
    process: AsyncProcess | None = None
    call: Call | None = None
    try:
        async with AsyncExitStack() as stack:
            async for message in messages:
                if message.start is not None and process is None:
                    process = await message.start.process.find(request)
                elif message.data is not None:
                    if process is None:
                        raise RpcError("invalid_argument", "the first message names a process")
                    if call is None:
                        is_terminal = message.data.input.stdin is None
                        call = await stack.enter_async_context(process.input(terminal=is_terminal))
                    async with asyncio.timeout(_TAKEN_S):
                        await call.send(message.data.input.data)
                elif message.keepalive is None:
                    raise RpcError("unimplemented", "invalid event type")
    except TimeoutError:
        raise RpcError("deadline_exceeded", f"the process took nothing for {_TAKEN_S:g} s") from None
    except InvalidSpec as error:
        raise RpcError("failed_precondition", f"error writing to stdin: {error}") from None
    return {}


async def close_stdin(request: Request, message: ProcessRequest) -> dict[str, Any]:
    """Let a process have no more input. One on a terminal is typed Ctrl-D instead."""
    process = await message.process.find(request)
    try:
        async with process.input(close=True, terminal=False):
            pass
    except InvalidSpec:
        message_text = "cannot close stdin for PTY process: send Ctrl+D (0x04) instead"
        raise RpcError("failed_precondition", message_text) from None
    return {}


async def send_signal(request: Request, message: SignalRequest) -> dict[str, Any]:
    """Signal a process, and nothing that it started; a killed one is no more when this is answered."""
    number = _SIGNALS.get(message.signal)
    process = await message.process.find(request)
    if number is None:
        raise RpcError("unimplemented", "invalid signal: SIGNAL_SIGTERM and SIGNAL_SIGKILL are known")
    await process.signal(number, alone=True, wait=number == signals.SIGKILL)
    return {}


async def update(request: Request, message: UpdateRequest) -> dict[str, Any]:
    """Change the size of a process's terminal."""
    process = await message.process.find(request)
    if message.pty is not None:
        await process.resize(*message.pty.rows_and_cols())
    return {}
