"""The agents of a machine's users: the first process forks them, and they give up all that the first process is.

They are forks and not new programs, so that whatever the first process has loaded is there at once, in shared memory.
"""

from __future__ import annotations

import _socket
import posix

from . import groups, mounts, syscalls, wire
from .agent import Agent
from .channel import Failure, failure_of
from .loop import READ
from .owned import make, own
from .users import find_user, set_rlimits

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .loop import Loop

_MAX_WORDS = 4096
_STARTED = b"."
_BACKLOG = 64
_USER, _NOBODY = "user", 65532
_OWN_PIDS = "/proc/self/ns/pid"


class FirstAgent:
    """The agent of the box's user, in namespaces of its own. It is forked when the machine comes up, gets as far as it
    can, and waits to be told what the box is to be: so all clones of a machine have it."""

    def __init__(self, loop: Loop, listener: _socket.socket, is_fixed: bool) -> None:
        self._loop = loop
        told, self._tell = posix.pipe2(posix.O_CLOEXEC)

        def enter() -> dict[str, Any]:
            import _posixsubprocess  # noqa: F401 (these are needed later, when time counts)
            import resource  # noqa: F401

            from . import descendants  # noqa: F401

            groups.join()
            syscalls.unshare(syscalls.NEW_MOUNTS)
            mounts.build_view(is_fixed)
            syscalls.bar_privileges()
            params = _read_all(told)
            mounts.enter_view(params)
            _own_folders(params)
            return params

        syscalls.unshare(syscalls.NEW_PIDS)
        try:
            self.pid, self._words = _fork(listener, enter, keep=told)
        finally:
            syscalls.enter(_OWN_PIDS, syscalls.NEW_PIDS)
            posix.close(told)

    def begin(self, params: dict[str, Any], on_done: Callable[[Failure | None], None]) -> None:
        """Tell it what to be. `on_done` hears once it listens, or why it does not."""
        _listen_to(self._loop, self._words, on_done)
        view = memoryview(wire.encode(params))
        try:
            while view:
                view = view[posix.write(self._tell, view) :]
        except BrokenPipeError:
            pass  # it has said why, and has ended
        posix.close(self._tell)


def start_beside(
    loop: Loop, other: int, listener: _socket.socket, params: dict[str, Any], on_done: Callable[[Failure | None], None]
) -> int:
    """One more agent, in the namespaces of the process `other`, for one stream."""
    mount_namespace = f"/proc/{other}/ns/mnt"

    def enter() -> dict[str, Any]:
        groups.join()
        syscalls.enter(mount_namespace, syscalls.NEW_MOUNTS)
        syscalls.bar_privileges()
        return params

    syscalls.enter(f"/proc/{other}/ns/pid", syscalls.NEW_PIDS)
    try:
        pid, words = _fork(listener, enter, once=True)
    finally:
        syscalls.enter(_OWN_PIDS, syscalls.NEW_PIDS)
    _listen_to(loop, words, on_done)
    return pid


def _fork(
    listener: _socket.socket, enter: Callable[[], dict[str, Any]], keep: int = 2, once: bool = False
) -> tuple[int, int]:
    """The child, and where its words come from."""
    words, tell = posix.pipe2(posix.O_CLOEXEC)
    pid = posix.fork()
    if pid == 0:
        _be_agent(listener, tell, keep, enter, once)
    posix.close(tell)
    return pid, words


def _listen_to(loop: Loop, words: int, on_done: Callable[[Failure | None], None]) -> None:
    def on_words(_events: int) -> None:
        said = posix.read(words, _MAX_WORDS)
        loop.forget(words)
        posix.close(words)
        if said == _STARTED:
            on_done(None)
        elif said:
            on_done(Failure(*wire.loads(said.decode())))
        else:
            on_done(Failure("failed", "the agent of the user ended before it was up; the console tells more"))

    loop.watch(words, READ, on_words)


def _be_agent(listener: _socket.socket, tell: int, keep: int, enter: Callable[[], dict[str, Any]], once: bool) -> None:
    """In the child: all that the first process had open is closed, and its objects are never touched again."""
    code = 1
    try:
        posix.setsid()
        _close_all_but({0, 1, 2, listener.fileno(), tell, keep})
        try:
            params = enter()
            uid, gid = _user(params)
            set_rlimits(params.get("rlimits") or {})
            syscalls.give_up_privileges(uid, gid)
            make(params["cwd"])
            listener.listen(_BACKLOG)
            agent = Agent(params)
            agent.listen({"fd": listener.fileno(), "once": once})
        except (LookupError, OSError) as error:
            failure = failure_of(error) if isinstance(error, OSError) else Failure("invalid", str(error))
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
            try:
                posix.close(int(name))
            except OSError:
                pass  # the one that the list was read from
    null = posix.open("/dev/null", posix.O_RDWR)
    posix.dup2(null, 0)
    posix.close(null)


def _user(params: dict[str, Any]) -> tuple[int, int]:
    """By default the one that images have for this, or one that no image has."""
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
        make(path)
        if posix.lstat(path).st_uid != uid:  # new, or another's; else its mode is the user's choice
            own(path, 0o755, uid, gid)
    if not (cwd + "/").startswith(home.rstrip("/") + "/"):
        make(cwd)  # what is in the user's own folder the user makes: root might follow a link there


def _read_all(fd: int) -> dict[str, Any]:
    text = b""
    while True:
        part = posix.read(fd, 1 << 16)
        if not part:
            break
        text += part
    posix.close(fd)
    if not text:
        posix._exit(0)  # the machine ends before it was anything
    params: dict[str, Any] = wire.loads(text.decode())
    return params
