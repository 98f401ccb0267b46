"""`skerry repl`: an interpreter of a sandbox on this terminal, or one piece of code from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skerry.cli.options import make_spec, references, refuse_if, spec_options
from skerry.cli.output import json_option, print_json_line, say, to_data

if TYPE_CHECKING:
    from skerry.model.executions import ExecutionEvent, Rich
    from skerry.sandbox.interpreter import AsyncInterpreter
    from skerry.sandbox.sandbox import AsyncSandbox

_PICTURES = {"image/png": "png", "image/jpeg": "jpg", "image/svg+xml": "svg", "application/pdf": "pdf"}
_PAIRS = {")": "(", "]": "[", "}": "{"}
_GIVEN = click.core.ParameterSource.COMMANDLINE
_OWN = {"sandbox", "language", "interpreter", "timeout", "images", "pool", "as_json"}


@click.command(epilog="Exit codes: 0, or 1 if code from a pipe failed; 125 skerry failed, 127 no such interpreter.")
@click.option("--language", default="python", metavar="NAME", help="python (default), bash, javascript, or a kernel.")
@click.option("--interpreter", metavar="NAME", help="One of its own, beside that which everybody shares.")
@click.option("--timeout", metavar="TIME", help="Interrupt what takes longer, e.g. 30s.")
@click.option("--images", metavar="DIR", help="Where pictures are written; else to a new folder.")
@click.option("--pool", is_flag=True, help="Take a warm sandbox of `skerry pool run`, if there is one.")
@spec_options
@json_option
@click.argument("sandbox", metavar="[SANDBOX]", required=False, shell_complete=references)
@click.pass_context
def repl(
    ctx: click.Context,
    /,
    sandbox: str | None,
    language: str,
    interpreter: str | None,
    timeout: str | None,
    images: str | None,
    pool: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Run code in an interpreter that remembers.

    In a SANDBOX, or in a new one that ends with this. Ctrl-C interrupts the code, Ctrl-D ends. From a pipe all of it is
    run at once.
    """
    from skerry.cli.job import new_sandbox
    from skerry.cli.options import duration
    from skerry.cli.registry import open_sandbox

    timeout_s = duration(timeout, "--timeout")
    opening: AbstractAsyncContextManager[AsyncSandbox]
    if sandbox is None:
        config, spec = make_spec(options)
        opening = new_sandbox(config, spec, keep=False, pool=pool)
    else:
        given = sorted(name for name in ctx.params if name not in _OWN and ctx.get_parameter_source(name) is _GIVEN)
        refuse_if(pool or given, f"SANDBOX is there already: leave out {', '.join(given) or 'pool'}")
        opening = open_sandbox(sandbox)
    with _entered(opening) as opened:
        loop = _loop()
        context = loop.run(opened.interpreter(language, name=interpreter))
        screen = _JsonScreen() if as_json else _Screen(images)
        talk = _Talk(context, screen, timeout_s)
        if sys.stdin is not None and sys.stdin.isatty():
            return talk.converse()
        return talk.run(sys.stdin.read() if sys.stdin is not None else "")


def _loop() -> Any:
    from skerry.sync.loop_thread import loop_thread

    return loop_thread


