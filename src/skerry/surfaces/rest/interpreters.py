"""Interpreters that remember: code in them to its end at once, or as it speaks. It ends if its client goes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec

from skerry.model.executions import CodeError, ExecutionEvent, InterpreterInfo
from skerry.model.tenants import Scope
from skerry.sandbox.interpreter import AsyncInterpreter
from skerry.surfaces.rest.execution import MAX_LIMIT, Timeout
from skerry.surfaces.rest.route import EVENTS, Call, Routes, Streamed
from skerry.surfaces.rest.streams import closing, comment, frame, send_events
from skerry.surfaces.rest.views import Page

routes = Routes("interpreters")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
_LIMIT = 4 << 20


class OpenInterpreter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which interpreter is wanted."""

    language: Name = "python"
    name: Name | None = None
    """Letters, digits, dots, dashes and underscores; without one it is that which everybody shares who wants the
    language."""
    cwd: str | None = None
    env: dict[str, str] = {}
    engine: Literal["auto", "builtin", "jupyter"] = "auto"
    """`auto` is Jupyter where the image has it, else one of skerry's own."""


class RunInInterpreter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Code, and how it runs."""

    code: str
    env: dict[str, str] = {}
    """Variables that are set meanwhile."""
    timeout_s: Timeout | None = None
    """Seconds until it is interrupted; 0 is never, and if nothing is said it is as the sandbox's spec says."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_LIMIT)] = _LIMIT
    """The most letters of each output that are kept."""

    def options(self) -> dict[str, Any]:
        return {"env": self.env, "timeout_s": self.timeout_s, "limit": self.limit}


class RichView(msgspec.Struct, frozen=True, kw_only=True):
    """A value that was shown, in all the forms that it has."""

    data: dict[str, Any]
    """By media type; pictures are in base64."""
    metadata: dict[str, Any]
    is_result: bool
    """It is the value of the last expression; all else was displayed on the way."""


class ExecutionView(msgspec.Struct, frozen=True, kw_only=True):
    """End of code in an interpreter. Code that fails, is interrupted or takes too long is an answer as any other."""

    stdout: str
    stderr: str
    results: list[RichView]
    error: CodeError | None
    execution_count: int
    truncated: bool
    """More was written or shown than was kept."""
    timed_out: bool
    interrupted: bool


@routes.get("/sandboxes/{id}/interpreters", Scope.READ)
async def list_all(call: Call, id: str) -> Page[InterpreterInfo]:
    """Interpreters that live in it."""
    return Page(await (await call.sandbox(id)).interpreters.list())


@routes.post("/sandboxes/{id}/interpreters", Scope.EXEC)
async def open(call: Call, id: str, body: OpenInterpreter) -> InterpreterInfo:
    """The interpreter of that name, which is made if there is none. It remembers what is run in it, whoever runs it."""
    sandbox = await call.sandbox(id)
    opened = await sandbox.interpreter(
        body.language, name=body.name, cwd=body.cwd, env=body.env, engine=body.engine
    )  # fmt: skip
    return InterpreterInfo(name=opened.name, language=opened.language, engine=opened.engine, cwd=opened.cwd)


@routes.post("/sandboxes/{id}/interpreters/{name}/run", Scope.EXEC)
async def run_in(call: Call, id: str, name: str, body: RunInInterpreter) -> ExecutionView:
    """Run code to its end. If the client goes away meanwhile, it is interrupted."""
    done = await (await _find(call, id, name)).run(body.code, **body.options())
    return msgspec.convert(done, ExecutionView, from_attributes=True)


@routes.post("/sandboxes/{id}/interpreters/{name}/stream", Scope.EXEC, content_type=EVENTS)
async def stream_in(call: Call, id: str, name: str, body: RunInInterpreter) -> Streamed:
    """Run code, and tell what happens as it happens: events `started`, `stdout`, `stderr`, `display`, `result` and
    `error`, then `end`. It is held up while the client does not read, and interrupted if the client goes away."""
    found = await _find(call, id, name)
    return await send_events(call, _speaking(found.stream(body.code, **body.options())), lasting=False)


async def _speaking(events: AsyncIterator[ExecutionEvent]) -> AsyncIterator[bytes]:
    yield comment("begun")
    async with closing(events) as happening:
        async for event in happening:
            yield frame(event.type.value, event)


@routes.post("/sandboxes/{id}/interpreters/{name}/interrupt", Scope.EXEC)
async def interrupt(call: Call, id: str, name: str) -> None:
    """Interrupt what runs, as Ctrl-C does."""
    await (await _find(call, id, name)).interrupt()


@routes.post("/sandboxes/{id}/interpreters/{name}/restart", Scope.EXEC)
async def restart(call: Call, id: str, name: str) -> None:
    """Start it anew, with nothing that it knew."""
    await (await _find(call, id, name)).restart()


@routes.delete("/sandboxes/{id}/interpreters/{name}", Scope.EXEC)
async def close(call: Call, id: str, name: str) -> None:
    """End it, with all that it knows and has started."""
    await (await _find(call, id, name)).close()


async def _find(call: Call, id: str, name: str) -> AsyncInterpreter:
    return await (await call.sandbox(id)).interpreters.get(name)
