"""E2B's code interpreter, which its SDK reaches at port 49999 of a sandbox: contexts, and code in them."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from typing import Annotated, Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from skerry.aio import end
from skerry.errors import AgentUnreachable, CallInterrupted, InterpreterDied, InterpreterNotFound, NotFound, SkerryError
from skerry.model.executions import EventType, ExecutionEvent, InterpreterInfo, Rich
from skerry.sandbox.interpreter import AsyncInterpreter
from skerry.sandbox.sandbox import AsyncSandbox
from skerry.surfaces.e2b.answers import kind_headers

KEEP_ALIVE_S = 5.0
_FIRST_S = 1.0
_GONE_S = 5.0
_MAX_BODY = 16 << 20
_ALIASES = {"js": "javascript", "ts": "typescript"}
_DEFAULTS = ("python", "javascript")
"""Languages of the contexts that there are from the beginning, as far as the box has them."""
_FORMS = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "latex": "text/latex",
    "json": "application/json",
    "javascript": "application/javascript",
    "data": "e2b/data",
    "chart": "e2b/chart",
}
Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Interpreted(Protocol):
    """The sandbox of a request, as whoever routes it gives it in `scope["skerry.e2b"]`."""

    @property
    def sandbox(self) -> AsyncSandbox: ...

    @property
    def envs(self) -> dict[str, str]: ...

    @property
    def access_token(self) -> str | None: ...


class _Execute(msgspec.Struct):
    code: str
    context_id: Text | None = None
    language: Text | None = None
    env_vars: dict[str, str] | None = None


class _Create(msgspec.Struct):
    cwd: Text | None = None
    language: Text | None = None


def routes() -> list[Route]:
    """The calls, for an application of their own. Whoever routes to it does not ask for a token: the SDK sends it with
    code alone, and there it is looked at here."""
    return [
        Route("/health", _health, methods=["GET"]),
        Route("/execute", _execute, methods=["POST"]),
        Route("/contexts", _create, methods=["POST"]),
        Route("/contexts", _list, methods=["GET"]),
        Route("/contexts/{id}", _remove, methods=["DELETE"]),
        Route("/contexts/{id}/restart", _restart, methods=["POST"]),
    ]


def _of(request: Request) -> Interpreted:
    found: Interpreted = request.scope["skerry.e2b"]
    return found


async def _health(_request: Request) -> Response:
    return Response(b'"OK"', media_type="application/json")


async def _body(request: Request, kind: type[Any]) -> Any:
    """The JSON of a request. Raises ValueError."""
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > _MAX_BODY:
            raise ValueError(f"the body is longer than {_MAX_BODY >> 20} MiB")
    return msgspec.json.decode(bytes(content), type=kind)


def _refused(error: SkerryError) -> Response:
    """The answer that the SDK makes the right exception of. Its text is shown as it is, so a header has the kind."""
    status = 502 if error.infrastructure else 404 if isinstance(error, NotFound) else 500
    return PlainTextResponse(error.message, status, kind_headers(error))


async def _execute(request: Request) -> Response:
    box = _of(request)
    given = request.headers.get("x-access-token", "")
    if box.access_token is not None and not hmac.compare_digest(given.encode(), box.access_token.encode()):
        return PlainTextResponse("the access token is not valid", 401)
    try:
        asked = await _body(request, _Execute)
    except (ValueError, RecursionError) as error:
        return PlainTextResponse(str(error), 400)
    if asked.context_id and asked.language:
        return PlainTextResponse("Only one of context_id or language can be provided", 400)
    try:
        lines = _lines(box.sandbox, asked, {**box.envs, **(asked.env_vars or {})})
        first = await anext(lines)
    except SkerryError as error:
        return _refused(error)
    return StreamingResponse(_resumed(first, lines), media_type="application/json")


def _language(name: str | None) -> str:
    name = (name or "python").lower().strip()
    return _ALIASES.get(name, name)


async def _resumed(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for line in rest:
            yield line


async def _lines(sandbox: AsyncSandbox, asked: _Execute, env: Mapping[str, str]) -> AsyncGenerator[bytes]:
    """What happens, a line for each; and now and then one that says that we are there, for the first time soon, so that
    a client knows a request that is served from one that waits. If the client goes, the code is interrupted; if it ends
    its interpreter, there is a new one."""
    events: asyncio.Queue[ExecutionEvent | BaseException | None] = asyncio.Queue(64)
    work = asyncio.create_task(_run(sandbox, asked, env, events))
    patience_s = _FIRST_S
    try:
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    event = await events.get()
            except TimeoutError:
                patience_s = KEEP_ALIVE_S
                yield _line("keepalive")
                continue
            is_first = patience_s == _FIRST_S
            patience_s = KEEP_ALIVE_S
            if event is None:
                return
            if isinstance(event, InterpreterDied) or (isinstance(event, InterpreterNotFound) and not is_first):
                yield _line("error", name="UnexpectedEndOfExecution", value=event.message, traceback="")
                yield _line("end_of_execution")
                return
            if isinstance(event, BaseException):
                if not is_first and isinstance(event, AgentUnreachable | CallInterrupted):
                    await _until_told()
                raise event
            yield _told(event)
    finally:
        await end(work)


async def _run(
    sandbox: AsyncSandbox,
    asked: _Execute,
    env: Mapping[str, str],
    events: asyncio.Queue[ExecutionEvent | BaseException | None],
) -> None:
    context: AsyncInterpreter | None = None
    try:
        if asked.context_id:
            context = await sandbox.interpreters.get(asked.context_id)
        else:
            context = await sandbox.interpreter(_language(asked.language))
        async for event in context.stream(asked.code, timeout_s=0, env=env):
            await events.put(event)
    except InterpreterDied as error:
        with suppress(SkerryError):
            if context is not None:
                await context.restart()
        await events.put(error)
    except SkerryError as error:
        await events.put(error)
    else:
        await events.put(None)


async def _until_told() -> None:
    """Leave it to the router to break off: a client that is cut off asks at once whether the sandbox runs, and the
    stream to one that is killed breaks a moment before everybody knows."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_GONE_S):
            await asyncio.Event().wait()


