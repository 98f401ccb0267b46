"""Starting a process: argv, folder, environment, user and terminal exactly as asked.

What the agent needs to start uses `posix`, the C module behind `os`: importing `os` itself takes over a millisecond.
"""

from __future__ import annotations

import posix
import sys

from .channel import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEFAULT_PATH = "/bin:/usr/bin"
MARK = "SKERRY_PROCESS"
"""A variable in the environment of all that a process starts; by it the whole tree is found again."""

_ENOENT, _EACCES, _ENOEXEC = 2, 13, 8
_NOT_FOUND, _CANNOT_RUN = 127, 126


class Request:
    """What to start, checked."""

    __slots__ = ("argv", "background", "clean_up", "cwd", "env", "limit", "pty", "stdin", "tag", "timeout_s", "user")

    def __init__(self, params: dict[str, Any], home: str, base_env: dict[str, str], base_cwd: str) -> None:
        self.argv = _argv(params)
        self.cwd = join(base_cwd, expand(_text(params, "cwd", base_cwd), home))
        self.env = {**base_env, **env_of(params)}
        self.user = find_user(params.get("user"))
        if self.user is not None and self.user.home and "HOME" not in params.get("env", {}):
            self.env["HOME"] = self.user.home
        self.stdin = bool(params.get("stdin", False))
        self.timeout_s = _number(params, "timeout_s")
        limit = _number(params, "limit")
        self.limit = None if limit is None else int(limit)
        self.background = bool(params.get("background", False))
        self.tag = params.get("tag")
        self.pty = _size(params)
        self.clean_up: Callable[[], None] = lambda: None


class Child:
    """A process that was started, or the reason why it was not."""

    __slots__ = ("failure", "input_fd", "outputs", "pid")

    def __init__(self, pid: int, input_fd: int, outputs: list[tuple[int, int]]) -> None:
        self.pid = pid
        self.input_fd = input_fd
        self.outputs = outputs
        self.failure: tuple[int, str] | None = None


class User:
    __slots__ = ("gid", "groups", "home", "uid")

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
    """`path`, taken from `folder` unless it is absolute."""
    return path if path.startswith("/") else folder.rstrip("/") + "/" + path


def expand(path: str, home: str) -> str:
    """A path with `~` and relative paths taken from the home folder."""
    if path == "~" or path.startswith("~/"):
        path = path[2:]
    return join(home, path)


def start(request: Request, mark: str) -> Child:
    env = dict(request.env)
    env[MARK] = mark
    env_list = [to_bytes(f"{name}={value}") for name, value in env.items()]
    programs = _candidates(request.argv[0], env.get("PATH") or DEFAULT_PATH)
    starter = _start_on_terminal if request.pty else _start_on_pipes
    try:
        return starter(request, programs, env_list)
    except OSError as error:
        raise Failure("limit", f"cannot start a process: {error.strerror}") from None


def _start_on_pipes(request: Request, programs: list[bytes], env: list[bytes]) -> Child:
    out_read, out_write = posix.pipe2(posix.O_CLOEXEC)
    err_read, err_write = posix.pipe2(posix.O_CLOEXEC)
    if request.stdin:
        in_read, in_write = posix.pipe2(posix.O_CLOEXEC)
    else:
        in_read, in_write = posix.open("/dev/null", posix.O_RDONLY | posix.O_CLOEXEC), -1
    child = Child(0, in_write, [(1, out_read), (2, err_read)])
    try:
        child.pid, error = _fork_exec(request, programs, env, (in_read, out_write, err_write))
    except BaseException:
        for fd in (out_read, err_read, in_write):
            if fd >= 0:
                posix.close(fd)
        raise
    finally:
        posix.close(in_read)
        posix.close(out_write)
        posix.close(err_write)
    if in_write >= 0:
        posix.set_blocking(in_write, False)
    child.failure = _explain(error, request) if error else None
    return child


