"""The first process of a virtual machine. It serves the host alone, as root: what belongs to the box runs in an agent
of its own, as the box's user, and the machine ends with that one."""

from __future__ import annotations

import _socket
import posix
import sys
import time
from fcntl import ioctl

from .. import setup
from ..agent import BACKLOG, Agent
from ..channel import Call, Failure
from ..loop import Timer, ignore_errors
from ..spawn import find_program, to_bytes
from . import groups, mounts, syscalls, user_agent
from .ports import open_ports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONTROL_PORT = 51
AGENT_PORT = 52
_FIRST_FREE_PORT = 60000
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENV = {"PATH": _PATH, "HOME": "/root"}
_SIGKILL, _SIGPIPE, _SIGTERM = 9, 13, 15
_SERVICES_S = 10.0
_LOOK_S = 0.01
_ADD_ENTROPY, _RESEED = 0x40085203, 0x5207
_FREEZE, _THAW = 0xC0045877, 0xC0045878
_BUSY, _INVALID = 16, 22
_FROZEN_AT_MOST_S = 60
_HELD_WITHIN_S = 10
_MACHINE_ID_DIGITS = 32


class FirstProcess(Agent):
    def __init__(self, words: list[str]) -> None:
        if posix.getpid() != 1:
            raise SystemExit("this is for the first process of a machine: with it, everything ends")
        digest = next((word.partition("=")[2] for word in words if word.startswith("skerry.token=")), None)
        super().__init__({"home": "/root", "cwd": "/", "env": _ENV, "token_digest": digest})
        self._has_drives = "skerry.drives=none" not in words
        self._box: dict[str, Any] = {}  # parameters of `prepare`
        self._is_prepared = False
        self._next_port = 0
        self._user_has_ended = False
        self._powers_off = "skerry.poweroff" in words
        self._services: dict[int, str] = {}
        self._thaw: Timer | None = None
        self._machine_id = ""
        channel = next(word.partition("=")[2] for word in words if word.startswith("skerry.channel="))
        posix.mkdir(mounts.RUN, 0o700)
        posix.mkdir(mounts.ETC, 0o755)
        mounts.write_boot_id()
        groups.make()
        setup.raise_loopback()
        self._ports = open_ports(self.loop, channel, f"{mounts.RUN}/ports")
        self._warm_up()  # so that the fork has it too
        user_listener = self._ports.listener(AGENT_PORT)
        self._user = user_agent.FirstAgent(self.loop, user_listener, self._has_drives)
        user_listener.close()
        self.loop.on_exit(self._user.pid, self._on_user_end)
        listener = self._ports.listener(CONTROL_PORT)
        listener.listen(BACKLOG)
        self.listen({"fd": listener.detach()})
        self._ports.notify_ready()

    def _last_used(self) -> float:
        return time.monotonic() if self._ports.is_used() else max(super()._last_used(), self._ports.last_use)

    def reseed(self, call: Call) -> None:
        """Make this machine itself: a clone has the random numbers, the clock and the names of its template."""
        params = call.params
        entropy, hostname, machine_id = (_text(params, name) for name in ("entropy", "hostname", "machine_id"))
        if len(machine_id) != _MACHINE_ID_DIGITS or not all(digit in "0123456789abcdef" for digit in machine_id):
            raise Failure("invalid", "machine_id is 32 hexadecimal digits")
        try:
            seed = bytes.fromhex(entropy)
        except ValueError:
            raise Failure("invalid", "entropy is bytes in hexadecimal digits") from None
        fd = posix.open("/dev/urandom", posix.O_WRONLY | posix.O_CLOEXEC)
        try:
            head = (8 * len(seed)).to_bytes(4, sys.byteorder) + len(seed).to_bytes(4, sys.byteorder)
            ioctl(fd, _ADD_ENTROPY, head + seed)
            ioctl(fd, _RESEED, 0)
        finally:
            posix.close(fd)
        if params.get("time") is not None:
            time.clock_settime(time.CLOCK_REALTIME, params["time"])
        _socket.sethostname(hostname)
        mounts.write_file("hostname", hostname + "\n")
        mounts.write_file("machine-id", machine_id + "\n")
        if machine_id != self._machine_id:
            self._machine_id = machine_id
            mounts.write_boot_id()
        mounts.write_file("hosts", f"127.0.0.1 localhost {hostname}\n::1 localhost\n")
        call.answer({})

    def prepare(self, call: Call) -> None:
        """Make this machine a box, once, and start the agent of its user; the answer says that it listens."""
        params = call.params
        if self._box:
            raise Failure("exists", "this machine is prepared already")
        for name in ("home", "cwd"):
            if not _text(params, name).startswith("/"):
                raise Failure("invalid", f"{name} is an absolute path")
        digest = params.get("token_digest") or self.token_digest
        if digest is not None and (type(digest) is not str or params.get("forwards")):
            raise Failure("invalid", "token_digest is a text, and a forwarded port can demand no token")
        params = self._box = {
            **params,
            "token_digest": digest,
            "user": params.get("user"),
            "mount_disk": bool(params.get("mount_disk")) and self._has_drives,
            "mount_data": bool(params.get("mount_data")) and self._has_drives,
            "writable_root": bool(params.get("writable_root")) or not self._has_drives,
        }
        self._set_up(params)

        def on_done(failure: Failure | None) -> None:
            if failure is not None:
                call.fail(failure)
                return
            groups.limit_processor(params.get("cpus"))  # not before: its start would be as slow
            self._is_prepared = True
            self.token_digest = digest
            if self._user_has_ended:
                self.loop.stop()
            call.answer({})

        self._user.begin(params, on_done)

    def _set_up(self, params: dict[str, Any]) -> None:
        network = params.get("network")
        if network:
            if "address" in network:
                setup.set_up_network(network["address"], network["gateway"])
            else:
                setup.open_low_ports()
            mounts.write_file("resolv.conf", f"nameserver {network['nameserver']}\n")
        groups.limit(params)
        for port, path in (params.get("forwards") or {}).items():
            self._ports.forward(int(port), path)
        services = params.get("services") or []
        if self._has_drives and not services:  # else the kernel is not the box's alone
            groups.bar_namespaces()
        if services:
            mounts.put_files("")
            if params["mount_data"]:
                mounts.mount_data()
        for argv in services:
            self._start_service(argv)

    def _start_service(self, argv: list[str]) -> None:
        """Run a program of the image beside the box, as root, with the console for its words. Raises OSError."""
        null = posix.open("/dev/null", posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            pid = posix.posix_spawn(
                find_program(argv[0], _PATH) or argv[0],
                [to_bytes(arg) for arg in argv],
                {to_bytes(name): to_bytes(value) for name, value in _ENV.items()},
                file_actions=[(posix.POSIX_SPAWN_DUP2, null, 0), (posix.POSIX_SPAWN_DUP2, 2, 1)],
                setsid=True,
                setsigdef=[_SIGPIPE],
            )
        finally:
            posix.close(null)

        def on_end(status: int) -> None:
            _say(f"service {self._services.pop(pid)} ended with {posix.waitstatus_to_exitcode(status)}")

        self._services[pid] = argv[0]
        self.loop.on_exit(pid, on_end)

    def agent_as(self, call: Call) -> None:
        """Start one more agent, of another user, for one stream to a port of its own."""
        if not self._is_prepared:
            raise Failure("invalid", "this machine is not prepared yet")
        params = {**self._box, "lifetime_s": None, "idle_s": None, "user": _text(call.params, "user")}
        port = self._next_port = max(_FIRST_FREE_PORT, self._next_port + 1)

        def on_done(failure: Failure | None) -> None:
            if failure is not None:
                call.fail(failure)
            else:
                call.answer({"port": port})

        listener = self._ports.listener(port)
        pid = user_agent.start_beside(self.loop, self._user.pid, listener, params, on_done)
        listener.close()
        self.loop.on_exit(pid, lambda _status: self._ports.release(port))

    def freeze(self, call: Call) -> None:
        """Bring all that was written onto the drives, and let nothing more be written, so that they can be copied. It
        does not last: a host that goes away must not leave the machine frozen."""
        self._freeze_drives()
        self._thaw_later(_FROZEN_AT_MOST_S)
        call.answer({})

    def _freeze_drives(self) -> None:
        if self._box.get("mount_disk") and mounts.DISK not in mounts.mounted():
            mounts.mount_disk()
        if self._box.get("mount_data") and mounts.DATA not in mounts.mounted():
            mounts.mount_data()
        _tell_drives(_FREEZE, _BUSY)

    def hold(self, call: Call) -> None:
        """Let nothing of the user's go on, with the drives as `freeze` has them, until `thaw`, however late that comes:
        this machine is to be saved, and whoever goes on from there has another seed first."""
        if not self._is_prepared:
            raise Failure("invalid", "this machine is not prepared yet")
        _thaw_drives()  # who waits for them cannot be held
        groups.hold(True)

        def freeze(call: Call) -> None:
            try:
                if not groups.is_held():
                    raise Failure("failed", f"a process does not stand still within {_HELD_WITHIN_S} s")
                self._freeze_drives()
            except BaseException:
                groups.hold(False)
                raise
            self._thaw_later(None)
            call.answer({})

        self.wait_until(groups.is_held, _HELD_WITHIN_S, lambda: self.attempt(lambda _self, call: freeze(call), call))

    def thaw(self, call: Call) -> None:
        _thaw_drives()
        groups.hold(False)
        self._thaw_later(None)
        call.answer({})

    def _thaw_later(self, seconds: float | None) -> None:
        if self._thaw is not None:
            self._thaw.cancel()
        self._thaw = None if seconds is None else self.loop.later(seconds, _thaw_drives)

    def _on_user_end(self, status: int) -> None:
        """Stop; but one that could not start has said why, and the host is to hear it first."""
        self._user_has_ended = True
        if self._is_prepared:
            if not status:  # nobody told it to stop: its time was over
                _say("this box has ended by itself")
            self.loop.stop()

    def _end_gently(self, grace_s: float | None) -> None:
        """Ask the user's processes to end; their agent goes on, for with it they all end."""
        for pid in groups.members():
            if pid != self._user.pid:
                ignore_errors(posix.kill, pid, _SIGTERM)
        self.wait_until(lambda: not set(groups.members()) - {self._user.pid}, grace_s or 0, self.loop.stop)

    def run(self) -> None:
        self.loop.run()
        if not self._user_has_ended:
            ignore_errors(posix.kill, self._user.pid, _SIGKILL)
        for pid in self._services:
            ignore_errors(posix.kill, pid, _SIGTERM)
        end = time.monotonic() + _SERVICES_S
        while self._services and time.monotonic() < end:
            time.sleep(_LOOK_S)
            self.loop.turn()
        ignore_errors(posix.kill, -1, _SIGKILL)
        try:
            while True:
                posix.waitpid(-1, 0)
        except ChildProcessError:
            pass
        _thaw_drives()
        posix.sync()
        for place in mounts.mounted():
            mounts.unmount(place)
        posix.sync()
        syscalls.end_machine(self._powers_off)

    own_calls = {  # noqa: RUF012
        "reseed": reseed,
        "prepare": prepare,
        "agent_as": agent_as,
        "freeze": freeze,
        "hold": hold,
        "thaw": thaw,
    }


def _thaw_drives() -> None:
    _tell_drives(_THAW, _INVALID)


def _tell_drives(command: int, is_so_already: int) -> None:
    for place in mounts.mounted():
        fd = posix.open(place, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_CLOEXEC)
        try:
            ioctl(fd, command - (1 << 32), 0)
        except OSError as error:
            if error.errno != is_so_already:
                raise
        finally:
            posix.close(fd)


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if type(value) is not str or not value or "\0" in value or "\n" in value:
        raise Failure("invalid", f"{name} is a text of one line")
    return value


def _say(text: str) -> None:
    ignore_errors(posix.write, 2, f"skerry: {text}\n".encode())
