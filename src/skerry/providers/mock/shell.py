"""The mock shell: runs what `syntax` has read, in the process that it is given."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import replace

from skerry.providers.mock import expand, syntax
from skerry.providers.mock.context import Context
from skerry.providers.mock.handles import Null, OpenFile, Pipe, open_file
from skerry.providers.mock.kernel import Exit, Process
from skerry.providers.mock.syntax import (
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Loop,
    Pipeline,
    Redirect,
    Sequence,
    Simple,
)
from skerry.providers.mock.words import SyntaxProblem, Word

Fds = dict[int, OpenFile]


class LoopControl(Exception):
    def __init__(self, *, stop: bool) -> None:
        self.stop = stop


class Return(Exception):
    """Ends a function of the script."""

    def __init__(self, code: int) -> None:
        self.code = code


class Shell:
    def __init__(self, context: Context, name: str, arguments: list[str]) -> None:
        self.context = context
        self.process: Process = context.process
        self.variables = dict(context.env)
        self.exported = set(context.env)
        self.name = name
        self.arguments = arguments
        self.status = 0
        self.jobs: list[Process] = []
        self.functions: dict[str, Command] = {}
        self.traps: dict[str, str] = {}
        self.caught: list[str] = []
        self.errexit = False
        self.pid = self.process.pid

    def child(self, context: Context) -> Shell:
        """The same shell in another process, for a subshell."""
        twin = Shell(context, self.name, self.arguments)
        twin.variables, twin.exported = dict(self.variables), set(self.exported)
        twin.functions = dict(self.functions)
        twin.status, twin.pid, twin.errexit = self.status, self.pid, self.errexit
        return twin

    @property
    def env(self) -> dict[str, str]:
        return {name: self.variables[name] for name in self.exported if name in self.variables}

    async def run_text(self, text: str) -> int:
        """Run a program, and what it trapped for its end."""
        try:
            try:
                program = syntax.parse(text)
            except SyntaxProblem as problem:
                await self.complain(f"syntax error: {problem}")
                return 2
            await self.run(program, self.process.fds)
            code = self.status
        except (Exit, Return) as end:
            code = end.code
        if action := self.traps.pop("EXIT", ""):
            self.status = code
            await self.run_text(action)
        return code

    async def complain(self, message: str, fds: Fds | None = None) -> None:
        await Context(self.process, fds=fds).stderr.write(f"{self.name}: {message}\n")

    async def run(self, program: Sequence, fds: Fds) -> int:
        for chain, background in program.items:
            if background:
                body = Sequence([(chain, False)])
                job = self._fork(Group(body), {**fds, 0: Null()})
                self.jobs.append(job)
                self.variables["!"] = str(job.pid)
                self.status = 0
                continue
            for joint, pipeline in chain:
                if not joint or (joint == "&&") == (self.status == 0):
                    self.status = await self._pipeline(pipeline, fds)
                    await self._run_caught(fds)
            if self.errexit and self.status and len(chain) == 1 and not chain[0][1].negated:
                raise Exit(self.status)
        return self.status

    async def _run_caught(self, fds: Fds) -> None:
        while self.caught:
            status = self.status
            await self.run(syntax.parse(self.traps.get(self.caught.pop(0), "")), fds)
            self.status = status

    def trap(self, name: str, action: str | None) -> None:
        """Run `action` on a signal; "" ignores it, None lets it kill again."""
        if name == "EXIT":
            self.traps[name] = action or ""
            return
        number = signal.Signals[f"SIG{name}"].value
        if action is None:
            self.process.handlers.pop(number, None)
            return
        self.traps[name] = action
        catch: Callable[[], None] = lambda: self.caught.append(name)  # noqa: E731
        self.process.handlers[number] = catch if action else None

    async def _pipeline(self, pipeline: Pipeline, fds: Fds) -> int:
        if len(pipeline.stages) == 1:
            status = await self._command(pipeline.stages[0], fds)
        else:
            status = await self._pipe(pipeline.stages, fds)
        return int(status == 0) if pipeline.negated else status

    async def _pipe(self, stages: list[Command], fds: Fds) -> int:
        children: list[Process] = []
        upstream: OpenFile | None = None
        for number, stage in enumerate(stages):
            mine = dict(fds)
            if upstream is not None:
                mine[0] = upstream
            pipe = Pipe() if number < len(stages) - 1 else None
            if pipe is not None:
                mine[1] = pipe.writer
            try:
                children.append(self._fork(stage, mine))
            except OSError as problem:
                await self.complain(f"Cannot fork: {problem.strerror}", fds)
                if upstream is not None:
                    upstream.closed()
                return 2
            upstream = pipe.reader if pipe is not None else None
        for child in children:
            status = await self.process.wait_for(child)
        return status

    def _fork(self, command: Command, fds: Fds) -> Process:
        async def program(context: Context) -> int:
            try:
                return await self.child(context)._command(command, context.process.fds, in_place=True)
            except LoopControl:
                return 0
            except Return as end:
                return end.code

        process = self.process
        return process.machine.fork(
            program, process.argv, env=process.env, cwd=process.cwd, uid=process.uid, fds=fds, parent=process
        )

    async def _command(self, command: Command, fds: Fds, *, in_place: bool = False) -> int:
        await self.process.step()
        opened: list[OpenFile] = []
        try:
            merged = await self._redirected(command.redirects, fds, opened)
            if isinstance(command, Function):
                self.functions[command.name] = command.body
                return 0
            if isinstance(command, Simple):
                return await self._simple(command, merged, in_place)
            if command.subshell and not in_place:
                return await self.process.wait_for(self._fork(replace(command, redirects=[]), merged))
            return await self._compound(command.body, merged)
        except OSError as problem:
            where = f"{problem.filename}: " if problem.filename else ""
            await self.complain(f"{where}{problem.strerror}", fds)
            return 2
        except expand.ExpansionProblem as problem:
            await self.complain(str(problem), fds)
            raise Exit(2) from None
        finally:
            for file in opened:
                file.release()

    async def _redirected(self, redirects: list[Redirect], fds: Fds, opened: list[OpenFile]) -> Fds:
        merged = dict(fds)
        for redirect in redirects:
            target = await expand.to_text(self, redirect.target)
            if redirect.operator in (">&", "<&") and target == "-":
                merged.pop(redirect.fd, None)
            elif redirect.operator in (">&", "<&") and target.isdigit():
                if int(target) not in merged:
                    raise OSError(9, "Bad file descriptor", target)
                merged[redirect.fd] = merged[int(target)]
            else:
                file = await self._open(redirect.operator, target)
                opened.append(file.retain())
                merged[redirect.fd] = file
                if redirect.operator in ("&>", ">&"):
                    merged[2] = file
        return merged

    async def _open(self, operator: str, target: str) -> OpenFile:
        if operator not in ("<<", "<<-"):
            return open_file(self.process, target, {"<": "r", ">>": "a"}.get(operator, "w"))
        pipe = Pipe()
        pipe.buffer += target.encode(errors="surrogateescape")
        pipe.writer.closed()
        return pipe.reader

    async def _simple(self, command: Simple, fds: Fds, in_place: bool) -> int:
        from skerry.providers.mock.builtins import BUILTINS

        argv = await self.expand(command.words)
        self.status = 0 if not argv else self.status
        values = {name: await expand.to_text(self, word) for name, word in command.assignments}
        if not argv:
            self.variables.update(values)
            return self.status
        if argv[0] in self.functions:
            self.variables.update(values)
            return await self._call(self.functions[argv[0]], argv[1:], fds)
        if argv[0] in BUILTINS:
            self.variables.update(values)
            return await BUILTINS[argv[0]](self, argv, fds)
        return await self.run_program(argv, {**self.env, **values}, fds, in_place)

    async def _call(self, body: Command, arguments: list[str], fds: Fds) -> int:
        before, self.arguments = self.arguments, arguments
        try:
            return await self._command(body, fds)
        except Return as end:
            return end.code
        finally:
            self.arguments = before

    async def run_program(self, argv: list[str], env: Mapping[str, str], fds: Fds, in_place: bool) -> int:
        """A program in a process of its own or, `in_place`, instead of this shell."""
        process = self.process
        machine = process.machine
        try:
            if in_place:
                program, process.argv = machine.resolve(argv, env, process.cwd, process.uid)
                held = [file.retain() for file in fds.values()]
                try:
                    return await process.become(program, Context(process, argv=process.argv, env=env, fds=fds))
                finally:
                    for file in held:
                        file.release()
            child = machine.spawn(argv, env=env, cwd=process.cwd, uid=process.uid, fds=fds, parent=process)
        except FileNotFoundError:
            await self.complain(f"{argv[0]}: not found", fds)
            return 127
        except PermissionError:
            await self.complain(f"{argv[0]}: Permission denied", fds)
            return 126
        except OSError as problem:
            if problem.errno != 8:
                raise
            return await self.run_program(["sh", *argv], env, fds, in_place)  # a script without its first line
        return await process.wait_for(child)

    async def expand(self, words: list[Word]) -> list[str]:
        found: list[str] = []
        for word in words:
            found += await expand.to_fields(self, word)
        return found

    async def capture(self, text: str) -> str:
        """What `$(text)` stands for."""
        pipe = Pipe()
        body = Group(syntax.parse(text), subshell=True)
        child = self._fork(body, {**self.process.fds, 1: pipe.writer})
        output = b""
        while chunk := await pipe.reader.read(self.process, 1 << 16):
            output += chunk
        self.status = await self.process.wait_for(child)
        return output.decode(errors="surrogateescape").rstrip("\n")

    async def _compound(self, body: Sequence | If | Loop | For | Case, fds: Fds) -> int:
        match body:
            case Sequence():
                self.status = 0 if not body.items else self.status
                return await self.run(body, fds)
            case If():
                return await self._if(body, fds)
            case Loop():
                return await self._loop(body, fds)
            case For():
                return await self._for(body, fds)
            case Case():
                return await self._case(body, fds)

    async def _condition(self, condition: Sequence, fds: Fds) -> bool:
        errexit, self.errexit = self.errexit, False
        try:
            return await self.run(condition, fds) == 0
        finally:
            self.errexit = errexit

    async def _if(self, choice: If, fds: Fds) -> int:
        for condition, body in choice.branches:
            if await self._condition(condition, fds):
                return await self.run(body, fds)
        self.status = 0
        return await self.run(choice.otherwise, fds) if choice.otherwise else 0

    async def _loop(self, loop: Loop, fds: Fds) -> int:
        status = 0
        while await self._condition(loop.condition, fds) != loop.until:
            if await self._body(loop.body, fds):
                return 0
            status = self.status
        return status

    async def _for(self, loop: For, fds: Fds) -> int:
        values = self.arguments if loop.words is None else await self.expand(loop.words)
        self.status = 0
        for value in list(values):
            self.variables[loop.name] = value
            if await self._body(loop.body, fds):
                return 0
        return self.status

    async def _body(self, body: Sequence, fds: Fds) -> bool:
        """Run a loop's body; True when it ends the loop."""
        await self.process.step()
        try:
            await self.run(body, fds)
        except LoopControl as control:
            return control.stop
        return False

    async def _case(self, case: Case, fds: Fds) -> int:
        subject = await expand.to_text(self, case.subject)
        for patterns, body in case.choices:
            for pattern in patterns:
                if expand.matches(subject, await expand.to_pattern(self, pattern)):
                    self.status = 0
                    return await self.run(body, fds)
        return 0
