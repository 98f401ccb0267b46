"""The start of a warden: from its task to the hypervisor's process, with as few imports as can be, for all that waits
for the machine waits for these. The rest is imported while the hypervisor starts."""

from __future__ import annotations

import _signal
import _socket
import ctypes
import fcntl
import posix
import resource
import sys

from skerry.agent.guest import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from skerry.vm.warden.network import Outside

CHANNEL = "v.sock"
_BACKLOG = 128
_HIGH_FD = 64
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
_CLONE_NEWIPC, _CLONE_NEWNET = 0x08000000, 0x40000000
_CANNOT_RUN = 127


def run(folder: str) -> None:
    posix.chdir(folder)
    text = _read_task()
    if not text:
        posix._exit(0)
    task = wire.loads(text.decode())
    outside = None
    if task["network"] is not None:
        from skerry.vm.warden.network import Outside

        outside = Outside()
    warden = posix.fork()
    if warden:  # nobody waits for what goes on: it is not the launcher's child
        posix._exit(0 if outside is None else outside.attach(task["network"], warden))
    try:
        _serve(task, outside)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    posix._exit(1)


def _read_task() -> bytes:
    task = b""
    while piece := posix.read(0, 1 << 16):
        task += piece
    return task


def _serve(task: dict[str, Any], outside: Outside | None) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the guest's memory
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
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
    posix.write(1, wire.dumps({"warden": posix.getpid(), "vmm": vmm}).encode() + b"\n")

    from skerry.vm.warden.service import Service

    _become(task["uid"], [])
    Service(vmm, console, task["console_bytes"], channel, vsock, published).run()


def _call(function: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*arguments):
        raise OSError(ctypes.get_errno(), function)


def _become(uid: int | None, groups: list[int]) -> None:
    if uid is not None:
        posix.setgroups(groups)
        posix.setresgid(uid, uid, uid)
        posix.setresuid(uid, uid, uid)


def _listen(name: str, owner: int | None) -> int:
    """Bound before we become the machine's user, who can connect then but not put another in its place."""
    listener = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
    listener.bind(name)
    if owner is not None:
        posix.chown(name, -1, owner)
    posix.chmod(name, 0o660)
    listener.listen(_BACKLOG)
    return listener.detach()


def _spawn(argv: list[str], inherited: dict[int, int], uid: int | None, groups: list[int]) -> int:
    """The hypervisor is the machine's user from the first, dies with us, and has these descriptors and the files that
    were opened for it."""
    warden = posix.getpid()
    pid = posix.fork()
    if pid:
        return pid
    try:
        # above every number that it gets, so that one dup2 never overwrites the source of the next
        high = {number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH_FD) for number, fd in inherited.items()}
        for number, fd in high.items():
            posix.dup2(fd, number)
        for ignored in (_signal.SIGPIPE, _signal.SIGXFSZ):  # by the interpreter
            _signal.signal(ignored, _signal.SIG_DFL)
        _become(uid, groups)
        _call("prctl", _PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
        if posix.getppid() == warden:  # else it died before that
            posix.execve(argv[0], argv, {})
    except BaseException as error:
        posix.write(2, f"skerry: {argv[0]} cannot be run: {error}\n".encode())
    posix._exit(_CANNOT_RUN)


def _adopted(jailer: int, pid_file: str) -> int:
    """Whom the jailer has left us; if it failed, the jailer itself, whose end is told then."""
    ended = posix.waitid(posix.P_PID, jailer, posix.WEXITED | posix.WNOWAIT)
    if ended is None or ended.si_status:
        return jailer
    posix.waitpid(jailer, 0)
    with open(pid_file, encoding="ascii") as file:
        return int(file.read())
