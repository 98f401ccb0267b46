"""Interpreters of a sandbox: contexts that remember what was run in them. They live in the box, whoever asks."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec

from skerry.agent.client import CONTROL_TIMEOUT_S
from skerry.errors import (
    AgentProtocolError,
    BoxFull,
    Conflict,
    InterpreterDied,
    InterpreterKilled,
    InterpreterNotFound,
    NotFound,
    SandboxGone,
    TooLarge,
)
from skerry.ledger.facts import Command
from skerry.model.executions import CodeError, EventType, Execution, ExecutionEvent, InterpreterInfo, Rich
from skerry.model.results import Count, ExecResult
from skerry.sandbox.connection import Connect
from skerry.sandbox.processes import TIMEOUT_EXIT_CODE, deadline

DEFAULT_LIMIT = 16 << 20
START_TIMEOUT_S = 120.0
"""How long a kernel may take to start; Jupyter's take seconds."""
MAX_CODE = 8 << 20
_MAX_LINE = 32 << 20
_MAX_RUN = 256 << 20
"""Bytes of all events of a run."""
_MAX_ID = 64
_SHELL_LIKE = {"js": "javascript", "node": "javascript", "py": "python", "python3": "python", "sh": "bash"}

_NO_NAME = re.compile(r"[^a-z0-9_-]")

Tell = Callable[[str, int], Command]
OnExecutionEvent = Callable[[ExecutionEvent], object]


class _Death(msgspec.Struct, frozen=True):
    reason: str | None = None
    kind: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    out_of_memory: bool = False

    def error(self, name: str) -> Exception:
        if self.kind == "no_interpreter":
            return InterpreterNotFound(self.reason or f"the box has no interpreter for {name!r}")
        lost = "what it knew is lost. Call restart() to go on with a fresh one"
        if self.out_of_memory:
            return InterpreterKilled(f"the interpreter {name!r} was killed for want of memory: {lost}")
        if self.signal == 9:
            return InterpreterKilled(f"the interpreter {name!r} was killed, most likely for want of memory: {lost}")
        if self.signal is not None:
            return InterpreterDied(f"the interpreter {name!r} died of signal {self.signal}: {lost}")
        how = self.reason if self.reason is not None else f"it ended with code {self.exit_code}"
        return InterpreterDied(f"the interpreter {name!r} is gone ({how}): {lost}")


class _Line(msgspec.Struct):
    """One event of a context, as the box tells it."""

    id: str
    event: str
    text: str = ""
    data: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    name: str = ""
    value: str = ""
    traceback: str = ""
    status: str = ""
    count: Count = 0
    truncated: bool = False
    timed_out: bool = False
    death: _Death | None = None


class _Found(msgspec.Struct, frozen=True):
    made: bool
    name: str
    language: str
    engine: str = "auto"
    cwd: str = ""


class _Known(msgspec.Struct, frozen=True):
    interpreters: list[InterpreterInfo]