@contextmanager
def _entered(opening: AbstractAsyncContextManager[AsyncSandbox]) -> Iterator[AsyncSandbox]:
    """Hold the sandbox in the loop thread: this one waits for keys. A signal that ends us lets it be removed first."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    opened = _loop().run(opening.__aenter__())
    try:
        yield opened
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left is quick, and leaves nothing behind
        _loop().run(opening.__aexit__(None, None, None))


class _Talk:
    def __init__(self, interpreter: AsyncInterpreter, screen: _Screen, timeout_s: float | None) -> None:
        self._interpreter = interpreter
        self._screen = screen
        self._timeout_s = timeout_s

    def converse(self) -> int:
        """Read pieces of code and run each, until Ctrl-D."""
        _prepare_line_editing()
        say(f"{self._interpreter.language}; Ctrl-C interrupts, Ctrl-D ends")
        while True:
            try:
                code = read_piece(self._interpreter.language)
            except KeyboardInterrupt:
                click.echo("")
                continue
            except EOFError:
                click.echo("")
                return 0
            if code.strip():
                self._run_or_restart(code)

    def _run_or_restart(self, code: str) -> None:
        from skerry.errors import InterpreterDied

        try:
            self.run(code)
        except InterpreterDied as error:
            say(str(error).partition(". ")[0])
            _loop().run(self._interpreter.restart())
            say("it was started anew")

    def run(self, code: str) -> int:
        """Run code, and show what happens; 1 if it failed."""
        from skerry.model.executions import EventType

        code_failed = 0
        with self._interrupting():
            for event in _loop().iterate(self._interpreter.stream(code, timeout_s=self._timeout_s)):
                self._screen.show(event)
                failed = event.type is EventType.ERROR or event.timed_out or event.interrupted
                code_failed = 1 if failed else code_failed
        return code_failed

    @contextmanager
    def _interrupting(self) -> Iterator[None]:
        """Pass Ctrl-C on to the code meanwhile."""
        import asyncio

        loop = asyncio.run_coroutine_threadsafe

        def interrupt(_number: int, _frame: object) -> None:
            loop(self._interpreter.interrupt(), _loop().running_loop())

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


class _Screen:
    """Shows events to people; pictures become files."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = Path(folder) if folder else None
        self._count = 0

    def show(self, event: ExecutionEvent) -> None:
        match event.type.value:
            case "stdout" | "stderr":
                click.echo(event.text, nl=False, err=event.type.value == "stderr")
            case "result" | "display" if event.result is not None:
                self._show_value(event.result)
            case "error" if event.error is not None:
                error = event.error
                click.echo((error.traceback or f"{error.name}: {error.value}").rstrip("\n"), err=True)
            case "end" if event.timed_out or event.truncated:
                say("it took too long and was interrupted" if event.timed_out else "some of the output was left out")

    def _show_value(self, value: Rich) -> None:
        pictures = [media for media in _PICTURES if value.content(media)]
        for media in pictures:
            content = value.content(media)
            assert content is not None
            say(f"{media} is in {self._write(content, _PICTURES[media])}")
        if value.text is not None and not pictures:
            click.echo(value.text)

    def _write(self, content: bytes, ending: str) -> Path:
        """Write to a file of a name that nobody has."""
        import tempfile

        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="skerry-repl-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        while True:
            self._count += 1
            path = self._folder / f"{self._count}.{ending}"
            try:
                with path.open("xb") as file:
                    file.write(content)
            except FileExistsError:
                continue
            return path


class _JsonScreen(_Screen):
    """Shows events to programs, each on a line."""

    def show(self, event: ExecutionEvent) -> None:
        print_json_line(to_data(event))


def _prepare_line_editing() -> None:
    try:
        import readline
    except ImportError:
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def read_piece(language: str) -> str:
    """Read lines until they are a whole piece of code. Raises EOFError at the end of input."""
    lines = [input(">>> ")]
    while needs_more(language, lines):
        try:
            lines.append(input("... "))
        except EOFError:
            break
    return "\n".join(lines) + "\n"


def needs_more(language: str, lines: list[str]) -> bool:
    """Whether more lines belong to these: in Python as in its own, elsewhere while a bracket is open or a line goes on
    with a backslash; an empty line always ends a piece."""
    if not lines[-1].strip() and len(lines) > 1:
        return False
    if language == "python":
        return _python_needs_more("\n".join(lines))
    if lines[-1].endswith("\\"):
        return True
    opened: list[str] = []
    for letter in "\n".join(lines):
        if letter in _PAIRS.values():
            opened.append(letter)
        elif letter in _PAIRS and opened and opened[-1] == _PAIRS[letter]:
            opened.pop()
    return bool(opened)


def _python_needs_more(code: str) -> bool:
    import codeop
    import warnings

    if code.lstrip()[:1] in ("!", "%"):
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return codeop.compile_command(code, symbol="single") is None
        except (SyntaxError, ValueError, OverflowError):
            return False  # it is for the box's Python to say what is wrong
