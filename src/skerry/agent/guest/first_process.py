"""The first process of a virtual machine.

It serves the host alone, as root: what belongs to the box runs in an agent of its own, as the box's user, and the
machine ends with that one.
"""

from __future__ import annotations

import posix
import time

from . import control, groups, network, services
from .agent import Agent
from .channel import Failure
from .mounts import ETC, RUN
from .ports import open_ports
from .user_agent import FirstAgent

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .channel import Call
    from .loop import Timer

CONTROL_PORT = 51
AGENT_PORT = 52
_BACKLOG = 64
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
_SIGTERM, _SIGKILL = 15, 9
_MAX_GRACE_S = 60
_SERVICES_S = 10.0
_LOOK_S = 0.01


class Machine(Agent):
    def __init__(self, words: list[str]) -> None:
        if posix.getpid() != 1:
            raise SystemExit("this is for the first process of a machine: with it, everything ends")
        super().__init__({"home": "/root", "cwd": "/", "env": _ENV})
        self.has_drives = "skerry.drives=none" not in words
        self.box: dict[str, Any] = {}
        """What the machine was told to be."""
        self.is_prepared = False
        self.next_port = 0
        self._user_has_ended = False
        self._powers_off = "skerry.poweroff" in words
        self._services: dict[int, str] = {}
        self._thaw: Timer | None = None
        channel = next(word.partition("=")[2] for word in words if word.startswith("skerry.channel="))
        posix.mkdir(RUN, 0o700)
        posix.mkdir(ETC, 0o755)
        groups.make()
        network.raise_loopback()
        self.ports = open_ports(self.loop, channel, f"{RUN}/ports")
        self._warm_up()  # so that the fork has it too
        user_listener = self.ports.listener(AGENT_PORT)
        self.user = FirstAgent(self.loop, user_listener, self.has_drives)
        user_listener.close()
        self.loop.on_exit(self.user.pid, self._on_user_end)
        listener = self.ports.listener(CONTROL_PORT)
        listener.listen(_BACKLOG)
        self.listen({"fd": listener.detach()})
        self.ports.tell_ready()

    def _last_used(self) -> float:
        return time.monotonic() if self.ports.is_used() else max(super()._last_used(), self.ports.last_use)

    def start_service(self, argv: list[str]) -> None:
        pid = services.start(argv, _ENV)
        self._services[pid] = argv[0]
        self.loop.on_exit(pid, lambda status: self._on_service_end(pid, status))

    def _on_service_end(self, pid: int, status: int) -> None:
        _say(f"service {self._services.pop(pid)} ended with {posix.waitstatus_to_exitcode(status)}")

    def thaw_later(self, seconds: float | None) -> None:
        if self._thaw is not None:
            self._thaw.cancel()
        self._thaw = None if seconds is None else self.loop.later(seconds, control.thaw_drives)

    # the end

    def on_user_start(self) -> None:
        self.is_prepared = True
        if self._user_has_ended:
            self.loop.stop()

    def _on_user_end(self, status: int) -> None:
        """One that could not start has said why, and the host is to hear it first."""
        self._user_has_ended = True
        if self.is_prepared:
            if not status:  # nobody told it to stop: its time was over
                _say("this box has ended by itself")
            self.loop.stop()

    def shutdown(self, call: Call) -> None:
        grace_s = call.params.get("grace_s") or 0
        if type(grace_s) not in (int, float) or not 0 <= grace_s <= _MAX_GRACE_S:
            raise Failure("invalid", f"grace_s is a number from 0 to {_MAX_GRACE_S}")
        call.answer({})
        call.channel.when_sent(lambda: self._end_gently(time.monotonic() + grace_s))

    def _end_gently(self, end: float) -> None:
        """Ask the user's processes to end; their agent goes on, for with it they all end."""
        for pid in groups.members():
            if pid != self.user.pid:
                _kill(pid, _SIGTERM)

        def look() -> None:
            if time.monotonic() >= end or not set(groups.members()) - {self.user.pid}:
                self.loop.stop()
            else:
                self.loop.later(_LOOK_S, look)

        look()

    def run(self) -> None:
        self.loop.run()
        if not self._user_has_ended:
            _kill(self.user.pid, _SIGKILL)
        for pid in self._services:
            _kill(pid, _SIGTERM)
        end = time.monotonic() + _SERVICES_S
        while self._services and time.monotonic() < end:
            time.sleep(_LOOK_S)
            self.loop.turn()
        _kill(-1, _SIGKILL)
        _reap_all()
        control.end_machine(self._powers_off)

    own_calls = {  # noqa: RUF012
        "reseed": control.reseed,
        "prepare": control.prepare,
        "agent_as": control.agent_as,
        "freeze": control.freeze,
        "thaw": control.thaw,
        "shutdown": shutdown,
    }


def _say(text: str) -> None:
    try:
        posix.write(2, f"skerry: {text}\n".encode())
    except OSError:
        pass


def _kill(pid: int, signal: int) -> None:
    try:
        posix.kill(pid, signal)
    except OSError:
        pass


def _reap_all() -> None:
    try:
        while True:
            posix.waitpid(-1, 0)
    except ChildProcessError:
        pass
