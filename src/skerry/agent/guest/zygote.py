"""Zygote: a process that has the agent in its memory, and forks one for each box. It sees the tree that boxes share and
the host's /proc, and may only become other users. It keeps nothing of a box: a request is forgotten once there is a
fork, which reads it, and what may be secret comes by a pipe that the fork alone reads."""

from __future__ import annotations

import _signal
import _socket
import gc
import posix
import sys
from _struct import unpack, unpack_from

from . import agent, users, walls, wire
from .loop import Loop, ignore_errors
from .walls import NEW_PIDS, NEW_USERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

PLACE = "-" * 36
"""Stands in the zygote's arguments where those of each fork have the id of its box."""
_CHANNEL, _SETTINGS = 3, 4
"""The first is where requests come, and in a fork the way to whoever asked for it."""
_MAX_REQUEST, _LEAST_DESCRIPTORS, _MAX_DESCRIPTORS = 1 << 12, 2, 8
_ROOM = _socket.CMSG_SPACE(12) + _socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)
_HEAD = 12
_IS_IN_GROUP = 1
_FIRST_UID, _LAST_UID = 0x70000000, 0x7FFFFFFF
_SET_GID, _SET_UID = 6, 7
_RANDOM_BYTES = 25
_MORE_THAN_WE_HAVE = 128
_LARGE = 1 << 20
_REHEARSALS = 10  # from the ninth time on an interpreter runs code in a form made for what it has met
_ARGUMENTS_START = 45  # of what follows the name in `stat`
_WARM = "_ctypes", "_posixsubprocess", "encodings.ascii", "resource", "termios"


def serve(run: Callable[[dict[str, Any]], int]) -> NoReturn:
    """Fork a process for each request, until there has been none for a while, or an empty one. In its box a fork runs
    the agent, with its configuration, and exits with the code of that. It never goes back, where it would take apart
    what it shares with all others."""
    settings = wire.loads(_read_all(_SETTINGS).decode())
    posix.close(_SETTINGS)
    calls = walls.Filter(bytes.fromhex(settings["program"]))
    listener = _socket.socket(fileno=_CHANNEL)
    own_uid = posix.geteuid()
    walls.give_up_capabilities((_SET_GID, _SET_UID) if own_uid == 0 else ())
    if own_uid == 0:
        posix.setgroups([])
    users.be_ordinary(settings["rlimits"])
    _warm_up()
    users.deny_tracing()
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # who has ended is nobody's to wait for
    traces = _Traces()
    listener.settimeout(settings["idle_s"])
    request = bytearray(_MAX_REQUEST)
    while True:
        try:
            size, said, _, _ = listener.recvmsg_into([request], _ROOM, _socket.MSG_CMSG_CLOEXEC)
        except TimeoutError:
            break
        fds = _descriptors(said)
        try:
            uid, gid, flags = unpack_from("<3I", request)
            if _sender(said) != own_uid:
                continue
            if size == 0:
                break
            if len(fds) < _LEAST_DESCRIPTORS or not _may_become(own_uid, uid, gid):
                continue
            if _fork(own_uid, uid, gid, fds.pop() if flags & _IS_IN_GROUP else None) == 0:
                _become(bytes(request[_HEAD:size]), uid, gid, fds, listener, calls, traces, run)
        except OSError as error:
            _refuse(fds, error)
        finally:
            request[:size] = bytes(size)
            for fd in fds:
                posix.close(fd)
    posix._exit(0)


def _may_become(own_uid: int, uid: int, gid: int) -> bool:
    """Whether it is a user for boxes: root makes none that is not one box's alone, least of all of itself."""
    if own_uid == 0:
        return uid == gid and _FIRST_UID <= uid <= _LAST_UID
    return (uid, gid) == (own_uid, posix.getegid())


def _descriptors(said: list[tuple[int, int, bytes]]) -> list[int]:
    return [fd for _, kind, data in said if kind == _socket.SCM_RIGHTS for fd in unpack(f"{len(data) // 4}i", data)]


def _sender(said: list[tuple[int, int, bytes]]) -> int | None:
    """Uid of whoever sent a request, as the kernel tells."""
    for _, kind, data in said:
        if kind == _socket.SCM_CREDENTIALS:
            return int.from_bytes(data[4:8], sys.byteorder)
    return None


def _fork(own_uid: int, uid: int, gid: int, group: int | None) -> int:
    """Fork as that user, into namespaces that are its; returns 0 in the fork."""
    if group is not None:  # only we may put anybody there, so the user and the namespaces follow inside
        try:
            return walls.fork(0, group)
        finally:
            posix.close(group)
    changes = uid != own_uid
    if changes:
        posix.setegid(gid)
        posix.seteuid(uid)
    pid = -1
    try:
        pid = walls.fork(NEW_USERS | NEW_PIDS, None)
        return pid
    finally:
        if changes and pid != 0:
            posix.seteuid(0)
            posix.setegid(0)