class AsyncInterpreter:
    """A context that remembers: variables, imports and the working folder stay from one run to the next."""

    def __init__(self, connect: Connect, info: InterpreterInfo, default_timeout_s: float | None, tell: Tell) -> None:
        self.name = info.name
        self.language = info.language
        self.engine = info.engine
        self.cwd = info.cwd
        """The folder in which it began."""
        self._connect = connect
        self._default_timeout_s = default_timeout_s
        self._tell = tell

    async def run(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        limit: int = DEFAULT_LIMIT,
        on_event: OnExecutionEvent | None = None,
    ) -> Execution:
        """Run code to its end. What it raises is a result. After `timeout_s` (the spec's if nothing is said; 0 is any
        time) it is interrupted, and the interpreter lives on with all that it knows. At most `limit` letters of each
        output are kept. `env` is set meanwhile. Raises InterpreterDied if the code ended its interpreter,
        InterpreterKilled if something else did."""
        made: dict[str, Any] = {"results": []}
        written: dict[EventType, list[str]] = {EventType.STDOUT: [], EventType.STDERR: []}
        async with aclosing(self._events(code, timeout_s, env, limit)) as events:
            async for event in events:
                if on_event is not None:
                    on_event(event)
                if event.type in written:
                    written[event.type].append(event.text)
                elif event.result is not None:
                    made["results"].append(event.result)
                elif event.error is not None:
                    made["error"] = event.error
                elif event.type is EventType.END:
                    ends = ("execution_count", "truncated", "timed_out", "interrupted")
                    made |= {field: getattr(event, field) for field in ends}
        return Execution(stdout="".join(written[EventType.STDOUT]), stderr="".join(written[EventType.STDERR]), **made)

    async def stream(
        self,
        code: str,
        *,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        limit: int = DEFAULT_LIMIT,
    ) -> AsyncIterator[ExecutionEvent]:
        """Run code, and yield what happens as it happens; the last event is the end. Leaving the loop before
        interrupts the code. Raises as `run` does."""
        async with aclosing(self._events(code, timeout_s, env, limit)) as events:
            async for event in events:
                yield event

    async def _events(
        self, code: str, timeout_s: float | None, env: Mapping[str, str] | None, limit: int
    ) -> AsyncGenerator[ExecutionEvent]:
        timeout_s = (self._default_timeout_s if timeout_s is None else timeout_s) or None
        content = code.encode("utf-8", "surrogatepass")
        if len(content) > MAX_CODE:
            raise TooLarge(f"code: it is more than {MAX_CODE >> 20} MiB: write it to a file, and import that")
        params = {"timeout_s": timeout_s, "limit": max(1, limit), "env": dict(env or {}) or None}
        told = self._tell(self.language, len(content))
        failed = False
        with told.failing():
            async with aclosing(self._ask("run", params, content, deadline(timeout_s))) as lines:
                async for line in lines:
                    event = _event_of(line)
                    if event is not None:
                        failed |= event.error is not None
                        yield event
                    if line.event == "end":
                        code_of = TIMEOUT_EXIT_CODE if line.timed_out else int(failed)
                        told.end(ExecResult(exit_code=code_of, timed_out=line.timed_out))

    async def interrupt(self) -> None:
        """Interrupt what runs, as Ctrl-C does; quiet if nothing runs."""
        await self._control("interrupt", CONTROL_TIMEOUT_S)

    async def restart(self) -> None:
        """Start it anew, with nothing that it knew. What runs ends with InterpreterDied."""
        try:
            await self._control("restart", START_TIMEOUT_S)
        except InterpreterDied:  # the context itself is gone, and not only its kernel
            await begin(self._connect, self.name, self.language, self.engine, self.cwd or None, None)
            await self.ready()

    async def ready(self) -> None:
        """Wait until it can run code. Raises InterpreterNotFound if it never will."""
        await self._control("ready", START_TIMEOUT_S)

    async def close(self) -> None:
        """End it, with all that it knows and has started. Quiet if it has ended already."""
        client = await self._connect()
        with suppress(NotFound):
            await client.call("end_interpreter", {"name": self.name}, type=dict[str, Any])

    async def _control(self, op: str, timeout_s: float) -> None:
        async with aclosing(self._ask(op, {}, b"", timeout_s)) as lines:
            async for _ in lines:
                pass

    async def _ask(
        self, op: str, params: dict[str, Any], content: bytes, timeout_s: float | None
    ) -> AsyncGenerator[_Line]:
        """Have the context do something, and yield what it tells of that, to the end of it."""
        id = secrets.token_hex(8)
        client = await self._connect()
        head, rest = content[: client.max_attachment], memoryview(content)[client.max_attachment :]
        params = {"name": self.name, "op": op, "id": id, **{key: each for key, each in params.items() if each}}
        if rest:
            params["more"] = len(rest)
        call = client.open("interpret", params, attachment=head).within(timeout_s)
        lines = _Lines(id)
        try:
            await call.send(rest)
            async for fd, data in call.chunks():
                for line in lines.feed(data) if fd == 1 else ():
                    if line.event == "end" and line.death is not None:
                        raise line.death.error(self.name)
                    yield line
                    if line.event == "end":
                        if line.status == "busy":
                            raise BoxFull(f"the interpreter {self.name!r} has too much to do already")
                        return
            await call.result(dict[str, Any])
            raise _Death(reason="its process ended").error(self.name)
        except SandboxGone:
            raise
        except NotFound as error:
            raise _Death(reason="its process has ended").error(self.name) from error
        finally:
            call.abandon()


