"""The agent of a mock box: the real one, on the test's event loop, with files, processes and time of our own."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from skerry.agent.guest import execution, tunnel
from skerry.agent.guest import spawn as guest_spawn
from skerry.agent.guest.agent import Agent
from skerry.agent.guest.channel import Call, Channel, Failure
from skerry.model import caches
from skerry.providers.mock.clock import BoxLoop
from skerry.providers.mock.files import box_path, box_text
from skerry.providers.mock.process import Kernel

if TYPE_CHECKING:
    from skerry.providers.mock.host import Box

HOME = "/home/user"
USERS = {"root": 0, "user": 1000}
_AWAITED = {"exec", "exec_code", "attach", "terminate"}
_CHANGES = dict.fromkeys(("write_file", "chmod", "tree_upload"), True) | dict.fromkeys(
    ("make_dir", "move", "remove", "chown", "symlink"), False
)
"""Calls that change a file, and whether they follow a link to it."""
_GARBAGE = b"\x00 this is no frame \xff\n"


def uid_of(user: str | None) -> int:
    """The number of a user given by name, UID or UID:GID. Raises Failure."""
    name = (user or "user").partition(":")[0]
    if name in USERS or name.isdigit():
        return USERS[name] if name in USERS else int(name)
    raise Failure("no_user", f"user: no user is called {name!r} in the box; give a UID or UID:GID")


class BoxChannel(Channel):
    """A stream whose agent may hang, or speak nonsense."""

    def __init__(self, box: Box, *args: Any) -> None:
        self._box = box
        super().__init__(*args)

    def _on_frame(self, message: dict[str, Any], attachment: bytes | bytearray | memoryview) -> None:
        if not self._box.hangs:
            super()._on_frame(message, attachment)

    def send(self, message: dict[str, Any], attachment: Any = None) -> None:
        if "error" in message:
            message["error"]["message"] = box_text(message["error"]["message"])
        if self._box.speaks_garbage and "protocol" not in message.get("result", {}):
            self._out.append(memoryview(_GARBAGE))
        super().send(message, attachment)


class BoxAgent(Agent):
    """Serves one box: its files are below a folder, and its processes are coroutines."""

    interpreter = ["trees"]  # noqa: RUF012

    def __init__(self, box: Box) -> None:
        self.box, spec = box, box.spec
        env = {"PATH": "/usr/bin:/bin", "HOME": HOME, "USER": "user", "LANG": "C.UTF-8"}
        self.box_loop = BoxLoop(box.host.clock, box.halt, self._is_awaited)
        config = {"home": HOME, "cwd": spec.cwd or HOME, "lifetime_s": spec.lifetime_s, "idle_s": spec.idle_s}
        super().__init__({**config, "env": {**env, **caches.environment(spec), **spec.env}}, self.box_loop)
        self.kernel = self._processes = Kernel(box, self.box_loop)
        self.write = box.files.write  # type: ignore[method-assign]
        self._numbers = itertools.count(1)

    def _is_awaited(self) -> bool:
        return any(call.method in _AWAITED for channel in self._channels for call in channel.calls.values())

    def new_channel(self, read_fd: int, write_fd: int, on_close: Callable[[Channel], None]) -> Channel:
        return BoxChannel(self.box, self.loop, read_fd, write_fd, self._dispatch, on_close)

    def dial(self) -> int:
        """The host's end of a new stream."""
        self.box_loop.attach()
        near, far = socket.socketpair()
        fd = far.detach()
        self.serve(fd, fd)
        return near.detach()

    def halt(self) -> list[asyncio.Task[int]]:
        """End everything; gives the tasks of its processes."""
        self.box_loop.clock.boxes.pop(self.box_loop, None)
        self.box_loop.resume()
        for channel in list(self._channels):
            channel.close()
        return self.kernel.halt()

    def wait_until(self, is_done: Callable[[], bool], timeout_s: float, then: Callable[[], None]) -> None:
        """Wait for the ends of processes, for which no time has to pass."""

        def look() -> None:
            if timer.action is not None and is_done():
                timer.cancel()
                then()

        timer = self.box_loop.pull(timeout_s, then)
        for process in self.kernel.running.values():
            process.at_end.callback(lambda: self.box_loop.soon(look))
        look()

    def _dispatch(self, call: Call) -> None:
        self._call = call
        super()._dispatch(call)

    def real_path(self, path: bytes) -> bytes:
        method, params = self._call.method, self._call.params
        follow = _CHANGES.get(method, method != "stat" or bool(params.get("follow")))
        place = self.box.files.locate(path, follow=follow, change=method in _CHANGES)
        if method == "write_file":
            self.box.files.check_writable(place)
        return place

    def box_path(self, path: bytes) -> bytes:
        return box_path(path)

    def request(self, params: dict[str, Any]) -> guest_spawn.Request:
        user, own = params.get("user"), self.box.files.uid
        request = super().request({**params, "user": None})
        if user is not None and (uid := uid_of(str(user))) != own:
            if own != 0:
                raise Failure("unsupported", f"this box runs everything as uid {own}; it cannot become {user!r}")
            request.user = guest_spawn.Identity(uid, uid, [uid], HOME)
        return request

    def listening_ports(self) -> set[int]:
        return set(self.kernel.listeners)

    # calls

    def exec(self, call: Call) -> None:
        if execution.is_whole(self, call, BoxAgent.exec):
            execution.start(self, call, self.request(execution.command_of(call)))

    def exec_code(self, call: Call) -> None:
        if not execution.is_whole(self, call, BoxAgent.exec_code):
            return
        params = {**call.params}
        env = {**self.env, **(params.get("env") or {})}
        suffix, argv = execution.find_command(params.pop("language", None), env["PATH"], self.kernel.find_program)
        path = f"/tmp/code-{next(self._numbers)}{suffix}"
        self.box.files.replace(path, bytes(call.attachment))
        request = self.request({**params, "argv": [argv[0], path]})
        request.clean_up = lambda: os.unlink(self.box.files.locate(path))
        execution.start(self, call, request)

    def metrics(self, call: Call) -> None:
        total, used = self.box.files.capacity, self.box.files.used()
        memory, count = sum(process.memory for process in self.kernel.alive), len(self.kernel.alive)
        disk = {"total": total, "used": used, "free": max(0, total - used)}
        call.answer({"uptime_s": self.box_loop.now() - self.begin, "cpu_percent": 0.0, "cpu_s": 0.0, "load": 0.0,
                     "memory_bytes": memory + (1 << 20), "disk": disk, "processes": count + 1})  # fmt: skip

    def connect(self, call: Call) -> None:
        host, port = call.params.get("host", "127.0.0.1"), call.params.get("port")
        if host not in ("127.0.0.1", "localhost", "::1"):
            raise Failure("denied", f"{host!r} is not a loopback address: a tunnel ends inside the box")
        listener = self.kernel.listeners.get(port) if type(port) is int else None
        if listener is None:
            raise Failure("refused", f"nothing answers on port {port} in the box: Connection refused")
        near, far = socket.socketpair()
        near.setblocking(False)
        listener.connect(far)
        tunnel.PortTunnel(self, call, near)

    def target_of(self, link: bytes) -> bytes:
        return self.box.files.locate(box_path(link))

    def user(self, call: Call) -> None:
        name = str(call.params.get("user") or self.box.files.uid)
        uid = uid_of(name)
        name = next((known for known, number in USERS.items() if number == uid), str(uid))
        call.answer({"name": name, "uid": uid, "gid": uid, "home": HOME})

    def sync_clock(self, call: Call) -> None:
        raise Failure("denied", "the clock of a mock box cannot be set")

    def no_network(self, call: Call) -> None:
        raise Failure("unsupported", "a mock box has no network")

    def no_interpreter(self, call: Call) -> None:
        raise Failure("unsupported", "a mock box runs no code, so that it has nothing to remember")

    own_calls = {  # noqa: RUF012
        "exec": exec, "exec_code": exec_code, "metrics": metrics, "connect": connect, "sync_clock": sync_clock,
        "network": no_network, "interpreter": no_interpreter, "user": user,
    }  # fmt: skip
