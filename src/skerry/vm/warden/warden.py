"""Start of a warden, with few imports, as every machine waits for them: the rest comes while the hypervisor starts."""

from __future__ import annotations

import _ctypes
import _signal
import _socket
import fcntl
import posix
import resource
import sys

from skerry.agent.guest import users, wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CHANNEL = "v.sock"
_BACKLOG = 128
_HIGH_FD = 64
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 1, 36, 38, 41
_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000
_CANNOT_RUN = 127
_NOW = 2  # RTLD_NOW
_EXIT_FD, _READY_FD = 3, 4
_DEADLINE_S = 10


def run(folder: str) -> None:
    posix.chdir(folder)
    text = b""
    while piece := posix.read(0, 1 << 16):
        text += piece
    if not text:
        posix._exit(0)
    task = wire.loads(text.decode())
    outside = None if task["network"] is None else OutsideNetwork()
    warden = posix.fork()
    if warden:  # nobody waits for what goes on: it is not the launcher's child
        posix._exit(0 if outside is None else outside.attach(task["network"], warden))
    try:
        _serve(task, outside)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    posix._exit(1)


def _serve(task: dict[str, Any], outside: OutsideNetwork | None) -> None:
    users.lower_priority()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the guest's memory
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if task["small_pages"]:
        _call("prctl", _PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if posix.geteuid() == 0:
        _call("unshare", _CLONE_NEWNET | _CLONE_NEWIPC)
    if outside is not None:
        outside.namespace_is_made()
    if task["pid_file"] is not None:
        _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    console, console_write = posix.pipe2(posix.O_CLOEXEC)
    inherited = {0: posix.open("/dev/null", posix.O_RDONLY | posix.O_CLOEXEC), 1: console_write, 2: console_write}
    for name, number in task["listen"].items():
        inherited[number] = _listen(name, task["owner"])
    channel = None
    if task["channel"] is not None:
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        inherited[task["channel"]] = theirs.detach()
        channel = (ours.detach(), _listen(CHANNEL, task["owner"]))
    vsock = None if task["vsock"] is None else (task["vsock"], _listen(CHANNEL, task["owner"]))
    published = [(_listen(name, task["owner"]), port) for name, port in task["publish"].items()]
    vmm = _spawn(task["argv"], inherited, task["uid"], task["groups"])
    for fd in {*inherited.values(), *range(*task["files"])}:
        posix.close(fd)
    if task["pid_file"] is not None:
        vmm = _adopted(vmm, task["pid_file"])
    users.allow_many_files()  # the hypervisor has the limit that we got; a stream takes two
    posix.write(1, wire.dumps({"warden": posix.getpid(), "vmm": vmm}).encode() + b"\n")

    from skerry.vm.warden.service import Service

    _become(task["uid"], [])
    Service(vmm, console, task["console_bytes"], channel, vsock, published).run()


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class _Function(_ctypes.CFuncPtr):
    """Function of C, without the rest of ctypes, whose import takes a fifth of a warden's start."""

    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


def _call(function: str, *arguments: int) -> None:
    """Call a function of libc. Raises OSError if it fails."""
    itself = _ctypes.dlopen(None, _NOW)  # type: ignore[arg-type]
    if _Function(_ctypes.dlsym(itself, function))(*arguments):
        raise OSError(_ctypes.get_errno(), function)


def _become(uid: int | None, groups: list[int]) -> None:
    if uid is not None:
        posix.setgroups(groups)
        posix.setresgid(uid, uid, uid)
        posix.setresuid(uid, uid, uid)


def _listen(name: str, owner: int | None) -> int:
    """Listen on a path, bound before we become the machine's user, who can connect but not put another in its place."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    listener.bind(name)
    if owner is not None:
        posix.chown(name, -1, owner)
    posix.chmod(name, 0o660)
    listener.listen(_BACKLOG)
    return listener.detach()


def _spawn(argv: list[str], inherited: dict[int, int], uid: int | None, groups: list[int]) -> int:
    """Start the hypervisor: it is the machine's user from the first, dies with us, and has these descriptors."""
    warden, score = posix.getpid(), users.oom_score()
    users.set_oom_score(users.FIRST_TO_DIE)  # it is born with it, while we may be root, whose word is the floor
    pid = posix.fork()
    if pid:
        users.set_oom_score(score)
        return pid
    try:
        _inherit(inherited)
        for ignored in (_signal.SIGPIPE, _signal.SIGXFSZ):  # by the interpreter
            _signal.signal(ignored, _signal.SIG_DFL)
        _become(uid, groups)
        _call("prctl", _PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if posix.getppid() == warden:  # else it died before that
            posix.execve(argv[0], argv, {})
    except BaseException as error:
        posix.write(2, f"skerry: {argv[0]} cannot be run: {error}\n".encode())
    posix._exit(_CANNOT_RUN)


def _inherit(descriptors: dict[int, int]) -> None:
    """Give descriptors these numbers, for the program that this process becomes."""
    # first above every number that is given, so that one dup2 never overwrites the source of the next
    high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for number, fd in descriptors.items()}
    for number, fd in high.items():
        posix.dup2(fd, number)


def _adopted(jailer: int, pid_file: str) -> int:
    """Find the process that the jailer has left us; if it failed, the jailer itself, whose end is reported then."""
    ended = posix.waitid(posix.P_PID, jailer, posix.WEXITED | posix.WNOWAIT)
    if ended is None or ended.si_status:
        return jailer
    posix.waitpid(jailer, 0)
    with open(pid_file, encoding="ascii") as file:
        return int(file.read())


class OutsideNetwork:
    """A network that leads out of the warden's namespace: slirp4netns beside it, until the warden is gone. Made before
    the warden is forked: it holds one end of each pipe, and we, outside its namespace, the other."""

    def __init__(self) -> None:
        self._made_read, self._made_write = posix.pipe2(posix.O_CLOEXEC)
        self._alive_read, self._alive_write = posix.pipe2(posix.O_CLOEXEC)

    def namespace_is_made(self) -> None:
        """Tell the process outside, from the warden."""
        posix.close(self._made_read)
        posix.close(self._alive_read)
        posix.write(self._made_write, b"1")
        posix.close(self._made_write)

    def attach(self, argv: list[str], warden: int) -> int:
        """Run slirp4netns; returns our exit code, 0 once the network is there."""
        _signal.alarm(_DEADLINE_S)
        posix.close(self._made_write)
        posix.close(self._alive_write)
        if not posix.read(self._made_read, 1):
            return 0  # the warden has told why
        ready_read, ready_write = posix.pipe2(posix.O_CLOEXEC)
        if posix.fork() == 0:
            self._run([*argv, f"--exit-fd={_EXIT_FD}", f"--ready-fd={_READY_FD}", str(warden), "tap0"], ready_write)
        posix.close(ready_write)
        return 0 if posix.read(ready_read, 1) else 1

    def _run(self, argv: list[str], ready: int) -> None:
        try:
            null = posix.open("/dev/null", posix.O_RDWR | posix.O_CLOEXEC)
            _inherit({0: null, 1: null, _EXIT_FD: self._alive_read, _READY_FD: ready})
            posix.execve(argv[0], argv, {})
        except BaseException as error:
            posix.write(2, f"{argv[0]} cannot be run: {error}\n".encode())
        posix._exit(_CANNOT_RUN)
