"""Agents of a machine's users: the first process forks them, and they give up all of its privileges. They are forks and
not new programs, so that all that the first process has loaded is there at once, in shared memory."""

from __future__ import annotations

import _socket
import posix

from .. import wire
from ..agent import BACKLOG, Agent
from ..channel import Failure, failure_of
from ..loop import READ, Loop, ignore_errors
from ..setup import make_folder, own_folder
from ..spawn import read_all
from ..users import find_user, set_rlimits
from . import groups, mounts, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MAX_REPORT = 4096
_STARTED = b"."
_USER, _NOBODY = "user", 65532
_OWN_PIDS = "/proc/self/ns/pid"


class FirstAgent:
    """Agent of the box's user, in namespaces of its own. It waits for the box's parameters: so all clones have it."""

    def __init__(self, loop: Loop, listener: _socket.socket, is_fixed: bool) -> None:
        self._loop = loop
        params_read, self._params_write = posix.pipe2(posix.O_CLOEXEC)

        def enter() -> dict[str, Any]:
            import _posixsubprocess  # noqa: F401 (these are needed later, when time counts)
            import resource  # noqa: F401

            from .. import proc  # noqa: F401

            groups.join()
            syscalls.unshare(syscalls.NEW_MOUNTS)
            mounts.build_view(is_fixed)
            syscalls.bar_privileges()
            text = read_all(params_read)
            if not text:
                posix._exit(0)  # the machine ends before it was anything
            params: dict[str, Any] = wire.loads(text.decode())
            mounts.enter_view(params)
            _own_folders(params)
            return params

        syscalls.unshare(syscalls.NEW_PIDS)
        try:
            self.pid, self._report = _fork(listener, enter, keep=params_read)
        finally:
            syscalls.enter(_OWN_PIDS, syscalls.NEW_PIDS)
            posix.close(params_read)

    def begin(self, params: dict[str, Any], on_done: Callable[[Failure | None], None]) -> None:
        """Give it the parameters of the box. `on_done` hears once it listens, or why it does not."""
        _await_report(self._loop, self._report, on_done)
        view = memoryview(wire.encode(params))
        try:
            while view:
                view = view[posix.write(self._params_write, view) :]
        except BrokenPipeError:
            pass  # it has said why, and has ended
        posix.close(self._params_write)


def start_beside(
    loop: Loop, other: int, listener: _socket.socket, params: dict[str, Any], on_done: Callable[[Failure | None], None]
) -> int:
    """Fork one more agent, in the namespaces of the process `other`, for one stream; returns its pid."""
    mount_namespace = f"/proc/{other}/ns/mnt"

    def enter() -> dict[str, Any]:
        groups.join()
        syscalls.enter(mount_namespace, syscalls.NEW_MOUNTS)
        syscalls.bar_privileges()
        return params

    syscalls.enter(f"/proc/{other}/ns/pid", syscalls.NEW_PIDS)
    try:
        pid, report = _fork(listener, enter, once=True)
    finally:
        syscalls.enter(_OWN_PIDS, syscalls.NEW_PIDS)
    _await_report(loop, report, on_done)
    return pid


def _fork(
    listener: _socket.socket, enter: Callable[[], dict[str, Any]], keep: int = 2, once: bool = False
) -> tuple[int, int]:
    """Fork an agent; returns its pid, and the descriptor on which it reports its start."""
    report, tell = posix.pipe2(posix.O_CLOEXEC)
    pid = posix.fork()
    if pid == 0:
        _be_agent(listener, tell, keep, enter, once)
    posix.close(tell)
    return pid, report


def _await_report(loop: Loop, report: int, on_done: Callable[[Failure | None], None]) -> None:
    def on_report(_events: int) -> None:
        said = posix.read(report, _MAX_REPORT)
        loop.forget(report)
        posix.close(report)
        if said == _STARTED:
            on_done(None)
        elif said:
            on_done(Failure(*wire.loads(said.decode())))
        else:
            on_done(Failure("failed", "the agent of the user ended before it was up; the console tells more"))

    loop.watch(report, READ, on_report)


def _be_agent(listener: _socket.socket, tell: int, keep: int, enter: Callable[[], dict[str, Any]], once: bool) -> None:
    """Be an agent, in the child: close all that the first process had open, and never touch its objects again."""
    code = 1
    try:
        posix.setsid()
        _close_all_but({0, 1, 2, listener.fileno(), tell, keep})
        try:
            params = enter()
            uid, gid = _user(params)
            set_rlimits(params.get("rlimits") or {})
            syscalls.give_up_privileges(uid, gid, bool(params.get("admin")))
            make_folder(params["cwd"])
            listener.listen(BACKLOG)
            agent = Agent(params)
            agent.listen({"fd": listener.fileno(), "once": once})
        except (LookupError, OSError) as error:
            failure = failure_of(error) if isinstance(error, OSError) else Failure("no_user", f"user: {error}")
            posix.write(tell, wire.dumps([failure.kind, str(failure)]).encode())
            return
        posix.write(tell, _STARTED)
        posix.close(tell)
        agent.run()
        code = agent.exit_code
    except BaseException:
        import sys

        sys.excepthook(*sys.exc_info())
    finally:
        posix._exit(code)


def _close_all_but(kept: set[int]) -> None:
    for name in posix.listdir("/proc/self/fd"):
        if int(name) not in kept:
            ignore_errors(posix.close, int(name))  # the list was read from one of them
    null = posix.open("/dev/null", posix.O_RDWR)
    posix.dup2(null, 0)
    posix.close(null)


def _user(params: dict[str, Any]) -> tuple[int, int]:
    """Find the user of the box: by default the one that images have for this, or one that no image has."""
    if params["user"]:
        return find_user(params["user"])
    try:
        return find_user(_USER)
    except LookupError:
        return _NOBODY, _NOBODY


def _own_folders(params: dict[str, Any]) -> None:
    uid, gid = _user(params)
    home, cwd = params["home"], params["cwd"]
    for path in (home, mounts.DATA) if params["mount_data"] else (home,):
        make_folder(path)
        if posix.lstat(path).st_uid != uid:  # new, or another's; else its mode is the user's choice
            own_folder(path, 0o755, uid, gid)
    if not (cwd + "/").startswith(home.rstrip("/") + "/"):
        make_folder(cwd)  # what is in the user's own folder the user makes: root might follow a link there
