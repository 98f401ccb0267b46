"""Calls about interpreters: contexts that remember what was run in them, each a process of the box with a name."""

from __future__ import annotations

import posix

from . import wire
from .channel import Call, Failure
from .execution import interpreter_command, is_whole
from .loop import ignore_errors
from .process import Process
from .spawn import DEFAULT_PATH, env_of, find_program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent

MAX_NAME = 128
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MAX_CONTEXTS = 64
_MAX_OUTPUT = 64 << 20
_MAX_ID = 64
_OPS = ("run", "interrupt", "restart", "ready")
_FOLDER = __file__.rpartition("/")[0] + "/interpreter/"
_ALIASES = {
    "py": "python", "python3": "python", "ipython": "python", "sh": "bash", "shell": "bash", "js": "javascript",
    "node": "javascript", "ts": "typescript",
}  # fmt: skip
_ENGINES = ("auto", "builtin", "jupyter")


class Context:
    """A context that runs, or ran."""

    def __init__(self, name: str, language: str, engine: str, process: Process, env: dict[str, str]) -> None:
        self.name = name
        self.language = language
        self.engine = engine
        self.process = process
        self.env = env
        """What the agent's environment was when the context, or its last run, began."""

    def info(self) -> dict[str, Any]:
        process = self.process
        told = {"name": self.name, "language": self.language, "engine": self.engine, "cwd": process.request.cwd}
        return {**told, "process": process.number, "started": process.started}


def _command(language: str, engine: str, path: str) -> list[str]:
    """The command of a kernel. Raises Failure if the box has nothing that could be one."""

    def found(*programs: str) -> str | None:
        return next((each for each in (find_program(name, path) for name in programs) if each), None)

    python = found("python3", "python")
    if engine != "jupyter":
        if language == "python" and python:
            return [python, "-B", _FOLDER + "python_kernel.py", engine]
        if language == "bash" and (bash := found("bash")):
            return [bash, "--norc", "--noprofile", _FOLDER + "bash_kernel.sh"]
        if language == "javascript" and (node := found("node", "nodejs")):
            return [node, _FOLDER + "node_kernel.js"]
    if engine == "builtin" or python is None:
        ways = "python, bash and javascript need python3, bash and node on the box's PATH"
        raise Failure("no_interpreter", f"the box has no interpreter for {language!r}: {ways}")
    return [python, "-B", _FOLDER + "jupyter_kernel.py", language]


def interpreter(agent: Agent, call: Call) -> None:
    """Find the context of a name, or make it."""
    params = call.params
    name, language, engine = (params.get(each) for each in ("name", "language", "engine"))
    if type(name) is not str or not 0 < len(name) <= MAX_NAME or not set(name) <= _LETTERS or name[0] == ".":
        raise Failure("invalid", f"name is 1 to {MAX_NAME} letters, digits, dots, dashes and underscores")
    if type(language) is not str or not 0 < len(language) <= MAX_NAME:
        raise Failure("invalid", "language is a text")
    if engine not in _ENGINES:
        raise Failure("invalid", f"engine is one of {', '.join(_ENGINES)}")
    language = _ALIASES.get(language.lower(), language.lower())
    known = agent.contexts.get(name)
    if known is not None and not known.process.has_exited:
        call.answer({"made": False, **known.info()})
        return
    agent.contexts = {name: each for name, each in agent.contexts.items() if not each.process.has_exited}
    if len(agent.contexts) >= MAX_CONTEXTS:
        raise Failure("limit", f"a box has at most {MAX_CONTEXTS} interpreters at once: close one")
    context = _begin(agent, name, language, engine, params)
    call.answer({"made": True, **context.info()})


def _begin(agent: Agent, name: str, language: str, engine: str, params: dict[str, Any]) -> Context:
    path = {**agent.env, **env_of(params)}.get("PATH") or DEFAULT_PATH
    config = {"argv": _command(language, engine, path)}
    argv = [*interpreter_command(agent), _FOLDER + "context.py", wire.dumps(config)]
    wanted = {"argv": argv, "cwd": params.get("cwd"), "env": params.get("env"), "stdin": True, "background": True}
    request = agent.request({key: value for key, value in wanted.items() if value is not None})
    request.tag = f"interpreter {name}"
    request.on_output = lambda _fd, _data: None  # only who waits for it has a use for it
    request.keeps_awake = False
    context = Context(name, language, engine, agent.processes.start(request), dict(agent.env))
    agent.contexts[name] = context
    return context


def interpreters(agent: Agent, call: Call) -> None:
    alive = [each.info() for each in agent.contexts.values() if not each.process.has_exited]
    call.answer({"interpreters": alive})


def _context_of(agent: Agent, call: Call) -> Context:
    name = call.params.get("name")
    context = agent.contexts.get(name) if type(name) is str else None
    if context is None or context.process.has_exited:
        raise Failure("no_process", f"no interpreter is called {name!r}; what it knew is lost, if there was one")
    return context


def interpret(agent: Agent, call: Call) -> None:
    """Give a context something to do, and pass on all that it tells until the call is cancelled; then what was wanted
    is interrupted, if it still runs."""
    if not is_whole(agent, call, interpret):
        return
    context, params = _context_of(agent, call), call.params
    process, id = context.process, params.get("id")
    if type(id) is not str or not 0 < len(id) <= _MAX_ID or params.get("op") not in _OPS:
        raise Failure("invalid", f"op is one of {', '.join(_OPS)}, and id a text of {_MAX_ID} letters at most")
    request: dict[str, Any] = {"op": params["op"], "id": id, "client": id}
    if params["op"] == "run":
        code = bytes(call.attachment).decode("utf-8", "surrogateescape")
        added = {name: value for name, value in agent.env.items() if context.env.get(name) != value}
        context.env = dict(agent.env)
        request.update(code=code, added=added, env=env_of(params))
        request.update(timeout_s=_number(params, "timeout_s"), limit=_number(params, "limit"))

    def leave() -> None:
        process.remove_reader(call)
        _tell(process, {"op": "leave", "client": id})

    def cancel() -> None:
        leave()
        call.answer({})

    process.add_reader(call)
    call.on_data = lambda data: call.acknowledge(len(data))
    call.on_end = None
    call.on_close, call.on_cancel = leave, cancel
    _tell(process, request)


def _tell(process: Process, request: dict[str, Any]) -> None:
    process.input.feed(wire.dumps(request).encode() + b"\n")


def end_interpreter(agent: Agent, call: Call) -> None:
    """Kill a context with all that it has started."""
    context = _context_of(agent, call)
    del agent.contexts[context.name]
    ignore_errors(posix.kill, context.process.pid, 9)  # at once: nobody can find it alive any more
    context.process.kill_tree()
    agent.wait_until(lambda: context.process.has_exited, 10, lambda: call.answer({}))


def _number(params: dict[str, Any], name: str) -> float | None:
    value: float | None = params.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 < value < 1e10):
        raise Failure("invalid", f"{name} is a positive number")
    return value