def _become(
    text: bytes,
    uid: int,
    gid: int,
    fds: list[int],
    channel: _socket.socket,
    calls: walls.Filter,
    traces: _Traces,
    run: Callable[[dict[str, Any]], int],
) -> NoReturn:
    """In a fork: become the box that a request is for, and run its agent."""
    try:
        given, listen = _take_descriptors(fds, channel)
        if posix.getpid() != 1:  # in its group already
            posix.setresgid(gid, gid, gid)
            posix.setresuid(uid, uid, uid)
            if walls.fork(NEW_USERS | NEW_PIDS, None) != 0:
                posix._exit(0)
        box = wire.loads(text.decode())
        traces.replace(box["id"])
        posix.write(_CHANNEL, b"begun")
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        walls.raise_walls(box, uid, gid, calls)
        null = posix.open("/dev/null", posix.O_RDONLY)  # what the zygote has there its forks would share
        posix.dup2(null, 0)
        posix.close(null)
        posix.write(_CHANNEL, b"whole")
        posix.close(_CHANNEL)
        config = wire.loads(_read_all(given).decode())
        config["listen"] = {"fd": listen}
        users.set_rlimits(config.pop("rlimits"))  # all else that comes with them is the zygote's already
        posix.close(given)
    except BaseException as error:
        try:
            posix.write(_CHANNEL, f"failed: {error}".encode()[:1024])
        finally:
            posix._exit(1)
    code = 1
    try:
        code = run(config)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        posix._exit(code)


def _take_descriptors(fds: list[int], channel: _socket.socket) -> tuple[int, int]:
    """Keep those of a request, where each belongs, and no other; those of the configuration and of the listener. These
    were got ready while we were forked, with files of control groups to enter. If none come, whoever asked has gone or
    failed, and we end."""
    log, answer = fds
    posix.dup2(answer, _CHANNEL, inheritable=False)  # in the place of the zygote's listener
    posix.dup2(log, 1)
    posix.dup2(log, 2)
    posix.close(log)
    posix.close(answer)
    _, said, _, _ = channel.recvmsg(1, _ROOM, _socket.MSG_CMSG_CLOEXEC)
    config, listen, *groups = _descriptors(said)
    for fd in groups:
        posix.write(fd, b"0")  # ourselves: the kernel moves one thread without waiting for all others
    posix.closerange(max(config, listen) + 1, _MORE_THAN_WE_HAVE)
    return config, listen


def _refuse(fds: list[int], error: OSError) -> None:
    """Tell why there is no fork; who asked may have gone."""
    try:
        posix.write(fds[1], f"failed: {error}".encode())
    except (OSError, IndexError):
        pass


def _read_all(fd: int) -> bytes:
    data = b""
    while part := posix.read(fd, 1 << 16):
        data += part
    return data


class _Traces:
    """What a fork has of the zygote's own start, and writes its own over."""

    def __init__(self) -> None:
        with open("/proc/self/cmdline", "rb") as file:
            offset = file.read().index(PLACE.encode())
        with open("/proc/self/stat", "rb") as file:
            self._id = int(file.read().rpartition(b") ")[2].split()[_ARGUMENTS_START]) + offset
        self._random = walls.address_of(_RANDOM_BYTES)

    def replace(self, id: str) -> None:
        walls.write_memory(self._id, id.encode())
        walls.write_memory(self._random, posix.urandom(16))


def _warm_up() -> None:
    """Import all that an agent may need, and let no collection of garbage touch it, so that its pages stay shared."""
    agent.load_all()
    for name in _WARM:
        __import__(name)
    "".encode("ascii")  # and found by its name
    open("/dev/null", encoding="ascii").close()
    gc.collect()
    gc.freeze()
    for _ in range(_REHEARSALS):
        rehearse()
    gc.collect(0)
    _share_tables()


def rehearse() -> None:
    """Greet an agent of no box: what an interpreter makes when code first runs, forks have in common then."""
    client, stream = _socket.socketpair()
    loop = Loop()
    fd = stream.detach()
    agent.Agent({"env": {}, "home": "/", "lifetime_s": 1.0}, loop).serve(fd, fd)
    for id, method in enumerate(("hello", "ping"), 1):
        client.send(wire.encode({"jsonrpc": "2.0", "id": id, "method": method, "params": {}}))
        while loop.turn(0):
            pass
    client.close()
    loop.turn(0)
    loop.close()  # no fork may find a number here that is a descriptor of its own


def _share_tables() -> None:
    """Let forks begin with the programs' code in their page tables, where each would find it page by page: the kernel
    copies a file's part of the tables only if one of its pages is no longer the file's."""
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    memory = posix.open("/proc/self/mem", posix.O_RDWR | posix.O_CLOEXEC)
    for line in lines:
        span, mode, _, _, inode, *_ = line.split()
        start, end = (int(address, 16) for address in span.split("-"))
        if inode != "0" and mode in ("r-xp", "r--p") and end - start >= _LARGE:
            ignore_errors(_write_over, memory, start)  # a kernel may refuse that
    posix.close(memory)


def _write_over(memory: int, address: int) -> None:
    posix.pwrite(memory, posix.pread(memory, 1, address), address)  # nothing changes
