"""Users of a box, and limits of its processes: resources, priority, and access to the agent itself."""

from __future__ import annotations

import posix

_MAX_ID = (1 << 32) - 2
_NOW = 2
_SET_DUMPABLE = 4
_MANY_FILES = 1 << 16
_OOM_SCORE = "/proc/self/oom_score_adj"
FIRST_TO_DIE = 1000
"""OOM score of a process that the kernel kills before all others when memory runs out."""


def find_user(name: str) -> tuple[int, int]:
    """Find the numbers of a user, given by UID, UID:GID, or a name that the image knows. Raises LookupError."""
    uid, _, gid = name.partition(":")
    if uid.isdecimal() and (gid or uid).isdecimal() and max(int(uid), int(gid or uid)) <= _MAX_ID:
        return int(uid), int(gid or uid)
    for entry in entries("/etc/passwd", 4):
        if entry[0] == uid and entry[2].isdecimal() and entry[3].isdecimal():
            return int(entry[2]), int(entry[3])
    if uid == "root":
        return 0, 0
    raise LookupError(f"no user is called {uid!r} in the image; give a UID or UID:GID")


def entries(path: str, fields: int) -> list[list[str]]:
    """Read the lines of /etc/passwd or /etc/group that have so many fields; none if there is no such file."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            found = [line.rstrip("\n").split(":") for line in file]
    except OSError:
        return []
    return [entry for entry in found if len(entry) >= fields]


def be_ordinary(limits: dict[str, int]) -> None:
    """Take these limits, and what else any program has, whatever whoever started us has."""
    set_rlimits(limits)
    lower_priority()
    posix.umask(0o022)


def set_rlimits(limits: dict[str, int]) -> None:
    """Bound each process of the box; no limit is raised above our own."""
    import resource

    for name, value in limits.items():
        number = getattr(resource, "RLIMIT_" + name.upper())
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def allow_many_files() -> None:
    """Raise our own soft limit of open files to the hard one, but not so far that a child which goes through all
    numbers would take long."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass  # a system with a bound of its own


def deny_tracing() -> None:
    """Let no process of our own user trace us, open our memory or descriptors, or dump us. What we start is open again
    once it is a program of its own. Raises OSError."""
    import _ctypes  # `ctypes` itself takes ten times as long to import

    itself = _ctypes.dlopen(None, _NOW)  # type: ignore[arg-type]
    prctl = _ctypes.dlsym(itself, "prctl")
    if _ctypes.call_function(prctl, (_SET_DUMPABLE, 0, 0, 0, 0)) != 0:
        raise OSError("the kernel does not let the agent close itself to other processes")


def lower_priority() -> None:
    """Take the priority of any program: whoever started us may be more urgent, and no box is."""
    if posix.sched_getscheduler(0) in (posix.SCHED_FIFO, posix.SCHED_RR):
        posix.sched_setscheduler(0, posix.SCHED_OTHER, posix.sched_param(0))
    if posix.getpriority(posix.PRIO_PROCESS, 0) < 0:
        posix.setpriority(posix.PRIO_PROCESS, 0, 0)
    if oom_score() < 0:  # the last one to be killed where memory runs out
        set_oom_score(0)


def oom_score() -> int:
    try:
        fd = posix.open(_OOM_SCORE, posix.O_RDONLY | posix.O_CLOEXEC)
        try:
            return int(posix.read(fd, 16))
        finally:
            posix.close(fd)
    except OSError:
        return 0


def set_oom_score(score: int) -> None:
    """Be killed the sooner when the host's memory runs out, with all that we start from now on. Said by one that has
    CAP_SYS_RESOURCE it is also the floor that its children cannot go below."""
    # not by `open`, whose pages would be private to every fork of a zygote
    try:
        fd = posix.open(_OOM_SCORE, posix.O_WRONLY | posix.O_CLOEXEC)
        try:
            posix.write(fd, b"%d" % score)
        finally:
            posix.close(fd)
    except OSError:
        pass  # a kernel without it, or a /proc that cannot be written to