class _Lines:
    """Events of one run, cut out of what a context tells everybody. Nothing in it is trusted."""

    def __init__(self, id: str) -> None:
        self._mark = f'"{id}"'.encode()
        self._id = id
        self._rest = bytearray()
        self._is_whole = False  # the first line may be the end of one
        self._size = 0

    def feed(self, data: bytes) -> list[_Line]:
        """Take what has come; whole events of the run. Raises AgentProtocolError."""
        self._rest += data
        self._size += len(data)
        if b"\n" not in data:
            if len(self._rest) > _MAX_LINE:
                raise AgentProtocolError("an interpreter tells more in one event than any may. Destroy this sandbox")
            return []
        *whole, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        if not self._is_whole:
            whole, self._is_whole = whole[1:], True
        lines = [self._parse(each) for each in whole if self._mark in each[: _MAX_ID + 32]]
        if self._size > _MAX_RUN:
            raise AgentProtocolError("an interpreter tells more of one run than any may. Destroy this sandbox")
        return [line for line in lines if line is not None and line.id == self._id]

    def _parse(self, data: bytes) -> _Line | None:
        try:
            return msgspec.json.decode(data, type=_Line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError):
            return None  # code of the box wrote it, and has it left out


def _event_of(line: _Line) -> ExecutionEvent | None:
    match line.event:
        case "stdout" | "stderr":
            return ExecutionEvent(type=EventType(line.event), text=line.text)
        case "result" | "display":
            shown = Rich(data=line.data, metadata=line.metadata, is_result=line.event == "result")
            return ExecutionEvent(type=EventType(line.event), result=shown)
        case "error":
            error = CodeError(name=line.name, value=line.value, traceback=line.traceback)
            return ExecutionEvent(type=EventType.ERROR, error=error)
        case "started":
            return ExecutionEvent(type=EventType.STARTED, execution_count=line.count)
        case "end":
            return ExecutionEvent(
                type=EventType.END,
                execution_count=line.count,
                truncated=line.truncated,
                timed_out=line.timed_out,
                interrupted=line.status == "interrupted" and not line.timed_out,
            )
    return None


async def begin(
    connect: Connect, name: str, language: str, engine: str, cwd: str | None, env: Mapping[str, str] | None
) -> _Found:
    """Find or make a context. Raises InterpreterNotFound."""
    params = {"name": name, "language": language, "engine": engine, "cwd": cwd and str(cwd), "env": dict(env or {})}
    params = {key: value for key, value in params.items() if value}
    return await (await connect()).call("interpreter", params, type=_Found)


class AsyncInterpreters:
    """All interpreters of a sandbox."""

    def __init__(self, connect: Connect, timeout_s: Callable[[], float | None], tell: Tell) -> None:
        self._connect = connect
        self._timeout_s = timeout_s
        self._tell = tell

    async def open(
        self,
        language: str = "python",
        *,
        name: str | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        engine: str = "auto",
    ) -> AsyncInterpreter:
        """The interpreter of that name, which is made if there is none; without a name the one that everybody shares
        who wants that language. Raises InterpreterNotFound, and Conflict if there is one that was made otherwise."""
        language = _SHELL_LIKE.get(language.lower(), language.lower())
        name = _NO_NAME.sub("-", language) if name is None else name
        found = await begin(self._connect, name, language, engine, cwd, env)
        if not found.made and (found.language != language or env or (cwd and cwd.rstrip("/") != found.cwd)):
            made = f"of {found.language} in {found.cwd}"
            raise Conflict(f"there is an interpreter {name!r} already, {made}: choose another name, or close it")
        info = InterpreterInfo(name=name, language=language, engine=found.engine, cwd=found.cwd)
        opened = self._of(info)
        try:
            await opened.ready()
        except InterpreterNotFound:
            await opened.close()
            raise
        return opened

    async def list(self) -> list[InterpreterInfo]:
        """Those that live."""
        return (await (await self._connect()).call("interpreters", type=_Known)).interpreters

    async def get(self, name: str) -> AsyncInterpreter:
        """One that lives, whoever made it. Raises NotFound."""
        for info in await self.list():
            if info.name == name:
                return self._of(info)
        raise NotFound(f"no interpreter is called {name!r}; what it knew is lost, if there was one")

    def _of(self, info: InterpreterInfo) -> AsyncInterpreter:
        return AsyncInterpreter(self._connect, info, self._timeout_s(), self._tell)