def _fork_exec(
    request: Request, programs: list[bytes], env: list[bytes], stdio: tuple[int, int, int]
) -> tuple[int, bytes]:
    """The engine of `subprocess` without the rest of it: vfork where no user is changed, and no import."""
    import _posixsubprocess

    fail_read, fail_write = posix.pipe2(posix.O_CLOEXEC)
    low = fail_write
    if fail_write < 3:
        fail_write = posix.dup(fail_write)
    user = request.user
    identity: list[Any] = [None, None, None] if user is None else [user.gid, user.groups, user.uid]
    args: list[Any] = [
        [to_bytes(arg) for arg in request.argv], programs, True, (fail_write,), to_bytes(request.cwd), env,
        stdio[0], -1, -1, stdio[1], -1, stdio[2], fail_read, fail_write, True, True,
    ]  # fmt: skip
    if sys.version_info >= (3, 11):
        args += [-1]  # process group
    if sys.version_info >= (3, 9):
        args += [*identity, -1]
    elif user is not None:
        raise Failure("unsupported", "changing the user needs Python 3.9 in the box")
    args += [None]
    if sys.version_info >= (3, 11):
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
    error = b""
    while True:
        part = posix.read(fail_read, 512)
        if not part:
            break
        error += part
    posix.close(fail_read)
    if error:
        posix.waitpid(pid, 0)
    return pid, error


def _explain(error: bytes, request: Request) -> tuple[int, str]:
    """The exit code and message of a program that did not start: the shell's own."""
    _kind, number, where = [*error.split(b":", 2), b"", b""][:3]
    code = int(number or b"0", 16)
    if where.startswith(b"noexec"):
        try:
            posix.stat(request.cwd)
        except OSError as reason:
            raise Failure("not_found", f"cwd {request.cwd}: {reason.strerror}") from None
        raise Failure("denied", f"cwd {request.cwd}: {posix.strerror(code)}")
    return _exit_of(code, request.argv[0])


def _exit_of(code: int, program: str) -> tuple[int, str]:
    if code == _ENOENT:
        return _NOT_FOUND, f"{program}: not found"
    return _CANNOT_RUN, f"{program}: cannot run: {posix.strerror(code)}"


def _start_on_terminal(request: Request, programs: list[bytes], env: list[bytes]) -> Child:
    assert request.pty is not None
    argv = [to_bytes(arg) for arg in request.argv]
    opened = list(posix.openpty())
    try:
        opened.append(posix.dup(opened[0]))
        opened += posix.pipe2(posix.O_CLOEXEC)
        master, slave, typing, fail_read, fail_write = opened
        posix.set_inheritable(typing, False)
        set_size(master, *request.pty)
        pid = posix.fork()
    except OSError:
        for fd in opened:
            posix.close(fd)
        raise
    if pid == 0:
        _become(request, argv, programs, env, slave, fail_write)
    posix.close(slave)
    posix.close(fail_write)
    error = posix.read(fail_read, 512)
    posix.close(fail_read)
    child = Child(pid, typing, [(1, master)])
    posix.set_blocking(master, False)
    if error:
        posix.waitpid(pid, 0)
        if error.startswith(b"cwd"):
            posix.close(master)
            posix.close(child.input_fd)
            raise Failure("not_found", f"cwd {request.cwd}: {posix.strerror(int(error[3:]))}")
        child.failure = _exit_of(int(error), request.argv[0])
    return child


