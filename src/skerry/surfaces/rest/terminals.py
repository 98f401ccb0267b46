"""Terminals over WebSockets. Binary frames are what is typed and what is shown; text frames are JSON about it:

    client: {"type": "resize", "rows": 40, "cols": 120}      {"type": "signal", "signal": "HUP"}
    server: {"type": "process", "process": 3}, first         {"type": "exit", "exit_code": 0, ...}, last
            {"type": "error", "problem": {...}}, last, in the place of the exit

A terminal is a background process: when the connection is lost, `?process=3` shows its last output and goes on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from skerry.aio import end
from skerry.errors import InvalidSpec, SkerryError, Unsupported
from skerry.model.tenants import Scope
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.rest.output import ExitView
from skerry.surfaces.rest.problems import problem_of
from skerry.surfaces.rest.processes import Lines, known, signal_of
from skerry.surfaces.rest.route import Call, Routes, accept
from skerry.surfaces.rest.streams import STALLED_S

routes = Routes("terminals")

_GOING = 1012
"""Code of a connection that ends with the server: connect again."""
_STALLED = 1013
_TERM = "xterm-256color"
_encode = msgspec.json.Encoder(enc_hook=str).encode


class TerminalQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs on it."""

    process: int | None = None
    """Number of a terminal that runs already."""
    rows: Lines | None = None
    cols: Lines | None = None
    command: tuple[str, ...] = ()
    """Once, it is for the shell; several times, a program and its arguments; without it the box's shell runs."""
    user: str | None = None
    cwd: str | None = None
    term: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9.+-]{1,64}$")] = _TERM
    """Kind of terminal that the client is: TERM."""
    keep: bool = True
    """Let it live on when the connection ends."""


class _Resize(msgspec.Struct, frozen=True, tag="resize", forbid_unknown_fields=True):
    rows: Lines
    cols: Lines


class _Signal(msgspec.Struct, frozen=True, tag="signal", forbid_unknown_fields=True):
    signal: int | str
    tree: bool = False


class _Process(msgspec.Struct, frozen=True):
    process: int | None
    """Null if it cannot be attached to again."""
    type: Literal["process"] = "process"


_decode = msgspec.json.Decoder(_Resize | _Signal).decode


@routes.websocket("/sandboxes/{id}/terminal", Scope.EXEC)
async def terminal(call: Call, socket: WebSocket, id: str, query: TerminalQuery) -> None:
    """Type on a terminal and see what it shows."""
    sandbox = await call.sandbox(id)
    async with await _open(sandbox, query) as process:
        await accept(socket)
        await _tell(socket, _Process(process.number))
        work = {
            asyncio.create_task(_show(socket, process), name="show"),
            asyncio.create_task(_type(socket, process), name="type"),
            asyncio.create_task(call.server.is_draining.wait(), name="drain"),
        }
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end(*work)
        with suppress(WebSocketDisconnect):  # it went away just now
            await _end(call, socket, {task.get_name(): task.exception() for task in done})


async def _end(call: Call, socket: WebSocket, ended: dict[str, BaseException | None]) -> None:
    """Tell why it is over, to a client that is still there."""
    error = next((each for each in ended.values() if each is not None), None)
    if isinstance(error, WebSocketDisconnect):
        return
    if isinstance(error, TimeoutError):
        await socket.close(_STALLED, "it stands still: the process reads nothing of what is typed")
    elif isinstance(error, SkerryError):
        await _tell(socket, {"type": "error", "problem": problem_of(error, call.id)})
        raise error  # which ends the connection with its code
    elif error is not None:
        raise error
    else:
        await socket.close(1000 if "show" in ended else _GOING)


async def _open(sandbox: AsyncSandbox, query: TerminalQuery) -> AsyncProcess:
    """The terminal that is meant, of the size that is meant. Raises NotFound or InvalidSpec."""
    if query.process is not None:
        if query.command or query.user or query.cwd:
            raise InvalidSpec("process: it runs already: neither a command nor a user or a folder is for it")
        info = await known(sandbox, query.process)
        if not info.pty:
            raise InvalidSpec(f"process: {query.process} has no terminal", field="process")
        process = await sandbox.processes.attach(query.process)
        if query.rows and query.cols and info.running:
            await process.resize(query.rows, query.cols)
        return process
    if not query.keep:
        return await _start(sandbox, query, background=False)
    try:
        return await _start(sandbox, query, background=True)
    except Unsupported:  # of another user it may be that it only lives as long as its stream
        return await _start(sandbox, query, background=False)


async def _start(sandbox: AsyncSandbox, query: TerminalQuery, *, background: bool) -> AsyncProcess:
    command = query.command[0] if len(query.command) == 1 else query.command
    return await sandbox.pty(
        command or None,
        rows=query.rows or 24,
        cols=query.cols or 80,
        cwd=query.cwd,
        env={"TERM": query.term},
        user=query.user,
        background=background,
    )


async def _show(socket: WebSocket, process: AsyncProcess) -> None:
    """Pass on what the terminal shows, as fast as it is taken, and then how it ended."""
    async for _, data in process:
        await socket.send_bytes(data)
    exit = ExitView.of(await process.wait())
    await _tell(socket, {"type": "exit", **msgspec.to_builtins(exit)})


async def _type(socket: WebSocket, process: AsyncProcess) -> None:
    """Pass on what is typed, as fast as it is read, until the client goes away. Raises WebSocketDisconnect."""
    while True:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1006))
        if message.get("bytes") is not None:
            async with asyncio.timeout(STALLED_S):
                await process.write(message["bytes"])
        else:
            await _control(process, message["text"])


async def _control(process: AsyncProcess, text: str) -> None:
    try:
        wish = _decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidSpec(f"that is no message to a terminal: {error}") from None
    if isinstance(wish, _Resize):
        await process.resize(wish.rows, wish.cols)
    else:
        await process.signal(signal_of(wish.signal), tree=wish.tree)


async def _tell(socket: WebSocket, message: object) -> None:
    await socket.send_text(_encode(message).decode())
