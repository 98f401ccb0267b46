"""The agent: accepts streams, dispatches calls, and ends the box when its time is over."""

from __future__ import annotations

import _socket
import posix
import time

from .channel import Call, Channel, Failure, failure_of
from .loop import READ, Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .process import ProcessTable

PROTOCOL = 1
VERSION = "0.1.0"
_MAX_CHANNELS = 64
_REOPEN_S = 0.05
_FIRST_STREAM_S = 30
_HOST_CID = 2
_WARM_UP_S = 0.005
_MAX_GRACE_S = 60
_LOOK_S = 0.01
_SIGTERM = 15
_STOPPED = 143


class Agent:
    own_calls: dict[str, Callable[[Any, Call], None]] = {}  # noqa: RUF012 (typing takes too long to import)
    """Calls that a subclass adds to those of every agent, or answers in its own way."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.begin = time.monotonic()
        self.started = time.time()
        self.home = config.get("home") or posix.environ.get(b"HOME", b"/").decode("utf-8", "surrogateescape")
        folder = config.get("image_cwd") or "/"
        is_for_us = folder != "/" and posix.access(folder, posix.X_OK)
        self.cwd = config.get("cwd") or (folder if is_for_us else self.home)
        self.env: dict[str, str] = dict(config.get("env") or {})
        self.exit_code = 0
        self.loop = Loop()
        self._processes: ProcessTable | None = None
        self._token: str | None = config.get("token")
        self._channels: list[Channel] = []
        self._lifetime: Timer | None = None
        self._lifetime_end: float | None = None
        self._idle_s: float | None = None
        self._idle_timer: Timer | None = None
        self._last_use = self.begin
        self._set_lifetime(config.get("lifetime_s"))
        self._set_idle(config.get("idle_s"))

    @property
    def processes(self) -> ProcessTable:
        if self._processes is None:
            from .process import ProcessTable

            self._processes = ProcessTable(self.loop)
        return self._processes

    # streams

    def listen(self, where: dict[str, Any]) -> None:
        """Take streams from an inherited listening socket, a path, a port, vsock, our own stdio, or a device; with
        `once` a single one, with which the agent ends."""
        if "stdio" in where:
            self._serve(posix.dup(0), posix.dup(1), last=True)
            null = posix.open("/dev/null", posix.O_RDWR)
            posix.dup2(null, 0)
            posix.dup2(2, 1)  # nothing else may write into the stream
            return
        if "device" in where:
            self._open_device(where["device"])
            return
        once = bool(where.get("once"))
        self._watch(_listener(where), once)
        if once:
            self.loop.later(_FIRST_STREAM_S, lambda: None if self._channels else self.loop.stop())

    def _watch(self, listener: _socket.socket, once: bool = False) -> None:
        self.loop.watch(listener.fileno(), READ, lambda _events: self._accept(listener, once))

    def _accept(self, listener: _socket.socket, once: bool) -> None:
        try:
            fd, address = listener._accept()  # type: ignore[attr-defined]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # no descriptor left: the listener would be ready for ever, so look again later
            self.loop.forget(listener.fileno())
            self.loop.later(_REOPEN_S, lambda: self._watch(listener, once))
            return
        is_host = listener.family != _socket.AF_VSOCK or address[0] == _HOST_CID
        if len(self._channels) >= _MAX_CHANNELS or not is_host:
            posix.close(fd)
            return
        if once:
            self.loop.forget(listener.fileno())
        if listener.family == _socket.AF_INET:
            stream = _socket.socket(fileno=posix.dup(fd))
            stream.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            stream.close()
        self._serve(fd, fd, last=once)

    def _serve(self, read_fd: int, write_fd: int, last: bool = False) -> None:
        def on_close(channel: Channel) -> None:
            self._forget(channel)
            if last:
                self.loop.stop()

        self._channels.append(Channel(self.loop, read_fd, write_fd, self._dispatch, on_close))

    def _forget(self, channel: Channel) -> None:
        self._channels.remove(channel)
        self._last_use = max(self._last_use, channel.last_use)

    def _open_device(self, path: str) -> None:
        """A character device has one stream after the other: when the host lets go, wait for it again."""

        def on_close(channel: Channel) -> None:
            self._forget(channel)
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
            self.loop.turn()

    # calls

    def _dispatch(self, call: Call) -> None:
        if not call.channel.greeted and call.method != "hello":
            call.channel.close()
            return
        try:
            handler = self.own_calls.get(call.method) or _HANDLERS.get(call.method)
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
        except UnicodeError:
            call.fail(Failure("invalid", "a text in the request is not UTF-8"))
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
        if self._processes is None:
            self.loop.later(_WARM_UP_S, self._warm_up)

    def _warm_up(self) -> None:
        """The host has its first answer and asks nothing yet: import what its first real calls will need."""
        for method in ("exec", "read_file"):
            _load(method)

    def ping(self, call: Call) -> None:
        call.answer({})

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
        left = self._last_used() + self._idle_s - time.monotonic()
        if left <= 0:
            self.loop.stop()
        else:
            self._idle_timer = self.loop.later(left, self._check_idle)

    def _last_used(self) -> float:
        """Now, while a process runs or a call is open; else when the last of them ended."""
        ends = [self._last_use, *(channel.last_use for channel in self._channels)]
        if self._processes is not None:
            ends.append(time.monotonic() if self._processes.any_running() else self._processes.last_end)
        if any(channel.calls for channel in self._channels):
            ends.append(time.monotonic())
        return max(ends)

    def sync_clock(self, call: Call) -> None:
        value = call.params.get("time")
        if not isinstance(value, (int, float)):
            raise Failure("invalid", "time is a number of seconds")
        time.clock_settime(time.CLOCK_REALTIME, value)
        call.answer({})

    def shutdown(self, call: Call) -> None:
        """End the box now; or with `grace_s` ask its processes to end first, and tell whoever started us that this was
        a stop, after which it may be started again."""
        grace_s = call.params.get("grace_s")
        if grace_s is not None and (type(grace_s) not in (int, float) or not 0 <= grace_s <= _MAX_GRACE_S):
            raise Failure("invalid", f"grace_s is a number from 0 to {_MAX_GRACE_S}")
        call.answer({})
        if grace_s is None:
            call.channel.when_sent(self.loop.stop)
        else:
            call.channel.when_sent(lambda: self._stop_gently(grace_s))

    def _stop_gently(self, grace_s: float) -> None:
        self.exit_code = _STOPPED
        end = time.monotonic() + grace_s
        for process in self.processes.all():
            process.send_signal(_SIGTERM, True)

        def look() -> None:
            if time.monotonic() >= end or not self.processes.any_running():
                self.loop.stop()
            else:
                self.loop.later(_LOOK_S, look)

        look()


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
            posix.chmod(path, 0o666)  # whoever dials from outside may have another uid
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


def _unlink(path: str) -> None:
    try:
        posix.unlink(path)
    except OSError:
        pass


def _load(method: str) -> Callable[[Agent, Call], None]:
    """Import a call's module when it is needed: the agent answers within a few milliseconds without it."""
    module_name, _, function = _LAZY[method].partition(":")
    module = __import__(__package__ + "." + module_name, fromlist=[function])
    handler: Callable[[Agent, Call], None] = getattr(module, function)
    _HANDLERS[method] = handler
    return handler


_HANDLERS: dict[str, Callable[[Agent, Call], None]] = {
    "hello": Agent.hello,
    "ping": Agent.ping,
    "set_lifetime": Agent.set_lifetime,
    "sync_clock": Agent.sync_clock,
    "shutdown": Agent.shutdown,
}

_LAZY = {
    "exec": "execution:exec",
    "exec_code": "execution:exec_code",
    "attach": "execution:attach",
    "processes": "execution:processes",
    "signal": "execution:signal",
    "resize": "execution:resize",
    "set_env": "execution:set_env",
    "tree_download": "execution:tree",
    "tree_upload": "execution:tree",
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
