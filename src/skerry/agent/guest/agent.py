"""The agent: takes streams, dispatches calls, and ends the box when its time is over."""

from __future__ import annotations

import _socket
import posix
import sys
import time

from .channel import LOOKING, Call, Channel, Failure, failure_of
from .loop import READ, Loop, Timer, ignore_errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .interpreters import Context
    from .network import Network
    from .process import ProcessTable
    from .service import Service
    from .spawn import Request
    from .watch import Inotify, KeptWatch

PROTOCOL = 1
VERSION = "0.1.0"
_MAX_CHANNELS = 128
BACKLOG = 1024  # how many more streams may wait in the kernel's queue, until one of those ends
_REOPEN_S = 0.05
_FIRST_STREAM_S = 30
HOST_CID = 2
_WARM_UP_S = 0.005
_FIRST_CALLS = ("exec", "read_file")
_MAX_GRACE_S = 3600
_LOOK_S = 0.01
_GO_ON_S = 60
_STOPPED = 143


class Agent:
    own_calls: dict[str, Callable[[Any, Call], None]] = {}  # noqa: RUF012 (typing takes too long to import)
    """Calls that a subclass adds to those of every agent, or answers in its own way."""
    interpreter: list[str] | None = None
    """Command of our own interpreter, if it is not the one that runs us."""

    def __init__(self, config: dict[str, Any], loop: Loop | None = None) -> None:
        self.loop = loop or Loop()
        if loop is None:
            self.loop.handle_signals(self._end_by_signal)
        self.begin = self.loop.now()
        self.started = self.loop.wall_clock()
        self.home = config.get("home") or posix.environ.get(b"HOME", b"/").decode("utf-8", "surrogateescape")
        folder = config.get("image_cwd") or "/"
        is_for_us = folder != "/" and posix.access(folder, posix.X_OK)
        self.cwd = config.get("cwd") or (folder if is_for_us else self.home)
        self.env: dict[str, str] = dict(config.get("env") or {})
        self.image_command: list[str] | None = config.get("image_command")
        self.service: Service | None = None
        self.contexts: dict[str, Context] = {}
        self.network: Network | None = None  # the last one that was asked for, which may have ended
        self._has_rules = bool(config.get("rules"))
        self.watches: list[Inotify] = []
        """Watches that follow new folders."""
        self.kept_watches: dict[int, KeptWatch] = {}
        self.watch_count = 0
        self.exit_code = 0
        self._processes: ProcessTable | None = None
        self.token_digest: str | None = config.get("token_digest")
        self._channels: list[Channel] = []
        self._full: Callable[[], None] | None = None  # way to take streams again, while there are as many as may be
        self._outside_only = False
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

    def real_path(self, path: bytes) -> bytes:
        """Where a path of the box is for us."""
        return path

    def box_path(self, path: bytes) -> bytes:
        return path

    def target_of(self, link: bytes) -> bytes:
        """Where a link leads for us, through all others. Raises OSError where that is nowhere."""
        from os.path import realpath

        return realpath(link)

    def write(self, fd: int, data: memoryview) -> int:
        return posix.write(fd, data)

    def listening_ports(self) -> set[int] | None:
        """Ports that somebody in the box listens on; None if nobody knows."""
        from .service import listening_ports

        return listening_ports()

    def request(self, params: dict[str, Any]) -> Request:
        """Check the parameters of a process to start. Raises Failure."""
        from .spawn import Request

        return Request(params, self.home, self.env, self.cwd)

    def listen(self, where: dict[str, Any]) -> None:
        """Take streams from a socket, our stdio or a device; with `once` a single one, with which the agent ends."""
        if "stdio" in where:
            self.serve(posix.dup(0), posix.dup(1), self.loop.stop)
            posix.dup2(posix.open("/dev/null", posix.O_RDWR), 0)
            posix.dup2(2, 1)  # nothing else may write into the stream
            return
        if "device" in where:
            self._open_device(where["device"])
            return
        if "tcp" in where and self.token_digest is None:
            raise SystemExit("a TCP port is open to every user of the host: the agent needs a token_digest")
        once = bool(where.get("once"))
        self._outside_only = bool(where.get("outside"))
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
        is_host = listener.family != _socket.AF_VSOCK or address[0] == HOST_CID
        if not is_host or (self._outside_only and not _is_from_outside(fd)):
            posix.close(fd)
            return
        if once:
            self.loop.forget(listener.fileno())
        elif len(self._channels) + 1 >= _MAX_CHANNELS:
            self.loop.forget(listener.fileno())
            self._full = lambda: self._watch(listener)
        if listener.family == _socket.AF_INET:
            stream = _socket.socket(fileno=fd)
            stream.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
            stream.detach()
        self.serve(fd, fd, self.loop.stop if once else None)

    def serve(self, read_fd: int, write_fd: int, on_end: Callable[[], None] | None = None) -> None:
        def on_close(channel: Channel) -> None:
            self._channels.remove(channel)
            if self._full is not None:
                self._full()
                self._full = None
            self._last_use = max(self._last_use, channel.last_use)
            if on_end is not None:
                on_end()

        self._channels.append(self.new_channel(read_fd, write_fd, on_close))

    def new_channel(self, read_fd: int, write_fd: int, on_close: Callable[[Channel], None]) -> Channel:
        return Channel(self.loop, read_fd, write_fd, self._dispatch, on_close)

    def _open_device(self, path: str) -> None:
        """Serve a character device, which has one stream after the other: when the host lets go, wait for it again."""

        def open_again() -> None:
            self.loop.later(_REOPEN_S, lambda: self._open_device(path))

        try:
            fd = posix.open(path, posix.O_RDWR | posix.O_NOCTTY | posix.O_CLOEXEC)
        except OSError:
            open_again()
            return
        if posix.isatty(fd):
            import tty

            tty.setraw(fd)
        self.serve(fd, fd, open_again)

    def run(self) -> None:
        self.loop.run()
        if posix.getpid() != 1:  # the end of PID 1 ends all others by itself
            for process in self.processes.all():
                process.kill_tree()
            self.loop.turn()

    def _dispatch(self, call: Call) -> None:
        if not call.channel.greeted and call.method != "hello":
            call.channel.close()
            return
        self.attempt(Agent._handle, call)

    def _handle(self, call: Call) -> None:
        handler = self.own_calls.get(call.method) or _HANDLERS.get(call.method) or _load(call.method)
        if handler is not None:
            handler(self, call)
        else:
            error = {"code": -32601, "message": f"no method is called {call.method!r}"}
            call.close()
            call.channel.send({"jsonrpc": "2.0", "id": call.id, "error": error})

    def attempt(self, handler: Callable[[Any, Call], None], call: Call) -> None:
        """Serve a call; whatever fails is its answer."""
        try:
            handler(self, call)
        except Failure as failure:
            call.fail(failure)
        except UnicodeError:
            call.fail(Failure("invalid", "a text in the request is not UTF-8"))
        except OSError as error:
            call.fail(failure_of(error))
        except Exception as error:  # a bug of ours must not end the box: the caller is told
            call.fail(Failure("failed", f"{type(error).__name__}: {error}"))

    def hello(self, call: Call) -> None:
        if self.token_digest is not None and not _has_digest(call.params.get("token"), self.token_digest):
            call.channel.close()
            return
        call.channel.greeted = True
        call.answer({"protocol": PROTOCOL, "agent": VERSION, "pid": posix.getpid(), "started": self.started})
        if self._has_rules and "network" not in _HANDLERS:  # it is asked for next, by the gate
            call.channel.when_sent(lambda: self._warm_up("network"))
        if _FIRST_CALLS[0] not in _HANDLERS:
            self.loop.later(_WARM_UP_S, self._warm_up)

    def _warm_up(self, *methods: str) -> None:
        """Import the modules of these calls, or of the first real ones, while the host reads its first answer."""
        for method in methods or _FIRST_CALLS:
            _load(method)

    def ping(self, call: Call) -> None:
        call.answer({})

    def unused(self, call: Call) -> None:
        call.answer({"unused_s": max(0.0, self.loop.now() - self._last_used())})

    def set_lifetime(self, call: Call) -> None:
        for name in ("lifetime_s", "idle_s"):
            value = call.params.get(name)
            if value is not None and (type(value) not in (int, float) or not 0 < value < 1e10):
                raise Failure("invalid", f"{name} is a positive number of seconds, or null for never")
        if "lifetime_s" in call.params:
            self._set_lifetime(call.params["lifetime_s"])
        if "idle_s" in call.params:
            self._set_idle(call.params["idle_s"])
        left = None if self._lifetime_end is None else max(0.0, self._lifetime_end - self.loop.now())
        call.answer({"lifetime_s": left, "idle_s": self._idle_s})

    def _set_lifetime(self, seconds: float | None) -> None:
        if self._lifetime is not None:
            self._lifetime.cancel()
        self._lifetime_end = self.loop.now() + seconds if seconds else None
        self._lifetime = self.loop.later(seconds, self.loop.stop) if seconds else None

    def _set_idle(self, seconds: float | None) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_s = seconds or None
        self._idle_timer = self.loop.later(seconds, self._check_idle) if seconds else None

    def _check_idle(self) -> None:
        assert self._idle_s is not None
        left = self._last_used() + self._idle_s - self.loop.now()
        if left <= 0:
            self.loop.stop()
        else:
            self._idle_timer = self.loop.later(left, self._check_idle)

    def _last_used(self) -> float:
        """Time of the last use: now, while a process runs or a call is open; else the end of the last of them."""
        ends = [self._last_use, *(channel.last_use for channel in self._channels)]
        if self._processes is not None:
            ends.append(self.loop.now() if self._processes.any_running() else self._processes.last_end)
        if self.service is not None and self.service.is_kept_up:
            ends.append(self.loop.now())
        if any(call.method not in LOOKING for channel in self._channels for call in channel.calls.values()):
            ends.append(self.loop.now())
        return max(ends)

    def sync_clock(self, call: Call) -> None:
        value = call.params.get("time")
        if not isinstance(value, (int, float)):
            raise Failure("invalid", "time is a number of seconds")
        time.clock_settime(time.CLOCK_REALTIME, value)
        call.answer({})

    def terminate(self, call: Call) -> None:
        """Ask all processes of the box to end, and answer when they have, or when `grace_s` are over. Whoever asks ends
        the box then. If it is there yet after a while, they did not come to it, and a service is started again."""

        def then() -> None:
            call.answer({})
            if self.service is not None:
                self.loop.later(_GO_ON_S, self.service.go_on)

        self._terminate(_grace_of(call.params) or 0, then)

    def shutdown(self, call: Call) -> None:
        """End the box now; or with `grace_s` ask its processes to end first, and exit with the code of a stop."""
        grace_s = _grace_of(call.params)
        call.answer({})
        call.channel.when_sent(lambda: self._end_gently(grace_s))

    def _end_by_signal(self) -> None:
        """End as one that was stopped by hand, and can be started again: its time is not over."""
        self.exit_code = _STOPPED
        self.loop.stop()

    def _end_gently(self, grace_s: float | None) -> None:
        if grace_s is None:
            self.loop.stop()
            return
        self.exit_code = _STOPPED
        self._terminate(grace_s, self.loop.stop)

    def _terminate(self, grace_s: float, then: Callable[[], None]) -> None:
        if self.service is not None:
            self.service.stop_restarting()
        if self._processes is None:  # nothing was ever started
            then()
            return
        self._processes.terminate()
        self.wait_until(self._processes.all_ended, grace_s, then)

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float, then: Callable[[], None]) -> None:
        end = self.loop.now() + timeout_s

        def look() -> None:
            if self.loop.now() >= end or is_done():
                then()
            else:
                self.loop.later(_LOOK_S, look)

        look()


