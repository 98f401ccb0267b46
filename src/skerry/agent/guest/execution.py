"""The calls about processes."""

from __future__ import annotations

import posix
import sys
from binascii import hexlify

from . import spawn
from .channel import Call, Failure, failure_of
from .process import Process
from .spawn import DEFAULT_PATH, join, to_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent


def exec(agent: Agent, call: Call) -> None:
    _start(agent, call, _request(agent, call.params))


def _request(agent: Agent, params: dict[str, Any]) -> spawn.Request:
    return spawn.Request(params, agent.home, agent.env, agent.cwd)


def _start(agent: Agent, call: Call, request: spawn.Request) -> None:
    process = agent.processes.start(request)
    if request.background:
        call.answer({"process": process.number, "pid": process.pid})
        return
    call.on_cancel = process.abandon
    call.on_close = process.abandon
    process.add_reader(call)


def exec_code(agent: Agent, call: Call) -> None:
    from . import languages

    params = dict(call.params)
    env = {**agent.env, **(params.get("env") or {})}
    suffix, argv = languages.command(params.pop("language", None), env.get("PATH") or DEFAULT_PATH)
    folder = next((each for each in ("/tmp", agent.home) if posix.access(each, posix.W_OK)), agent.home)
    path = join(folder, f"code-{hexlify(posix.urandom(6)).decode()}{suffix}")
    fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
    try:
        view = memoryview(call.attachment)
        while view:
            view = view[posix.write(fd, view) :]
        request = _request(agent, {**params, "argv": [*argv, path]})
        request.clean_up = lambda: _unlink(path)
        _start(agent, call, request)
    except BaseException:
        _unlink(path)
        raise
    finally:
        posix.close(fd)


def _unlink(path: str) -> None:
    try:
        posix.unlink(path)
    except OSError:
        pass  # the code itself may have removed it


def attach(agent: Agent, call: Call) -> None:
    process = agent.processes.get(call.params.get("process"))

    def leave() -> None:
        process.remove_reader(call)
        call.fail(Failure("cancelled", "detached"))

    call.on_cancel = leave
    call.on_close = lambda: process.remove_reader(call)
    process.add_reader(call)


def processes(agent: Agent, call: Call) -> None:
    call.answer({"processes": [process.info() for process in agent.processes.all()]})


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
    _process_of(agent, call).send_signal(number, bool(call.params.get("tree")))
    call.answer({})


def resize(agent: Agent, call: Call) -> None:
    _process_of(agent, call).resize(*spawn.size_of(call.params))
    call.answer({})


def set_env(agent: Agent, call: Call) -> None:
    """More for the environment of all that is started from now on; the answer is all of it."""
    agent.env.update(spawn.env_of(call.params))
    call.answer({"env": agent.env})


def tree(agent: Agent, call: Call) -> None:
    """Pack or unpack in a process of its own: it may take long, and it runs under the right user."""
    from . import trees
    from .paths import path_of

    verb = "pack" if call.method == "tree_download" else "unpack"
    path = to_text(path_of(agent, call.params))
    if verb == "pack":
        posix.stat(path)
    argv = [*_interpreter(), trees.__file__, verb, path]
    request = _request(agent, {"argv": argv, "stdin": verb == "unpack", "user": call.params.get("user")})
    _start(agent, TreeCall(call), request)


def _interpreter() -> list[str]:
    """The command that runs our own interpreter again, also when a loader of ours started it."""
    with open("/proc/self/cmdline", "rb") as file:
        argv = [to_text(part) for part in file.read().split(b"\0")]
    return argv[: argv.index(sys.argv[0])]


class TreeCall(Call):
    """A call that a process of ours serves: its output is the answer's stream, its stderr the error."""

    __slots__ = ("errors",)

    def __init__(self, call: Call) -> None:
        super().__init__(call.channel, call.id, call.method, call.params, call.attachment)
        self.errors = bytearray()
        call.channel.calls[call.id] = self

    def send(self, data: bytes | bytearray | memoryview, fd: int = 1) -> None:
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
