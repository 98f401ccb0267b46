"""The agent: accepts streams, dispatches calls, and ends the box when its time is over."""

from __future__ import annotations

import _socket
import posix
import sys
import time

from . import spawn
from .channel import Call, Channel, Failure, failure_of
from .loop import READ, Loop, Timer
from .process import Process, ProcessTable
from .spawn import DEFAULT_PATH, join, to_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

PROTOCOL = 1
VERSION = "0.1.0"
_MAX_CHANNELS = 64
_REOPEN_S = 0.05


class Agent:
    def __init__(self, config: dict[str, Any]) -> None:
        self.begin = time.monotonic()
        self.started = time.time()
        self.home = config.get("home") or posix.environ.get(b"HOME", b"/").decode("utf-8", "surrogateescape")
        self.cwd = config.get("cwd") or self.home
        self.env: dict[str, str] = dict(config.get("env") or {})
        self.loop = Loop()
        self.processes = ProcessTable(self.loop)
        self._token: str | None = config.get("token")
        self._channels: list[Channel] = []
        self._lifetime: Timer | None = None
        self._lifetime_end: float | None = None
        self._idle_s: float | None = None
        self._idle_timer: Timer | None = None
        self._last_use = self.begin
        self._set_lifetime(config.get("lifetime_s"))
        self._set_idle(config.get("idle_s"))

    # streams

    def listen(self, where: dict[str, Any]) -> None:
        """Take streams from an inherited listening socket, a path, a port, vsock, our own stdio, or a device."""
        if "stdio" in where:
            self._serve(posix.dup(0), posix.dup(1), last=True)
            null = posix.open("/dev/null", posix.O_RDWR)
            posix.dup2(null, 0)
            posix.dup2(2, 1)  # nothing else may write into the stream
            return
        if "device" in where:
            self._open_device(where["device"])
            return
        listener = _listener(where)
        self.loop.watch(listener.fileno(), READ, lambda _events: self._accept(listener))

    def _accept(self, listener: _socket.socket) -> None:
        try:
            fd, _address = listener._accept()  # type: ignore[attr-defined]
        except OSError:
            return
        if len(self._channels) >= _MAX_CHANNELS:
            posix.close(fd)
            return
        if listener.family == _socket.AF_INET:
            stream = _socket.socket(fileno=posix.dup(fd))
            stream.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            stream.close()
        self._serve(fd, fd)

    def _serve(self, read_fd: int, write_fd: int, last: bool = False) -> None:
        def on_close(channel: Channel) -> None:
            self._channels.remove(channel)
            if last:
                self.loop.stop()

        self._channels.append(Channel(self.loop, read_fd, write_fd, self._dispatch, on_close))

    def _open_device(self, path: str) -> None:
        """A character device has one stream after the other: when the host lets go, wait for it again."""

        def on_close(channel: Channel) -> None:
            self._channels.remove(channel)
            self.loop.later(_REOPEN_S, lambda: self._open_device(path))

        try:
            fd = posix.open(path, posix.O_RDWR | posix.O_NOCTTY | posix.O_CLOEXEC)
        except OSError:
            self.loop.later(_REOPEN_S, lambda: self._open_device(path))
            return
        if posix.isatty(fd):
            import tty

            tty.setraw(fd)
        self._channels.append(Channel(self.loop, fd, fd, self._dispatch, on_close))

    def run(self) -> None:
        self.loop.run()
        if posix.getpid() != 1:  # the end of PID 1 ends all others by itself
            for process in self.processes.all():
                process.kill_tree()

    # calls

    def _dispatch(self, call: Call) -> None:
        if not call.channel.greeted and call.method != "hello":
            call.channel.close()
            return
        self._last_use = time.monotonic()
        try:
            handler = _HANDLERS.get(call.method)
            if handler is not None:
                handler(self, call)
            elif call.method in _LAZY:
                _load(call.method)(self, call)
            else:
                error = {"code": -32601, "message": f"no method is called {call.method!r}"}
                call.close()
                call.channel.send({"jsonrpc": "2.0", "id": call.id, "error": error})
        except Failure as failure:
            call.fail(failure)
        except OSError as error:
            call.fail(failure_of(error))
        except Exception as error:  # a bug of ours must not end the box: the caller is told
            call.fail(Failure("failed", f"{type(error).__name__}: {error}"))

    def hello(self, call: Call) -> None:
        from _operator import _compare_digest

        token = call.params.get("token")
        if self._token is not None and not (
            type(token) is str and _compare_digest(token.encode(), self._token.encode())
        ):
            call.channel.close()
            return
        call.channel.greeted = True
        call.answer({"protocol": PROTOCOL, "agent": VERSION, "pid": posix.getpid(), "started": self.started})

    def ping(self, call: Call) -> None:
        call.answer({})

    def request(self, params: dict[str, Any]) -> spawn.Request:
        return spawn.Request(params, self.home, self.env, self.cwd)

    def exec(self, call: Call) -> None:
        self.start_process(call, self.request(call.params))

    def start_process(self, call: Call, request: spawn.Request) -> None:
        process = self.processes.start(request)
        if request.background:
            call.answer({"process": process.number, "pid": process.pid})
            return
        call.on_cancel = process.abandon
        call.on_close = process.abandon
        process.add_reader(call)

    def exec_code(self, call: Call) -> None:
        from binascii import hexlify

        from . import languages

        params = dict(call.params)
        env = {**self.env, **(params.get("env") or {})}
        suffix, argv = languages.command(params.pop("language", None), env.get("PATH") or DEFAULT_PATH)
        folder = next((each for each in ("/tmp", self.home) if posix.access(each, posix.W_OK)), self.home)
        path = join(folder, f"code-{hexlify(posix.urandom(6)).decode()}{suffix}")
        fd = posix.open(path, posix.O_WRONLY | posix.O_CREAT | posix.O_EXCL | posix.O_CLOEXEC, 0o644)
        try:
            view = memoryview(call.attachment)
            while view:
                view = view[posix.write(fd, view) :]
            request = self.request({**params, "argv": [*argv, path]})
            request.clean_up = lambda: _unlink(path)
            self.start_process(call, request)
        except BaseException:
            _unlink(path)
            raise
        finally:
            posix.close(fd)

    def attach(self, call: Call) -> None:
        process = self.processes.get(call.params.get("process"))
        call.on_close = lambda: process.remove_reader(call)

        def leave() -> None:
            process.remove_reader(call)
            call.fail(Failure("cancelled", "detached"))

        call.on_cancel = leave
        process.add_reader(call)

    def list_processes(self, call: Call) -> None:
        call.answer({"processes": [process.info() for process in self.processes.all()]})

    def _process_of(self, call: Call) -> Process:
        if "call" not in call.params:
            return self.processes.get(call.params.get("process"))
        other = call.channel.calls.get(call.params["call"])
        if other is None or not isinstance(other.ref, Process):
            raise Failure("no_process", "that call has no process, or it has ended")
        return other.ref

    def signal(self, call: Call) -> None:
        number = call.params.get("signal")
        if type(number) is not int or not 1 <= number <= 64:
            raise Failure("invalid", "signal is a number from 1 to 64")
        self._process_of(call).send_signal(number, bool(call.params.get("tree")))
        call.answer({})

    def resize(self, call: Call) -> None:
        self._process_of(call).resize(*spawn.size_of(call.params))
        call.answer({})

    def tree(self, call: Call) -> None:
        """Pack or unpack in a process of its own: it may take long, and it runs under the right user."""
        from . import trees
        from .paths import path_of

        verb = "pack" if call.method == "tree_download" else "unpack"
        path = to_text(path_of(self, call.params))
        if verb == "pack":
            posix.stat(path)
        argv = [*_interpreter(), trees.__file__, verb, path]
        request = self.request({"argv": argv, "stdin": verb == "unpack", "user": call.params.get("user")})
        self.start_process(TreeCall(call), request)

    # the end

    def set_lifetime(self, call: Call) -> None:
        for name in ("lifetime_s", "idle_s"):
            value = call.params.get(name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < 1e10):
                raise Failure("invalid", f"{name} is a positive number of seconds, or null for never")
        if "lifetime_s" in call.params:
            self._set_lifetime(call.params["lifetime_s"])
        if "idle_s" in call.params:
            self._set_idle(call.params["idle_s"])
        left = None if self._lifetime_end is None else max(0.0, self._lifetime_end - time.monotonic())
        call.answer({"lifetime_s": left, "idle_s": self._idle_s})

    def _set_lifetime(self, seconds: float | None) -> None:
        if self._lifetime is not None:
            self._lifetime.cancel()
        self._lifetime = self._lifetime_end = None
        if seconds:
            self._lifetime_end = time.monotonic() + seconds
            self._lifetime = self.loop.later(seconds, self.loop.stop)

    def _set_idle(self, seconds: float | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = None
        self._idle_s = seconds or None
        if self._idle_s:
            self._idle_timer = self.loop.later(self._idle_s, self._check_idle)

    def _check_idle(self) -> None:
        assert self._idle_s is not None
        busy = self.processes.any_running() or any(channel.calls for channel in self._channels)
        if busy:
            self._last_use = time.monotonic()
        left = self._last_use + self._idle_s - time.monotonic()
        if left <= 0:
            self.loop.stop()
        else:
            self._idle_timer = self.loop.later(left, self._check_idle)

    def sync_clock(self, call: Call) -> None:
        value = call.params.get("time")
        if not isinstance(value, (int, float)):
            raise Failure("invalid", "time is a number of seconds")
        time.clock_settime(time.CLOCK_REALTIME, value)
        call.answer({})

    def shutdown(self, call: Call) -> None:
        call.answer({})
        call.channel.when_sent(self.loop.stop)


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


def _listener(where: dict[str, Any]) -> _socket.socket:
    if "fd" in where:
        listener = _socket.socket(fileno=where["fd"])
    elif "unix" in where:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        path: str = where["unix"]
        if path.startswith("@"):
            listener.bind("\0" + path[1:])
        else:
            _unlink(path)
            listener.bind(path)
    elif "tcp" in where:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        host, port = where["tcp"]
        listener.bind((host, port))
    else:
        listener = _socket.socket(_socket.AF_VSOCK, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.bind((_socket.VMADDR_CID_ANY, where["vsock"]))
    listener.setblocking(False)
    posix.set_inheritable(listener.fileno(), False)
    if "fd" not in where:
        listener.listen(_MAX_CHANNELS)
    return listener


def _interpreter() -> list[str]:
    """The command that runs our own interpreter again, also when a loader of ours started it."""
    with open("/proc/self/cmdline", "rb") as file:
        argv = [to_text(part) for part in file.read().split(b"\0")]
    return argv[: argv.index(sys.argv[0])]


def _unlink(path: str) -> None:
    try:
        posix.unlink(path)
    except OSError:
        pass


def _load(method: str) -> Callable[[Agent, Call], None]:
    """Import what is rarely needed when it is needed: the agent starts in a few milliseconds without it."""
    module_name, _, function = _LAZY[method].partition(":")
    module = __import__(__package__ + "." + module_name, fromlist=[function])
    handler: Callable[[Agent, Call], None] = getattr(module, function)
    _HANDLERS[method] = handler
    return handler


_HANDLERS: dict[str, Callable[[Agent, Call], None]] = {
    "hello": Agent.hello,
    "ping": Agent.ping,
    "exec": Agent.exec,
    "exec_code": Agent.exec_code,
    "attach": Agent.attach,
    "processes": Agent.list_processes,
    "signal": Agent.signal,
    "resize": Agent.resize,
    "tree_download": Agent.tree,
    "tree_upload": Agent.tree,
    "set_lifetime": Agent.set_lifetime,
    "sync_clock": Agent.sync_clock,
    "shutdown": Agent.shutdown,
}

_LAZY = {
    "read_file": "contents:read_file",
    "write_file": "contents:write_file",
    "stat": "files:stat_path",
    "list_dir": "files:list_dir",
    "make_dir": "files:make_dir",
    "move": "files:move",
    "remove": "files:remove",
    "chmod": "files:chmod",
    "chown": "files:chown",
    "symlink": "files:symlink",
    "xattr": "files:xattr",
    "watch": "watch:watch",
    "metrics": "metrics:metrics",
    "connect": "tunnel:connect",
}
