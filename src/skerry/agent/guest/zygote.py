"""Zygote: a process that has the agent in its memory, and forks one for each box. It sees the tree that boxes share and
the host's /proc, and may only become other users. It keeps nothing of a box: a request is forgotten once there is a
fork, which reads it, and what may be secret comes by a pipe that the fork alone reads."""

from __future__ import annotations

import _signal
import _socket
import gc
import posix
import select
import sys

from . import agent, walls, wire
from .walls import NEW_PIDS, NEW_USERS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PLACE = "-" * 36
"""Stands in the zygote's arguments where those of each fork have the id of its box."""
_LISTENER, _SETTINGS = 3, 4
_MAX_REQUEST, _LEAST_DESCRIPTORS, _MAX_DESCRIPTORS = 1 << 12, 4, 8
_HEAD = 12
_IS_IN_GROUP = 1
_FIRST_UID, _LAST_UID = 0x70000000, 0x7FFFFFFF
_SET_GID, _SET_UID = 6, 7
_RANDOM_BYTES = 25
_CONFIG, _LISTEN, _ANSWER = 3, 4, 5
_OUT_OF_THE_WAY = 64
_ARGUMENTS_START = 45  # of what follows the name in `stat`
_WARM = "_ctypes", "_posixsubprocess", "encodings.ascii", "fcntl", "resource", "struct", "termios"


def serve() -> dict[str, Any]:
    """Fork a process for each request, until there has been none for a while, or an empty one. Returns in the forks
    alone, in their boxes, with the configuration of the agent."""
    settings = wire.loads(_read_all(_SETTINGS).decode())
    posix.close(_SETTINGS)
    program = bytes.fromhex(settings["program"])
    listener = _socket.socket(fileno=_LISTENER)
    own_uid = posix.geteuid()
    walls.give_up_capabilities((_SET_GID, _SET_UID) if own_uid == 0 else ())
    if own_uid == 0:
        posix.setgroups([])
    walls.set_dumpable(False)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_IGN)  # who has ended is nobody's to wait for
    place = _place_of_id()
    _warm_up()
    poll = select.poll()
    poll.register(_LISTENER, select.POLLIN)
    request = bytearray(_MAX_REQUEST)
    room = _socket.CMSG_SPACE(12) + _socket.CMSG_SPACE(4 * _MAX_DESCRIPTORS)
    while poll.poll(settings["idle_s"] * 1000):
        size, said, _, _ = listener.recvmsg_into([request], room, _socket.MSG_CMSG_CLOEXEC)
        fds = _descriptors(said)
        try:
            uid, gid, flags = (int.from_bytes(request[at : at + 4], "little") for at in range(0, _HEAD, 4))
            if _sender(said) != own_uid:
                continue
            if size == 0:
                break
            if len(fds) < _LEAST_DESCRIPTORS or not _may_become(uid, gid):
                continue
            if _fork(uid, gid, fds.pop() if flags & _IS_IN_GROUP else None) == 0:
                listener.detach()
                return _become(bytes(request[_HEAD:size]), uid, gid, fds, program, place)
        except OSError as error:
            _refuse(fds, error)
        finally:
            request[:size] = bytes(size)
            for fd in fds:
                posix.close(fd)
    posix._exit(0)


def _may_become(uid: int, gid: int) -> bool:
    """Whether it is a user for boxes: root makes none that is not one box's alone, least of all of itself."""
    if posix.geteuid() == 0:
        return uid == gid and _FIRST_UID <= uid <= _LAST_UID
    return (uid, gid) == (posix.geteuid(), posix.getegid())


def _descriptors(said: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        int.from_bytes(data[at : at + 4], sys.byteorder)
        for _, kind, data in said
        if kind == _socket.SCM_RIGHTS
        for at in range(0, len(data) - 3, 4)
    ]


def _sender(said: list[tuple[int, int, bytes]]) -> int | None:
    """Uid of whoever sent a request, as the kernel tells."""
    for _, kind, data in said:
        if kind == _socket.SCM_CREDENTIALS:
            return int.from_bytes(data[4:8], sys.byteorder)
    return None


def _fork(uid: int, gid: int, group: int | None) -> int:
    """Fork as that user, into namespaces that are its; returns 0 in the fork."""
    if group is not None:  # only we may put anybody there, so the user and the namespaces follow inside
        try:
            return walls.fork(0, group)
        finally:
            posix.close(group)
    changes = uid != posix.geteuid()
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


def _become(text: bytes, uid: int, gid: int, fds: list[int], program: bytes, place: int) -> dict[str, Any]:
    """In a fork: become the box that a request is for, and return the configuration of its agent."""
    try:
        _take_descriptors(fds)
        if posix.getpid() != 1:  # in its group already
            posix.setresgid(gid, gid, gid)
            posix.setresuid(uid, uid, uid)
            if walls.fork(NEW_USERS | NEW_PIDS, None) != 0:
                posix._exit(0)
        box = wire.loads(text.decode())
        walls.write_memory(place, box["id"].encode())
        walls.write_memory(walls.address_of(_RANDOM_BYTES), posix.urandom(16))
        posix.write(_ANSWER, b"begun")
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        walls.raise_walls(box, uid, gid, program)
        null = posix.open("/dev/null", posix.O_RDONLY)  # what the zygote has there its forks would share
        posix.dup2(null, 0)
        posix.close(null)
        posix.write(_ANSWER, b"whole")
        posix.close(_ANSWER)
        config: dict[str, Any] = wire.loads(_read_all(_CONFIG).decode())
        posix.close(_CONFIG)
        return config
    except BaseException as error:
        try:
            posix.write(_ANSWER, f"failed: {error}".encode()[:1024])
        finally:
            posix._exit(1)


def _take_descriptors(fds: list[int]) -> None:
    """Keep those of a request, each under its number, and no other; enter the control groups that some of them are."""
    import fcntl

    config, listen, log, answer, *groups = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _OUT_OF_THE_WAY) for fd in fds]
    fds.clear()
    for fd in groups:
        posix.write(fd, b"0")  # ourselves: the kernel moves one thread without waiting for all others
    for fd, number in ((log, 1), (log, 2), (config, _CONFIG), (listen, _LISTEN), (answer, _ANSWER)):
        posix.dup2(fd, number, inheritable=number <= 2)
    posix.closerange(_ANSWER + 1, 2 * _OUT_OF_THE_WAY)


def _refuse(fds: list[int], error: OSError) -> None:
    """Tell why there is no fork; who asked may have gone."""
    try:
        posix.write(fds[3], f"failed: {error}".encode())
    except (OSError, IndexError):
        pass


def _read_all(fd: int) -> bytes:
    data = b""
    while part := posix.read(fd, 1 << 16):
        data += part
    return data


def _place_of_id() -> int:
    """Address of the argument that each fork writes its id over."""
    with open("/proc/self/cmdline", "rb") as file:
        offset = file.read().index(PLACE.encode())
    with open("/proc/self/stat", "rb") as file:
        return int(file.read().rpartition(b") ")[2].split()[_ARGUMENTS_START]) + offset


def _warm_up() -> None:
    """Import all that an agent may need, and let no collection of garbage touch it, so that its pages stay shared."""
    agent.load_all()
    for name in _WARM:
        __import__(name)
    "".encode("ascii")  # and found by its name
    open("/dev/null", encoding="ascii").close()
    gc.collect()
    gc.freeze()
