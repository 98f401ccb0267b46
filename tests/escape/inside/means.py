"""What attempts are made with, and how each is judged from inside: `got in`, `limited`, or what refused it.

Every attempt is made in a child of its own with a deadline, so that one that kills or hangs costs only itself. Needed
is no more than the agent's own interpreter has, as the smallest image has no other.
"""

from __future__ import annotations

import ctypes
import errno
import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

if posix.environ.get(b"SKERRY_PROBE") != b"inside" or not posix.access("/.skerry/agent", 0) or posix.getppid() != 1:
    sys.exit("refused: this probe attacks the machine that it runs on, and this is not the inside of a box")

X32 = 0x40000000
SHORT_S, HOARD_S, LONG_S = 8, 20, 150
"""How long a way out may take, how long to take all memory, and how long to take more than was given of the rest."""
GOT_IN = "got in"
LIMITED = "limited"
GATES = {
    *(errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT),
    errno.ENOSPC,  # no namespace is left
}
"""The answers of who does not let a call in at all. Any other, such as EINVAL, comes from behind the gate."""
FIND, VICTIM, ABSTRACT, PORT = sys.argv[3], int(sys.argv[4]), sys.argv[5], int(sys.argv[6])
"""Of the host: a file, a process, and two that listen."""

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
ME = posix.getpid()


class Arena:
    """Memory that pointers of 32 bits reach, and in it the code that makes a call of that kind."""

    # push rbx, rbp; rax, rbx, rcx, rdx, rsi, rbp, rdi from the table at rdi; int 0x80; pop rbp, rbx; ret
    CODE = bytes.fromhex("5355488b07488b5f08488b4f10488b5718488b7720488b6f30488b7f28cd805d5bc3")

    def __init__(self) -> None:
        self.base = libc.mmap(None, ctypes.c_size_t(1 << 16), 7, 0x62, -1, ctypes.c_long(0))
        self.used = 4096
        if self.base in (None, 2**64 - 1):
            raise OSError(errno.EPERM, "no memory that is written and run")
        ctypes.memmove(self.base, self.CODE, len(self.CODE))

    def put(self, data: bytes) -> int:
        place = int(self.base) + self.used
        ctypes.memmove(place, data + b"\0", len(data) + 1)
        self.used += (len(data) + 16) // 16 * 16
        return place

    def interrupt(self, number: int, args: list[int]) -> int:
        table = (ctypes.c_uint64 * 7)(number, *args, *[0] * (6 - len(args)))
        stub = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.base)
        return int(stub(ctypes.addressof(table)))


def answer(number: int) -> str:
    """What an error says of the gate."""
    name = errno.errorcode.get(number, str(number))
    return name if number in GATES else f"{GOT_IN} ({name})"


def by_syscall(number: int, *args: int | bytes) -> str:
    arena = Arena()
    words = [ctypes.c_long(arena.put(each) if isinstance(each, bytes) else each) for each in args]
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *words)
    _leave_if_forked()
    return answer(ctypes.get_errno()) if result == -1 else GOT_IN


def by_interrupt(number: int, *args: int | bytes) -> str:
    arena = Arena()
    words = [arena.put(each) if isinstance(each, bytes) else each & 0xFFFFFFFF for each in args]
    result = arena.interrupt(number, words)
    _leave_if_forked()
    return answer(-result) if -4096 < result < 0 else GOT_IN


def _leave_if_forked() -> None:
    if posix.getppid() != ME:
        posix._exit(0)


def each_abi(number: int, number32: int, *args: int | bytes) -> Callable[[], str]:
    """One call by all ways that a kernel of x86_64 may take it; 0 where there is no such call."""

    def attempt() -> str:
        end = by_syscall(number, *args)
        if number32 and not end.startswith(GOT_IN):
            other = in_child(lambda: by_interrupt(number32, *args))  # a filter may kill for it
            end = f"{other} by ia32" if other.startswith((GOT_IN, "hung")) else end
        if not end.startswith(GOT_IN):
            other = by_syscall(X32 | number, *args)
            end = f"{other} by x32" if other.startswith(GOT_IN) else end
        return end

    return attempt


def ended(action: Callable[[], object]) -> str:
    """`got in`, or what the action says of itself, or its error."""
    try:
        said = action()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    return said if isinstance(said, str) else GOT_IN


def in_child(action: Callable[[], object], deadline_s: int = SHORT_S) -> str:
    """How an attempt ended: `got in`, `limited`, the name of an error or of what killed it."""
    reader, writer = posix.pipe()
    pid = posix.fork()
    if pid == 0:
        global ME
        posix.close(reader)
        ME = posix.getppid()
        libc.alarm(deadline_s)
        try:
            end = ended(action)
        except BaseException as error:
            end = f"failed: {error!r}"
        posix.write(writer, end.encode())
        posix._exit(0)
    posix.close(writer)
    said = b""
    while True:
        part = posix.read(reader, 4096)
        if not part:
            break
        said += part
    posix.close(reader)
    status = posix.waitpid(pid, 0)[1]
    if said:
        return said.decode()
    return "hung" if status & 127 == 14 else f"killed by {status & 127}"


def write(path: str, text: str = "x") -> Callable[[], object]:
    def action() -> None:
        fd = posix.open(path, posix.O_WRONLY)
        posix.write(fd, text.encode())

    return action


def make(path: str) -> Callable[[], object]:
    return lambda: posix.open(path, posix.O_CREAT | posix.O_WRONLY)


def read(path: str) -> Callable[[], object]:
    """Something of a file, or a folder with something in it."""

    def action() -> object:
        if posix.stat(path).st_mode & 0o170000 == 0o040000:
            return GOT_IN if posix.listdir(path) else "ENOENT"
        return GOT_IN if posix.read(posix.open(path, posix.O_RDONLY | posix.O_NONBLOCK), 64) else "ENOENT"

    return action


def lines(path: str) -> list[str]:
    with open(path, errors="replace") as file:
        return file.read().splitlines()


def first(paths: Iterable[str], action: Callable[[str], Callable[[], object]]) -> Callable[[], str]:
    """The worst end of the same with several."""

    def attempt() -> str:
        end = "ENOENT"
        for path in paths:
            end = ended(action(path))
            if end.startswith(GOT_IN):
                return f"{end} at {path}"
        return end

    return attempt
