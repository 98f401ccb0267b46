"""Start of a process: argv, folder, environment, user and terminal exactly as asked. The modules of the agent's start
use `posix`, the C module behind `os`: importing `os` takes over a millisecond."""

from __future__ import annotations

import posix
import sys

from .channel import Failure
from .users import entries

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    ForkExec = Callable[["Request", dict[str, str], list[int]], tuple[int, tuple[int, str] | None]]

DEFAULT_PATH = "/bin:/usr/bin"
MAX_TAIL = 1 << 20
"""Bytes that are kept of the end of an output."""
MARK = "SKERRY_PROCESS"
"""A variable in the environment of all that a process starts; by it the whole tree is found again."""

_ENOENT, _E2BIG = 2, 7
_TOO_LONG_ELSEWHERE = (12, 36)  # ENOMEM and ENAMETOOLONG, from gVisor
_LONG = 1 << 16
NOT_FOUND, CANNOT_RUN = 127, 126


class Request:
    """Parameters of a process to start, checked. Raises Failure."""

    def __init__(self, params: dict[str, Any], home: str, base_env: dict[str, str], base_cwd: str) -> None:
        self.argv = _argv(params)
        cwd = base_cwd if params.get("cwd") is None else params["cwd"]
        if type(cwd) is not str or "\0" in cwd:
            raise Failure("invalid", "cwd is a string without NUL")
        self.cwd = join(base_cwd, expand(cwd, home))
        self.own_env = env_of(params)
        self.env = {**base_env, **self.own_env}
        self.user = find_user(params.get("user"))
        if self.user is not None and self.user.home and "HOME" not in params.get("env", {}):
            self.env["HOME"] = self.user.home
        self.stdin = bool(params.get("stdin", False))
        self.timeout_s = _number(params, "timeout_s") or None
        limit = _number(params, "limit")
        self.limit = None if limit is None else int(limit)
        self.combined = bool(params.get("combined", False))
        self.background = bool(params.get("background", False))
        tail = 0 if self.background else int(_number(params, "tail") or 0)
        self.tail = min(tail, self.limit or 0, MAX_TAIL)
        self.tag = params.get("tag")
        self.is_held = self.background and bool(params.get("hold"))
        self.pty = None if params.get("pty") is None else size_of(params["pty"])
        self.clean_up: Callable[[], None] = lambda: None
        self.keeps_awake = True
        """Whether a box in which it runs is not idle."""
        self.on_output: Callable[[int, bytes], None] | None = None
        """Taker of the output of a background process, which then keeps none of it."""


class Spawned:
    """Process that was started, or the reason why it was not."""

    def __init__(self, pid: int, input_fd: int, outputs: list[tuple[int, int]]) -> None:
        self.pid = pid
        self.input_fd = input_fd
        self.outputs = outputs
        self.failure: tuple[int, str] | None = None


class Identity:
    def __init__(self, uid: int, gid: int, groups: list[int], home: str) -> None:
        self.uid = uid
        self.gid = gid
        self.groups = groups
        self.home = home


def to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def join(folder: str, path: str) -> str:
    """Join a path to a folder, unless it is absolute."""
    return path if path.startswith("/") else folder.rstrip("/") + "/" + path


def expand(path: str, home: str) -> str:
    """Expand `~`, the home folder."""
    return join(home, path[2:]) if path == "~" or path.startswith("~/") else path


def read_all(fd: int) -> bytes:
    """Read a pipe to its end, and close it."""
    data = b""
    while part := posix.read(fd, 1 << 12):
        data += part
    posix.close(fd)
    return data


def start(request: Request, mark: str, fork_exec: ForkExec | None = None) -> Spawned:
    """Start a process. Raises Failure if there is no room for one more, or no such folder."""
    env = {**request.env, MARK: mark}
    kept: list[int] = []
    given: list[int] = []  # stdio of the process
    try:
        child = _open_terminal(request.pty, kept, given) if request.pty else _open_pipes(request, kept, given)
        child.pid, child.failure = (fork_exec or _fork_exec)(request, env, given)
    except BaseException as error:
        for fd in kept:
            posix.close(fd)
        if isinstance(error, OSError):
            raise Failure("limit", f"cannot start a process: {error.strerror}") from None
        raise
    finally:
        for fd in set(given):
            posix.close(fd)
    return child


