"""Calls about processes, and the table of languages with their interpreters."""

from __future__ import annotations

import posix
import sys
from binascii import hexlify

from . import spawn, wire
from .channel import Call, Failure, failure_of
from .loop import ignore_errors
from .process import Process
from .spawn import DEFAULT_PATH, find_program, join, to_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .agent import Agent

_PYTHON = (
    "import sys\n"
    "path = sys.argv.pop(1)\n"
    "sys.argv[0] = path\n"
    "sys.path[0] = ''\n"  # as in a script of its own folder: modules beside the code can be imported
    "with open(path, 'rb') as file: code = compile(file.read(), path, 'exec')\n"
    "del sys, path, file\n"
    "exec(code)"
)

LANGUAGES: dict[str, tuple[str, list[list[str]]]] = {
    # name: (suffix of the file, commands to try; the file's path comes last)
    "python": (".py", [["python3", "-c", _PYTHON], ["python", "-c", _PYTHON]]),
    "bash": (".sh", [["bash"]]),
    "sh": (".sh", [["sh"]]),
    "node": (".js", [["node"], ["nodejs"]]),
    "ruby": (".rb", [["ruby"]]),
    "perl": (".pl", [["perl"]]),
    "php": (".php", [["php"]]),
    "lua": (".lua", [["lua"], ["lua5.4"], ["lua5.3"]]),
    "r": (".R", [["Rscript"]]),
    "go": (".go", [["go", "run"]]),
    "java": (".java", [["java"]]),
    "deno": (".ts", [["deno", "run", "--quiet"]]),
}

ALIASES = {
    "python3": "python", "py": "python", "javascript": "node", "js": "node", "shell": "sh", "typescript": "deno",
    "ts": "deno", "rscript": "r", "golang": "go",
}  # fmt: skip


MAX_COMMAND = 16 << 20
"""Bytes of a request's attachment with all that follows it."""
_MAX_ARGUMENT = (1 << 17) - 1  # of one argument, in every kernel
_MAX_LISTED = 1 << 16  # letters of all arguments in a list, which is one line; a letter may take twelve bytes there


def exec(agent: Agent, call: Call) -> None:
    if is_whole(agent, call, exec):
        params = command_of(call)
        shell = params.get("shell")
        if type(shell) is str and len(script := spawn.to_bytes(shell)) > _MAX_ARGUMENT:
            params.pop("shell")
            _run_file(agent, call, params, ["/bin/sh"], ".sh", script)
        else:
            start(agent, call, agent.request(params))


def command_of(call: Call) -> dict[str, Any]:
    """Take the parameters of an `exec`: those that are too long for a line are in its attachment. Raises Failure."""
    try:
        more = wire.loads(bytes(call.attachment).decode("utf-8")) if call.attachment else {}
    except (ValueError, RecursionError, SystemError):  # the last is what a scanner without its module has
        more = None
    if type(more) is not dict:
        raise Failure("invalid", "the attachment of an exec is a JSON object of more params")
    call.attachment = b""
    return {**call.params, **more}


def is_whole(agent: Agent, call: Call, handler: Callable[[Any, Call], None]) -> bool:
    """Whether all of a call's attachment is there. If not, the first bytes that come up are added to it, and then the
    handler is called again. Raises Failure."""
    missing = call.params.get("more", 0)
    if type(missing) is not int or not 0 <= missing <= MAX_COMMAND:
        raise Failure("invalid", f"more is a number from 0 to {MAX_COMMAND}")
    if not missing:
        return True
    whole = bytearray(call.attachment)

    def on_data(data: memoryview) -> None:
        rest = data[max(0, size - len(whole)) :]
        whole.extend(data[: len(data) - len(rest)])
        call.acknowledge(len(data) - len(rest))
        if len(whole) < size:
            return
        call.attachment, call.params = whole, {**call.params, "more": 0}
        agent.attempt(handler, call)
        if rest and call.on_data is not None:
            call.on_data(rest)

    size = len(whole) + missing
    call.on_data = on_data
    call.on_end = lambda: call.fail(Failure("invalid", "the attachment ended before all of it had come"))
    return False


def start(agent: Agent, call: Call, request: spawn.Request) -> None:
    process = agent.processes.start(request)
    if request.background:
        call.answer({"process": process.number, "pid": process.pid})
        return
    call.on_cancel = call.on_close = process.abandon
    process.add_reader(call)


def exec_code(agent: Agent, call: Call) -> None:
    if not is_whole(agent, call, exec_code):
        return
    params = dict(call.params)
    env = {**agent.env, **(params.get("env") or {})}
    suffix, argv = find_command(params.pop("language", None), env.get("PATH") or DEFAULT_PATH)
    code, call.attachment = call.attachment, b""
    _run_file(agent, call, params, argv, suffix, code)