def _become(
    request: Request, argv: list[bytes], programs: list[bytes], env: list[bytes], slave: int, fail_write: int
) -> None:
    """In the forked child: take the terminal, change folder and user, and be the program."""
    import _signal
    import fcntl
    import termios

    try:
        _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)  # the others are reset by exec itself
        posix.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for fd in (0, 1, 2):
            posix.dup2(slave, fd)
        if request.user is not None:
            posix.setgroups(request.user.groups)
            posix.setresgid(request.user.gid, request.user.gid, request.user.gid)
            posix.setresuid(request.user.uid, request.user.uid, request.user.uid)
        try:
            posix.chdir(request.cwd)
        except OSError as error:
            posix.write(fail_write, b"cwd%d" % (error.errno or 0))
            posix._exit(_CANNOT_RUN)
        environment = dict(entry.split(b"=", 1) for entry in env)
        last = _ENOENT
        for program in programs:
            try:
                posix.execve(program, argv, environment)
            except OSError as error:
                if error.errno not in (_ENOENT, 20) or last == _ENOENT:
                    last = error.errno or last
        posix.write(fail_write, b"%d" % last)
    finally:
        posix._exit(_CANNOT_RUN)


def set_size(fd: int, rows: int, cols: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))


def find_user(text: object) -> User | None:
    """A user by name, `UID` or `UID:GID`; None if that is who we already are."""
    if text is None:
        return None
    if type(text) is not str or not text:
        raise Failure("invalid", "user is a name, UID or UID:GID")
    uid_text, _, gid_text = text.partition(":")
    entry = _passwd_entry(uid_text)
    if entry is not None:
        name, uid, gid, home = entry[0], int(entry[2]), int(entry[3]), entry[5]
    elif _is_number(uid_text):
        name, uid, gid, home = "", int(uid_text), int(gid_text or uid_text), ""
    else:
        raise Failure("invalid", f"no user is called {uid_text!r} in the box")
    if gid_text:
        if not _is_number(gid_text):
            raise Failure("invalid", "user is a name, UID or UID:GID")
        gid = int(gid_text)
    if (uid, gid) == (posix.geteuid(), posix.getegid()):
        return None
    if posix.geteuid() != 0 or not _may_change_user():
        raise Failure("unsupported", f"this box runs everything as uid {posix.geteuid()}; it cannot become {text!r}")
    return User(uid, gid, _groups_of(name, gid), home)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _may_change_user() -> bool:
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) & (1 << 7))
    return False


def _passwd_entry(wanted: str) -> list[str] | None:
    try:
        with open("/etc/passwd", encoding="utf-8", errors="surrogateescape") as passwd:
            for line in passwd:
                entry = line.rstrip("\n").split(":")
                if len(entry) >= 7 and wanted in (entry[0], entry[2]):
                    return entry
    except OSError:
        pass
    return None


def _groups_of(name: str, gid: int) -> list[int]:
    groups = [gid]
    try:
        with open("/etc/group", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                entry = line.rstrip("\n").split(":")
                if len(entry) >= 4 and name and name in entry[3].split(","):
                    groups.append(int(entry[2]))
    except (OSError, ValueError):
        pass
    return groups


def _candidates(program: str, path: str) -> list[bytes]:
    if "/" in program:
        return [to_bytes(program)]
    return [to_bytes(join(folder or ".", program)) for folder in path.split(":")]


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


def _text(params: dict[str, Any], name: str, default: str) -> str:
    value = params.get(name)
    if value is None:
        return default
    if type(value) is not str or "\0" in value:
        raise Failure("invalid", f"{name} is a string without NUL")
    return value


def _number(params: dict[str, Any], name: str) -> float | None:
    value = params.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < 1e15:
        raise Failure("invalid", f"{name} is a number that is not negative")
    return float(value)


def _size(params: dict[str, Any]) -> tuple[int, int] | None:
    pty = params.get("pty")
    if pty is None:
        return None
    if type(pty) is not dict:
        raise Failure("invalid", "pty is an object of rows and cols")
    return size_of(pty)


def size_of(params: dict[str, Any]) -> tuple[int, int]:
    rows, cols = params.get("rows", 24), params.get("cols", 80)
    if type(rows) is not int or type(cols) is not int or not (0 < rows < 65536 and 0 < cols < 65536):
        raise Failure("invalid", "rows and cols are 1 to 65535")
    return rows, cols