def _open_pipes(request: Request, kept: list[int], given: list[int]) -> Spawned:
    in_write = -1
    if request.stdin:
        in_read, in_write = posix.pipe2(posix.O_CLOEXEC)
        kept.append(in_write)
        posix.set_blocking(in_write, False)
    else:
        in_read = posix.open("/dev/null", posix.O_RDONLY | posix.O_CLOEXEC)
    given.append(in_read)
    outputs = []
    for number in (1,) if request.combined else (1, 2):
        read, write = posix.pipe2(posix.O_CLOEXEC)
        kept.append(read)
        given.append(write)
        outputs.append((number, read))
    if request.combined:
        given.append(given[-1])
    return Spawned(0, in_write, outputs)


def _open_terminal(size: tuple[int, int], kept: list[int], given: list[int]) -> Spawned:
    master, slave = posix.openpty()
    kept.append(master)
    given += [slave, slave, slave]
    typing = posix.dup(master)
    kept.append(typing)
    set_size(master, *size)
    posix.set_blocking(master, False)
    return Spawned(0, typing, [(1, master)])


def _fork_exec(request: Request, env: dict[str, str], stdio: list[int]) -> tuple[int, tuple[int, str] | None]:
    """Run the core of `subprocess`, without its imports; returns the pid, and why the program did not start."""
    import _posixsubprocess

    argv, cwd = [to_bytes(arg) for arg in request.argv], to_bytes(request.cwd)
    programs = [to_bytes(each) for each in _candidates(request.argv[0], env.get("PATH") or DEFAULT_PATH)]
    env_list = [to_bytes(f"{name}={value}") for name, value in env.items()]
    fail_read, fail_write = posix.pipe2(posix.O_CLOEXEC)
    low = fail_write
    if fail_write < 3:
        fail_write = posix.dup(fail_write)
    user = request.user
    args: list[Any] = [
        argv, programs, True, (fail_write,), cwd, env_list, stdio[0], -1, -1, stdio[1], -1, stdio[2],
        fail_read, fail_write, True, True,
    ]  # fmt: skip
    if sys.version_info >= (3, 11):
        args += [-1]  # process group
    if sys.version_info >= (3, 9):
        args += [None, None, None, -1] if user is None else [user.gid, user.groups, user.uid, -1]
    args += [_preparation(request)]
    if (3, 11) <= sys.version_info < (3, 14):
        args += [True]  # vfork may be used
    try:
        pid = _posixsubprocess.fork_exec(*args)
    except BaseException:
        posix.close(fail_read)
        raise
    finally:
        posix.close(fail_write)
        if low != fail_write:
            posix.close(low)
    error = read_all(fail_read)
    if error:
        posix.waitpid(pid, 0)
    return pid, _explain(error, request) if error else None


def _preparation(request: Request) -> Callable[[], None] | None:
    """Function to call in the child, which then cannot share our memory, if it has a terminal or a user to take."""
    user = request.user if sys.version_info < (3, 9) else None
    if not request.pty and user is None:
        return None
    import fcntl
    import termios

    def prepare() -> None:
        if request.pty:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if user is not None:
            posix.setgroups(user.groups)
            posix.setresgid(user.gid, user.gid, user.gid)
            posix.setresuid(user.uid, user.uid, user.uid)

    return prepare


def _explain(error: bytes, request: Request) -> tuple[int, str]:
    """Exit code and message of a program that did not start, as a shell has them. Raises Failure for a bad folder."""
    _kind, number, where = [*error.split(b":", 2), b"", b""][:3]
    code = int(number or b"0", 16)
    if where.startswith(b"noexec"):
        try:
            posix.stat(request.cwd)
        except OSError as reason:
            raise Failure("not_found", f"cwd {request.cwd}: {reason.strerror}") from None
        raise Failure("denied", f"cwd {request.cwd}: {posix.strerror(code)}")
    if code in _TOO_LONG_ELSEWHERE and sum(map(len, request.argv)) >= _LONG:
        code = _E2BIG
    return why_not_started(code, request.argv[0])


