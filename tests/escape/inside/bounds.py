"""H: more of anything than was given. Each stops at a limit, or says how far it came."""

from __future__ import annotations

import _socket
import ctypes
import errno
import fcntl
import posix
import time

from .means import GOT_IN, LIMITED, LONG_S, libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


LIMITS = {
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    *(errno.ENOLCK, errno.ENOBUFS, errno.EPERM),
}
MIB = 1 << 20


def until(count: int, action: Callable[[int], object]) -> Callable[[], str]:
    """Whether the same again and again comes to an end before there are so many."""

    def attempt() -> str:
        kept = []
        for number in range(count):
            try:
                kept.append(action(number))
            except OSError as error:
                if error.errno not in LIMITS:
                    raise
                return LIMITED
            except (MemoryError, RuntimeError):
                return LIMITED
        return f"{GOT_IN}: {len(kept)}"

    return attempt


def fork_once(is_zombie: bool) -> Callable[[int], object]:
    def action(_: int) -> int:
        pid = posix.fork()
        if pid == 0:
            if not is_zombie:
                libc.alarm(LONG_S)
                libc.pause()
            posix._exit(0)
        PIDS.append(pid)
        return pid

    return action


PIDS: list[int] = []


def and_end(bound: Callable[[], str]) -> Callable[[], str]:
    def attempt() -> str:
        try:
            return bound()
        finally:
            for pid in PIDS:
                posix.kill(pid, 9)
                posix.waitpid(pid, 0)

    return attempt


def thread(_: int) -> None:
    import _thread

    _thread.start_new_thread(time.sleep, (LONG_S,))


def fill(path: str, mib: int) -> Callable[[], str]:
    """Whether so much can be written there; it is gone afterwards."""

    def attempt() -> str:
        fd = posix.open(path, posix.O_CREAT | posix.O_WRONLY, 0o600)
        posix.unlink(path)
        block = bytes(MIB)
        return until(mib, lambda _: _whole(posix.write(fd, block)))()

    return attempt


def _whole(written: int) -> None:
    if written < MIB:
        raise OSError(errno.ENOSPC, "no more")


def inodes(folder: str, count: int) -> Callable[[], str]:
    def attempt() -> str:
        posix.mkdir(folder)
        try:
            return until(count, lambda n: posix.close(posix.open(f"{folder}/{n}", posix.O_CREAT)))()
        finally:
            for name in posix.listdir(folder):
                posix.unlink(f"{folder}/{name}")
            posix.rmdir(folder)

    return attempt


def call(number: int, *args: int | bytes | ctypes.Array[ctypes.c_int] | None) -> int:
    """A call of the kernel, which raises OSError."""
    ctypes.set_errno(0)
    result = int(libc.syscall(ctypes.c_long(number), *args))
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def queue_signals() -> str:
    """Signals that wait to be taken are memory of the kernel."""
    libc.sigprocmask(0, (ctypes.c_uint64 * 16)(1 << 39, *[0] * 15), None)
    me, info = posix.getpid(), (ctypes.c_int * 32)(40, 0, -1)
    return until(100_000, lambda _: call(129, me, 40, info))()


def lock_memory() -> str:
    memory = ctypes.create_string_buffer(64 * MIB)
    return until(1, lambda _: call(149, ctypes.addressof(memory), 64 * MIB))()


def widen_pipe(_: int) -> tuple[int, int]:
    pipe = posix.pipe()
    fcntl.fcntl(pipe[1], 1031, MIB)
    return pipe


def stuff_sockets(_: int) -> tuple[_socket.socket, _socket.socket]:
    pair = _socket.socketpair()
    pair[0].setblocking(False)
    try:
        while True:
            pair[0].send(bytes(65536))
    except BlockingIOError:
        return pair


def huge_pages() -> str:
    libc.mmap.restype = ctypes.c_void_p
    place = libc.mmap(None, ctypes.c_size_t(64 * MIB), 3, 0x40022, -1, ctypes.c_long(0))
    return LIMITED if place in (None, 2**64 - 1) else GOT_IN


def long_arguments() -> str:
    try:
        posix.execv("/bin/sh", ["sh", "-c", "exit 3", *["x" * 100_000] * 200])
    except OSError as error:
        return LIMITED if error.errno == errno.E2BIG else errno.errorcode[error.errno or 0]


def endless_places() -> str:
    """Mounts that can be written to, and that have no size, or one of more than a small part of any disk."""
    with open("/proc/mounts") as file:
        paths = [line.split()[1] for line in file]
    for path in paths:
        try:
            posix.close(posix.open(f"{path}/.written", posix.O_CREAT | posix.O_WRONLY))
            posix.unlink(f"{path}/.written")
        except OSError:
            continue
        room = posix.statvfs(path)
        if not 0 < room.f_blocks * room.f_frsize <= 1 << 30:
            return f"{GOT_IN} at {path}"
    return LIMITED


def hoard(_: int) -> bytearray:
    return bytearray(b"x" * MIB)


def without_a_name() -> str:
    fd = posix.memfd_create("x")
    return until(2000, lambda _: _whole(posix.write(fd, bytes(MIB))))()


PRIVATE, MODE = 0, 0o1600

ATTEMPTS: dict[str, Callable[[], object]] = {
    "H01": until(100_000, lambda _: posix.open("/dev/null", posix.O_RDONLY)),
    "H02": and_end(until(1000, fork_once(is_zombie=False))),
    "H03": and_end(until(1000, fork_once(is_zombie=True))),
    "H04": until(1000, thread),
    "H05": fill("/tmp/big", 600),
    "H06": fill("/dev/shm/big", 600),
    "H07": fill("/home/user/big", 600),
    "H08": endless_places,
    "H09": inodes("/home/user/many", 20_000),
    "H10": lock_memory,
    "H11": until(100, lambda n: call(240, b"queue%d" % n, posix.O_CREAT | posix.O_RDWR, 0o600, 0)),
    "H12": until(10_000, lambda _: call(29, PRIVATE, 4096, MODE)),
    "H13": until(33_000, lambda _: call(64, PRIVATE, 1, MODE)),
    "H14": until(33_000, lambda _: call(68, PRIVATE, MODE)),
    "H15": queue_signals,
    "H16": until(100_000, lambda _: call(222, 1, None, (ctypes.c_int * 2)())),
    "H17": until(2000, lambda _: call(294, 0)),
    "H18": until(2000, widen_pipe),
    "H19": until(2000, stuff_sockets),
    "H20": huge_pages,
    "H21": long_arguments,
    "H22": until(5000, lambda _: posix.open("/dev/ptmx", posix.O_RDWR | posix.O_NOCTTY)),
    "J01": until(2000, hoard),
    "J02": without_a_name,
}
