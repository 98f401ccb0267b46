"""The tiny shell of a mock box: lists, pipes, redirections, variables and quotes, and no control flow."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator

from skerry.providers.mock.files import box_text
from skerry.providers.mock.process import Context

_TOKEN = re.compile(
    r"""(?P<operator>&&|\|\||[012]?>&[012]|[012]?>>?|<|[;&|\n])
      | (?P<word>(?:\\.|'[^']*'|"(?:[^"\\]|\\.)*"|[^\s;&|<>'"\\\#][^\s;&|<>'"\\]*)+) | \#[^\n]* | [^\S\n]+""",
    re.VERBOSE | re.DOTALL,
)
_VALUE = re.compile(r"""'[^']*' | \\. | " | \$(?P<name>\w+|[?$!]|\{\w+\})""", re.VERBOSE | re.DOTALL)
_WRITE = os.O_WRONLY | os.O_CREAT
_FLAGS = {"<": os.O_RDONLY, ">": _WRITE | os.O_TRUNC, ">>": _WRITE | os.O_APPEND}
_CONTROL = {"if", "for", "while", "until", "case", "trap", "{", "!"}
Token = tuple[bool, str]
"""Whether it is an operator, and its text."""


async def shell(context: Context) -> int:
    """Run `sh -c TEXT [NAME ARGUMENT...]` or `sh FILE [ARGUMENT...]`."""
    words = context.argv[1:]
    if words[:1] == ["-c"] and len(words) > 1:
        return await Shell(context, words[2:] or ["sh"]).run(words[1])
    text = context.read_file(words[0]) if words else await context.stdin.read_all()
    return await Shell(context, words or ["sh"]).run(text.decode(errors="surrogateescape"))


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or "$(" in match[0]:
            raise ValueError(f"syntax error: the mock's shell cannot read {text[at:]!r}")
        at = match.end()
        if match["operator"] or match["word"]:
            yield bool(match["operator"]), match[0]


class Shell:
    def __init__(self, context: Context, arguments: list[str]) -> None:
        self._context, self._arguments = context, arguments
        self._variables: dict[str, str] = {}
        """Those that are not exported."""
        self._status = self._last_pid = 0

    async def run(self, text: str) -> int:
        """Run a script; gives its exit code."""
        pipeline: list[list[Token]] = [[]]
        is_skipped = False
        try:
            for is_operator, token in [*_tokens(text), (True, ";")]:
                if is_operator and token == "|":
                    pipeline.append([])
                elif is_operator and token in (";", "\n", "&", "&&", "||"):
                    if pipeline[0] and not is_skipped:
                        await self._run_pipeline(pipeline, waits=token != "&")
                    is_skipped = token in ("&&", "||") and (self._status == 0) == (token == "||")
                    pipeline = [[]]
                else:
                    pipeline[-1].append((is_operator, token))
        except ValueError as problem:
            await self._context.print(f"sh: {problem}", err=True)
            return 2
        return self._status

    async def _run_pipeline(self, commands: list[list[Token]], *, waits: bool) -> None:
        source, out, err = self._context.fds
        opened: list[int] = []
        running: list[Context | int] = []
        try:
            for number, command in enumerate(commands, 1):
                feed, sink = os.pipe() if number < len(commands) else (-1, out)
                opened += [feed, sink] if feed >= 0 else []
                running.append(await self._start(command, [source, sink, err], opened))
                source = feed
        finally:
            for fd in opened:
                os.close(fd)
        self._status = 0
        for each in running if waits else []:
            self._status = each if isinstance(each, int) else await self._context.wait_for(each)

    async def _start(self, command: list[Token], fds: list[int], opened: list[int]) -> Context | int:
        """Start a command; gives its process, or the exit code of what needs none."""
        words, assigned, tokens = list[str](), dict[str, str](), iter(command)
        try:
            for is_operator, token in tokens:
                if not is_operator and not words and re.match(r"\w+=", token):
                    name, _, value = token.partition("=")
                    assigned[name] = " ".join(self._expand(value))
                elif not is_operator:
                    words += self._expand(token)
                else:
                    number = int(token[0]) if token[0].isdigit() else int(token[0] == ">")
                    if "&" in token:
                        fds[number] = fds[int(token[-1])]
                        continue
                    (path,) = self._expand(next(tokens)[1])
                    fds[number] = self._context.files.open(self._context.path(path), _FLAGS[token.lstrip("012")])
                    opened.append(fds[number])
            if not words:
                self._assign(assigned)
                return 0
            code = await self._run_builtin(words)
            if code is not None:
                return code
            child = self._context.spawn(words, self._context.env | assigned, (fds[0], fds[1], fds[2]))
        except OSError as problem:
            name = words[0] if words else ""
            is_missing = problem.errno == 2 and problem.filename == name
            reason = "not found" if is_missing else problem.strerror
            await self._context.print(f"sh: {box_text(str(problem.filename or name))}: {reason}", err=True)
            return 127 if is_missing else 126 if problem.filename == name else 2
        self._last_pid = child.pid
        return child

    def _expand(self, word: str) -> list[str]:
        """The fields of a word: values put in, and quotes taken off."""
        if word.isalnum():  # `shlex` takes long for a long one
            return [word]
        is_quoted = False

        def put(match: re.Match[str]) -> str:
            nonlocal is_quoted
            is_quoted ^= match[0] == '"'
            if match["name"] is None:
                return match[0]
            value = self._value(match["name"].strip("{}"))
            return re.sub(r'(["\\])', r"\\\1", value) if is_quoted else shlex.join(value.split())

        return shlex.split(_VALUE.sub(put, re.sub("^~(?=/|$)", "$HOME", word)))

    def _value(self, name: str) -> str:
        if name.isdigit():
            return "".join(self._arguments[int(name) : int(name) + 1])
        special = {"?": self._status, "$": self._context.pid, "!": self._last_pid}
        return str({**self._variables, **self._context.env, **special}.get(name, ""))

    def _assign(self, values: dict[str, str]) -> None:
        for name, value in values.items():
            (self._context.env if name in self._context.env else self._variables)[name] = value

    async def _run_builtin(self, words: list[str]) -> int | None:
        """Run what is no program; gives its exit code."""
        match words:
            case ["cd", *path]:
                place = os.path.normpath(self._context.path(path[0] if path else self._value("HOME")))
                os.listdir(self._context.files.locate(place))
                self._context.cwd = place
            case ["exit", *code]:
                raise SystemExit(int(code[0]) if code else self._status)
            case ["export", *assignments]:
                for name, equals, value in (each.partition("=") for each in assignments):
                    self._context.env[name] = value if equals else self._value(name)
            case ["read", name]:
                line = await self._context.stdin.readline()
                self._assign({name: line.decode(errors="surrogateescape").strip()})
                return int(not line)
            case ["kill", *option, pid]:
                process = self._context.kernel.running.get(int(pid))
                if process is not None:
                    process.kill(-int(option[0]) if option else 15)
                await self._context.sleep(0)
                return int(process is None)
            case [word, *_] if word in _CONTROL:
                raise ValueError(f"syntax error: the mock's shell has no {word!r}; define a program instead")
            case _:
                return None
        return 0