def _run_file(
    agent: Agent, call: Call, params: dict[str, Any], argv: list[str], suffix: str, code: bytes | bytearray | memoryview
) -> None:
    """Run code from a file of its own, which goes with the process."""
    folder = next((each for each in ("/tmp", agent.home) if posix.access(each, posix.W_OK)), agent.home)
    path = join(folder, f"code-{hexlify(posix.urandom(6)).decode()}{suffix}")
    fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
    try:
        view = memoryview(code)
        while view:
            view = view[posix.write(fd, view) :]
        request = agent.request({**params, "argv": [*argv, path]})
        request.clean_up = lambda: ignore_errors(posix.unlink, path)  # the code itself may have removed it
        start(agent, call, request)
    except BaseException:
        ignore_errors(posix.unlink, path)
        raise
    finally:
        posix.close(fd)


def find_command(
    language: object, path: str, find: Callable[[str, str], str | None] = find_program
) -> tuple[str, list[str]]:
    """Find the suffix of the code's file, and the command of an interpreter that the box has. Raises Failure."""
    name = language.lower() if type(language) is str else ""
    name = ALIASES.get(name, name)
    if name not in LANGUAGES:
        raise Failure("invalid", f"no language is called {language!r}; there are: {', '.join(sorted(LANGUAGES))}")
    suffix, commands = LANGUAGES[name]
    for argv in commands:
        if find(argv[0], path) is not None:
            return suffix, argv
    tried = " or ".join(argv[0] for argv in commands)
    raise Failure("no_interpreter", f"the box has no interpreter for {name}: {tried} is not on its PATH")


def attach(agent: Agent, call: Call) -> None:
    process = agent.processes.get(call.params.get("process"))

    def leave() -> None:
        process.remove_reader(call)
        call.fail(Failure("cancelled", "detached"))

    call.on_cancel = leave
    call.on_close = lambda: process.remove_reader(call)
    process.add_reader(call, replay=call.params.get("replay") is not False)


def give_input(agent: Agent, call: Call) -> None:
    """Take bytes for the input of a process; the answer comes when it has taken all of them."""
    agent.processes.get(call.params.get("process")).input.take(call)


def processes(agent: Agent, call: Call) -> None:
    known = agent.processes.all()
    room = _MAX_LISTED // max(1, len(known))
    env = bool(call.params.get("env"))
    call.answer({"processes": [process.info(room, env=env) for process in known]})


def _process_of(agent: Agent, call: Call) -> Process:
    if "call" not in call.params:
        return agent.processes.get(call.params.get("process"))
    other = call.channel.calls.get(call.params["call"])
    if other is None or not isinstance(other.ref, Process):
        raise Failure("no_process", "that call has no process, or it has ended")
    return other.ref


def signal(agent: Agent, call: Call) -> None:
    number = call.params.get("signal")
    if type(number) is not int or not 1 <= number <= 64:
        raise Failure("invalid", "signal is a number from 1 to 64")
    process = _process_of(agent, call)
    if call.params.get("wait") and not process.has_exited:
        process.on_exit.append(lambda: call.answer({}))
    process.send_signal(number, bool(call.params.get("tree")), alone=bool(call.params.get("alone")))
    if not call.params.get("wait") or process.has_exited:
        call.answer({})


def resize(agent: Agent, call: Call) -> None:
    _process_of(agent, call).resize(*spawn.size_of(call.params))
    call.answer({})


def set_env(agent: Agent, call: Call) -> None:
    """Add to the environment of all that is started from now on; the answer is all of it."""
    agent.env.update(spawn.env_of(call.params))
    call.answer({"env": agent.env})


def tree(agent: Agent, call: Call) -> None:
    """Pack or unpack in a process of its own: it may take long, and it runs under the right user."""
    from . import trees
    from .contents import path_of

    verb = "pack" if call.method == "tree_download" else "unpack"
    path = to_text(path_of(agent, call.params))
    if verb == "pack":
        posix.stat(path)
    argv = [*interpreter_command(agent), trees.__file__, verb, path]
    request = agent.request({"argv": argv, "stdin": verb == "unpack", "user": call.params.get("user")})
    start(agent, TreeCall(call), request)


def interpreter_command(agent: Agent) -> list[str]:
    """The command that runs our own interpreter again, also when a loader of ours started it."""
    if agent.interpreter:
        return agent.interpreter
    with open("/proc/self/cmdline", "rb") as file:
        argv = [to_text(part) for part in file.read().split(b"\0")]
    return argv[: argv.index(sys.argv[0])]


class TreeCall(Call):
    """Call that a process of ours serves: its output is the answer's stream, its stderr the error."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.channel, call.id, call.method, call.params, call.attachment)
        self.errors = bytearray()
        call.channel.calls[call.id] = self

    def send(self, data: Any, fd: int = 1) -> None:
        if fd == 1:
            super().send(data)
        else:
            self.errors += data

    def answer(self, exit: dict[str, Any]) -> None:
        if exit["exit_code"] == 0:
            super().answer({})
            return
        number, _, text = bytes(self.errors).decode("utf-8", "replace").partition(" ")
        path, _, reason = text.rpartition(": ")
        self.fail(failure_of(OSError(int(number), reason, path)) if number.isdigit() else Failure("failed", text))
