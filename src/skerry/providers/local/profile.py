"""From a spec to the options of bubblewrap: pure, so that the whole boundary can be read and tested in one place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from skerry.errors import InvalidSpec, Unsupported
from skerry.providers.local.skeleton import HOME
from skerry.spec import Network, Spec

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_ID = 2**32 - 2

_MASKED = ("/proc/cmdline", "/proc/interrupts")
"""Readable files of /proc that tell of the host: its boot parameters, and what its devices do right now. A box's uid is
never root and has no other user in its namespace, so nothing there is writable to it, keys of others are not shown, and
what only describes hardware stays. Each mask costs 0.2 ms of every start."""

_OWN_PLACES = {"proc", "dev", "sys", "tmp", ".skerry"}
"""Top-level names that a box always gets fresh, whatever its root has there."""


class Sizes(NamedTuple):
    home: int
    tmp: int
    shm: int


class User(NamedTuple):
    uid: int
    gid: int


def user_of(spec: Spec) -> User:
    """Who the box's processes are, seen from inside."""
    text = spec.user
    if text is None or text == "user":
        return User(1000, 1000)
    if text == "root":
        return User(0, 0)
    uid, _, gid = text.partition(":")
    if not uid.isdigit():
        raise Unsupported("user", "local", f"there is no user {text!r}; give 'user', 'root' or a UID[:GID]")
    ids = User(int(uid), int(gid or uid))
    if max(ids) > _MAX_ID:
        raise InvalidSpec(f"user: {text!r} is beyond the largest id {_MAX_ID}", field="user")
    return ids


def environment(spec: Spec) -> dict[str, str]:
    """What a process in the box finds in its environment."""
    name = {0: "root", 1000: "user"}.get(user_of(spec).uid, "user")
    defaults = {"PATH": DEFAULT_PATH, "HOME": HOME, "USER": name, "LOGNAME": name, "LANG": "C.UTF-8"}
    return defaults | spec.env


def options(
    *,
    user: User,
    network: Network,
    root: Iterable[str],
    home: Iterable[str],
    sizes: Sizes,
    mounts: Iterable[str],
    info_fd: int,
    seccomp_fd: int,
) -> list[str]:
    """The whole boundary. The order is that of the mounts: what comes later lies above."""
    share = ["--share-net"] if network is Network.HOST else []
    return [
        *("--unshare-all", *share, "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"),
        *("--uid", str(user.uid), "--gid", str(user.gid), "--hostname", "sandbox", "--cap-drop", "ALL"),
        *root,
        *("--proc", "/proc", *(word for path in _MASKED for word in ("--ro-bind", "/dev/null", path))),
        *("--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(sizes.shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--perms", "1777", "--size", str(sizes.tmp), "--tmpfs", "/tmp"),
        *home,
        *mounts,
        *("--remount-ro", "/", "--chdir", "/"),
        *("--info-fd", str(info_fd), "--seccomp", str(seccomp_fd)),
    ]


def home_in_memory(size: int) -> list[str]:
    return ["--perms", "0700", "--size", str(size), "--tmpfs", HOME]


def root_of_folder(folder: Iterable[Entry]) -> list[str]:
    """A folder as the root: each of its entries is bound by itself, so that mount points need not be made in it."""
    options: list[str] = []
    for entry in folder:
        if entry.link is not None:
            options += ["--symlink", entry.link, entry.path]
        else:
            options += bind(entry.fd, entry.path)
    return options


def bind(fd: int, target: str, *, read_only: bool = True) -> list[str]:
    """By descriptor: what was opened is what is bound, and the box's uid need not be able to reach its path."""
    return ["--ro-bind-fd" if read_only else "--bind-fd", str(fd), target]


def bind_from_host(*paths: str) -> list[str]:
    return [option for path in paths for option in ("--ro-bind", path, path)]


class Entry(NamedTuple):
    """One thing of a root folder: a link's target, or a descriptor of a folder or file."""

    path: str
    link: str | None
    fd: int


def entries_of(root_fd: int, prefix: str = "/", skip: frozenset[str] = frozenset(_OWN_PLACES)) -> Iterator[Entry]:
    """Open what a root folder holds, by descriptors, so that nobody can swap a path underneath. /home is opened one
    level deeper, for the work folder lies in it. The caller closes the descriptors."""
    for name in sorted(os.listdir(root_fd)):
        path = prefix + name
        if name in skip:
            continue
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
        mode = os.fstat(fd).st_mode
        if stat.S_ISLNK(mode):
            os.close(fd)
            yield Entry(path, os.readlink(name, dir_fd=root_fd), -1)
        elif path == "/home" and stat.S_ISDIR(mode):
            os.close(fd)
            home_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
            try:
                yield from entries_of(home_fd, "/home/", frozenset({os.path.basename(HOME)}))
            finally:
                os.close(home_fd)
        elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            yield Entry(path, None, fd)
        else:
            os.close(fd)