def _grace_of(params: dict[str, Any]) -> float | None:
    grace_s: float | None = params.get("grace_s")
    if grace_s is not None and (type(grace_s) not in (int, float) or not 0 <= grace_s <= _MAX_GRACE_S):
        raise Failure("invalid", f"grace_s is a number from 0 to {_MAX_GRACE_S}")
    return grace_s


def _listener(where: dict[str, Any]) -> _socket.socket:
    if "fd" in where:
        listener = _socket.socket(fileno=where["fd"])
    elif "unix" in where:
        listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        path: str = where["unix"]
        if path.startswith("@"):
            listener.bind("\0" + path[1:])
        else:
            ignore_errors(posix.unlink, path)
            listener.bind(path)
            posix.chmod(path, 0o666)  # whoever dials from outside may have another uid
    elif "tcp" in where:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
        listener.bind(tuple(where["tcp"]))
    else:
        listener = _socket.socket(_socket.AF_VSOCK, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        listener.bind((_socket.VMADDR_CID_ANY, where["vsock"]))
    listener.setblocking(False)
    posix.set_inheritable(listener.fileno(), False)
    if "fd" not in where:
        listener.listen(BACKLOG)
    return listener


def _has_digest(token: object, digest: str) -> bool:
    from _blake2 import blake2b
    from _operator import _compare_digest

    if type(token) is not str:
        return False
    return _compare_digest(blake2b(token.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest(), digest)


def _is_from_outside(fd: int) -> bool:
    """Whether a stream comes from outside the box, or from a process that was started from outside: code of the box is
    a descendant of ours. Some kernels name ourselves in the place of who connected."""
    stream = _socket.socket(fileno=fd)
    peer = int.from_bytes(stream.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)[:4], sys.byteorder)
    stream.detach()
    if peer in (0, posix.getpid()):
        return True
    try:
        with open(f"/proc/{peer}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].split()[1] == b"0"
    except OSError:
        return False  # it has ended


def _load(method: str) -> Callable[[Agent, Call], None] | None:
    """Import a call's module when it is needed: the agent answers within a few milliseconds without it."""
    for name, methods in _LAZY.items():
        if method in methods.split():
            module = __import__(f"{__package__}.{name}", fromlist=[method])
            _HANDLERS[method] = getattr(module, _FUNCTIONS.get(method, method))
    return _HANDLERS.get(method)


def load_all() -> None:
    """Import the modules of all calls."""
    for methods in _LAZY.values():
        for method in methods.split():
            _load(method)


_HANDLERS: dict[str, Callable[[Agent, Call], None]] = {
    name: getattr(Agent, name)
    for name in ("hello", "ping", "unused", "set_lifetime", "sync_clock", "terminate", "shutdown")
}

_LAZY = {
    "execution": "exec exec_code attach input processes signal resize set_env tree_download tree_upload",
    "contents": "read_file write_file",
    "files": "stat list_dir make_dir move remove chmod chown symlink xattr",
    "details": "user",
    "watch": "watch watch_events unwatch",
    "proc": "metrics",
    "tunnel": "connect",
    "network": "network resolved take refuse",
    "service": "serve service service_log",
    "interpreters": "interpreter interpreters interpret end_interpreter",
}
# functions that are not called as their method is
_FUNCTIONS = {"stat": "stat_path", "tree_download": "tree", "tree_upload": "tree", "input": "give_input"}