def why_not_started(code: int, program: str) -> tuple[int, str]:
    """Exit code and message of a program that the kernel refused with an `errno`, as a shell has them. Raises Failure
    for what is no fault of the program."""
    if code == _E2BIG:
        much = "one argument or variable is longer than 128 KiB, or all together are longer than the kernel takes"
        raise Failure("too_long", f"{program}: cannot be started: {much}; give it by stdin or in a file")
    if code == _ENOENT:
        return NOT_FOUND, f"{program}: not found"
    return CANNOT_RUN, f"{program}: cannot run: {posix.strerror(code)}"


def set_size(fd: int, rows: int, cols: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def find_user(text: object) -> Identity | None:
    """Find a user by name, `UID` or `UID:GID`; None if that is who we already are. Raises Failure."""
    if text is None:
        return None
    if type(text) is not str or not text:
        raise Failure("invalid", "user is a name, UID or UID:GID")
    uid_text, _, gid_text = text.partition(":")
    entry = next((each for each in entries("/etc/passwd", 7) if uid_text in (each[0], each[2])), None)
    if entry is not None:
        name, uid, gid, home = entry[0], int(entry[2]), int(entry[3]), entry[5]
    elif _is_number(uid_text):
        name, uid, gid, home = "", int(uid_text), int(gid_text or uid_text), ""
    else:
        raise Failure("no_user", f"user: no user is called {uid_text!r} in the box; give a UID or UID:GID")
    if gid_text:
        if not _is_number(gid_text):
            raise Failure("invalid", "user is a name, UID or UID:GID")
        gid = int(gid_text)
    if (uid, gid) == (posix.geteuid(), posix.getegid()):
        return None
    if posix.geteuid() != 0 or not _may_change_user():
        raise Failure("unsupported", f"this box runs everything as uid {posix.geteuid()}; it cannot become {text!r}")
    in_groups = [each[2] for each in entries("/etc/group", 4) if name and name in each[3].split(",")]
    return Identity(uid, gid, [gid, *(int(group) for group in in_groups if _is_number(group))], home)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _may_change_user() -> bool:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & (1 << 7))
    return False


def find_program(program: str, path: str) -> str | None:
    """Find the file of a program, if it may be run."""
    return next((each for each in _candidates(program, path) if posix.access(each, posix.X_OK)), None)


def _candidates(program: str, path: str) -> list[str]:
    return [program] if "/" in program else [join(folder or ".", program) for folder in path.split(":")]


def _argv(params: dict[str, Any]) -> list[str]:
    shell = params.get("shell")
    argv = ["/bin/sh", "-c", shell] if shell is not None else params.get("argv")
    if type(argv) is not list or not argv or not all(type(arg) is str and "\0" not in arg for arg in argv):
        raise Failure("invalid", "argv is a list of one or more strings without NUL, or shell is one string")
    return argv


def env_of(params: dict[str, Any]) -> dict[str, str]:
    env = params.get("env") or {}
    if type(env) is not dict or not all(
        name and type(value) is str and "=" not in name and "\0" not in name + value for name, value in env.items()
    ):
        raise Failure("invalid", "env maps names without '=' to strings, both without NUL")
    return env


def _number(params: dict[str, Any], name: str) -> float | None:
    value: float | None = params.get(name)
    if value is not None and (type(value) not in (int, float) or not 0 <= value < 1e15):
        raise Failure("invalid", f"{name} is a number that is not negative")
    return value


def size_of(params: object) -> tuple[int, int]:
    if type(params) is not dict:
        raise Failure("invalid", "pty is an object of rows and cols")
    rows, cols = params.get("rows", 24), params.get("cols", 80)
    if type(rows) is not int or type(cols) is not int or not (0 < rows < 65536 and 0 < cols < 65536):
        raise Failure("invalid", "rows and cols are 1 to 65535")
    return rows, cols