def _line(kind: str, **fields: Any) -> bytes:
    return msgspec.json.encode({"type": kind, **fields}) + b"\n"


def _told(event: ExecutionEvent) -> bytes:
    match event.type:
        case EventType.STARTED:
            return _line("number_of_executions", execution_count=event.execution_count)
        case EventType.STDOUT | EventType.STDERR:
            return _line(event.type.value, text=event.text, timestamp=time.time_ns() // 1000)
        case EventType.RESULT | EventType.DISPLAY if event.result is not None:
            return _line("result", **_forms(event.result))
        case EventType.ERROR if event.error is not None:
            error = event.error
            return _line("error", name=error.name, value=error.value, traceback=error.traceback)
    return _line("end_of_execution")


def _forms(value: Rich) -> dict[str, Any]:
    forms = {name: value.data[media] for name, media in _FORMS.items() if value.data.get(media) is not None}
    text = forms.get("text")
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        forms["text"] = text[1:-1]
    extra = {media: shown for media, shown in value.data.items() if media not in _FORMS.values()}
    return {**forms, "extra": extra, "is_main_result": value.is_result}


async def _create(request: Request) -> Response:
    try:
        asked = await _body(request, _Create)
    except (ValueError, RecursionError) as error:
        return PlainTextResponse(str(error), 400)
    box = _of(request)
    try:
        made = await box.sandbox.interpreter(_language(asked.language), name=str(uuid.uuid4()), cwd=asked.cwd)
    except SkerryError as error:
        return _refused(error)
    return _json(_view(made))


async def _list(request: Request) -> Response:
    sandbox = _of(request).sandbox
    try:
        for language in _DEFAULTS:
            with suppress(InterpreterNotFound):
                await sandbox.interpreter(language)
        known = await sandbox.interpreters.list()
    except SkerryError as error:
        return _refused(error)
    return _json([_view(each) for each in sorted(known, key=lambda each: each.name not in _DEFAULTS)])


async def _remove(request: Request) -> Response:
    try:
        await (await _find(request)).close()
    except SkerryError as error:
        return _refused(error)
    return _json(None)


async def _restart(request: Request) -> Response:
    try:
        await (await _find(request)).restart()
    except SkerryError as error:
        return _refused(error)
    return _json(None)


async def _find(request: Request) -> AsyncInterpreter:
    id = request.path_params["id"]
    try:
        return await _of(request).sandbox.interpreters.get(id)
    except NotFound:
        raise NotFound(f"Context {id} not found") from None


def _view(context: AsyncInterpreter | InterpreterInfo) -> dict[str, str]:
    return {"id": context.name, "language": context.language, "cwd": context.cwd}


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
