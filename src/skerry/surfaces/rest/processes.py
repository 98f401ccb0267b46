"""Background processes: they live on when nobody listens, and whoever knows their number can listen again."""

from __future__ import annotations

import asyncio
import signal as signals
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from skerry.aio import end
from skerry.errors import CallTimeout, InvalidSpec, NotFound, SkerryError, WrongState
from skerry.model.results import ProcessInfo
from skerry.model.tenants import Scope
from skerry.sandbox.processes import AsyncProcess
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.rest.execution import Timeout, spoken
from skerry.surfaces.rest.route import BYTES, EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import STALLED_S, Upload, closing, comment, send_events
from skerry.surfaces.rest.views import Page

routes = Routes("processes")

Lines = Annotated[int, msgspec.Meta(ge=1, le=4096)]
"""Rows or columns of a terminal."""
_MOST_SIGNAL = 64


class Size(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size of a terminal."""

    rows: Lines = 24
    cols: Lines = 80


class StartProcess(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command to run in the background: a list is a program with its arguments, a string is for the shell."""

    command: tuple[str, ...] | str
    cwd: str | None = None
    env: dict[str, str] = {}
    user: str | None = None
    pty: Size | None = None
    """Run it on a terminal of this size."""
    stdin: bool = False
    """It will be given input; without, it has none. One on a terminal always can be."""
    timeout_s: Timeout | None = None
    tag: Annotated[str, msgspec.Meta(max_length=256)] | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise InvalidSpec("command: it names no program", field="command")


class Started(msgspec.Struct, frozen=True, kw_only=True):
    process: int
    """Its number in this sandbox."""


class SendSignal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    signal: int | str
    """Its number, or its name: TERM or SIGTERM."""
    tree: bool = False
    """Send it to everything that the process has started, and not to its group alone."""


class StdinQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    close: bool = False
    """No more comes after this; on a terminal that types Ctrl-D."""


@routes.get("/sandboxes/{id}/processes", Scope.READ)
async def list(call: Call, id: str) -> Page[ProcessInfo]:
    """Processes that were started in it and run, and background ones that have ended."""
    return Page(await (await call.sandbox(id)).processes.list())


@routes.post("/sandboxes/{id}/processes", Scope.EXEC, status=201)
async def start(call: Call, id: str, body: StartProcess) -> Started:
    """Start a command in the background. It lives on when nobody listens, until it ends or its sandbox does."""
    sandbox = await call.sandbox(id)
    if body.pty is not None:
        process = await sandbox.pty(
            body.command,
            rows=body.pty.rows,
            cols=body.pty.cols,
            cwd=body.cwd,
            env=body.env,
            user=body.user,
            timeout_s=body.timeout_s,
            background=True,
            tag=body.tag,
        )
    else:
        process = await sandbox.start(
            body.command,
            cwd=body.cwd,
            env=body.env,
            user=body.user,
            stdin=body.stdin,
            timeout_s=body.timeout_s,
            background=True,
            tag=body.tag,
        )
    assert process.number is not None
    return Started(process=process.number)


@routes.get("/sandboxes/{id}/processes/{process}/output", Scope.EXEC, content_type=EVENTS)
async def output(call: Call, id: str, process: int) -> Streamed:
    """What a process said last, 1 MiB at most, then what it says, then its end: events `stdout`, `stderr` and `exit`.
    It does not notice when the client goes away; while the client does not read, it is held up."""
    sandbox = await call.sandbox(id)
    await known(sandbox, process)

    async def pieces() -> AsyncIterator[bytes]:
        async with await sandbox.processes.attach(process) as attached:
            yield comment("attached")
            async with closing(spoken(attached)) as said:
                async for piece in said:
                    yield piece

    return await send_events(call, pieces())


@routes.post("/sandboxes/{id}/processes/{process}/stdin", Scope.EXEC, status=204, takes=BYTES)
async def write(call: Call, id: str, process: int, query: StdinQuery) -> None:
    """Give a process the body as input, as fast as it takes it. If the client goes away before its end, what came until
    then is given."""
    sandbox = await call.sandbox(id)
    if not (await known(sandbox, process)).running:
        raise WrongState(f"process {process} has ended")
    async with await sandbox.processes.attach(process) as attached:
        hearing = asyncio.create_task(_ignore(attached))
        try:
            upload = Upload(call)
            while piece := await upload.read(0):
                await _type(attached, piece)
            if query.close:
                await attached.close_stdin()
            await sandbox.ping()  # the agent takes what is sent in its order, so that now it has all of it
        finally:
            await end(hearing)


@routes.post("/sandboxes/{id}/processes/{process}/signal", Scope.EXEC, status=204)
async def signal(call: Call, id: str, process: int, body: SendSignal) -> None:
    """Send a process a signal."""
    number = signal_of(body.signal)
    await (await call.sandbox(id)).processes.signal(process, number, tree=body.tree)


@routes.post("/sandboxes/{id}/processes/{process}/resize", Scope.EXEC, status=204)
async def resize(call: Call, id: str, process: int, body: Size) -> None:
    """Change the size of a process's terminal."""
    attached = await (await call.sandbox(id)).processes.attach(process)
    await attached.resize(body.rows, body.cols)


async def known(sandbox: AsyncSandbox, number: int) -> ProcessInfo:
    """A background process. Raises NotFound."""
    for info in await sandbox.processes.list():
        if info.process == number and info.background:
            return info
    raise NotFound(f"sandbox {sandbox.id} has no background process {number}")


def signal_of(named: int | str) -> int:
    """The number of a signal. Raises InvalidSpec."""
    if isinstance(named, str):
        name = named.upper()
        number = getattr(signals.Signals, name if name.startswith("SIG") else f"SIG{name}", None)
        if number is None:
            raise InvalidSpec("signal: no signal is called that", field="signal")
        return int(number)
    if not 1 <= named <= _MOST_SIGNAL:
        raise InvalidSpec(f"signal: it is 1 to {_MOST_SIGNAL}", field="signal")
    return named


async def _type(process: AsyncProcess, data: bytes) -> None:
    try:
        async with asyncio.timeout(STALLED_S):
            await process.write(data)
    except TimeoutError:
        raise CallTimeout(f"the process read nothing of its input for {STALLED_S:g} s") from None


async def _ignore(process: AsyncProcess) -> None:
    """Take what it says, so that it is not held up."""
    try:
        async for _ in process:
            pass
    except SkerryError:
        return  # whoever writes to it is told
