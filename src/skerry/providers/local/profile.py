"""From a spec to the options of bubblewrap: pure, so that the whole boundary can be read and tested in one place."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from skerry.errors import InvalidSpec, UserNotFound
from skerry.model.spec import Network, Spec

HOME = "/home/user"
AGENT = "/.skerry/agent"
PYTHON = "/.skerry/python"
LINKS = "/.skerry/bin"
"""Programs under names that the host has not, at the end of the box's PATH."""
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MAX_ID = 2**32 - 2

_MASKED = ("/proc/cmdline", "/proc/interrupts")
"""Readable files of /proc that tell of the host: its boot parameters, and what its devices do right now. A box's uid is
never root and has no other user in its namespace, so nothing there is writable to it, and what only describes hardware
stays. Each mask costs 0.2 ms of every start."""
_MASKED_FROM_OUR_UID = ("/proc/keys", "/proc/key-users")
"""What shows the keys of the box's uid: none are there if that is the box's own."""

_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

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
    """User of the box's processes, seen from inside. Raises InvalidSpec."""
    text = spec.user
    if text is None or text == "user":
        return User(1000, 1000)
    if text == "root":
        return User(0, 0)
    uid, _, gid = text.partition(":")
    if not uid.isdigit():
        raise UserNotFound(f"user: there is no user {text!r} in a local box; give 'user', 'root' or a UID[:GID]")
    ids = User(int(uid), int(gid or uid))
    if max(ids) > _MAX_ID:
        raise InvalidSpec(f"user: {text!r} is beyond the largest id {_MAX_ID}", field="user")
    return ids


def environment(spec: Spec, *, has_links: bool = False) -> dict[str, str]:
    """Environment of a process in the box."""
    path = f"{DEFAULT_PATH}:{LINKS}" if has_links else DEFAULT_PATH
    name = {0: "root", 1000: "user"}.get(user_of(spec).uid, "user")
    defaults = {"PATH": path, "HOME": HOME, "USER": name, "LOGNAME": name, "LANG": "C.UTF-8"}
    return defaults | spec.env


def masked(*, has_own_uid: bool) -> list[str]:
    """Files of /proc that nobody in a box can read."""
    return [*_MASKED] if has_own_uid else [*_MASKED, *filter(os.path.exists, _MASKED_FROM_OUR_UID)]


def folders(sizes: Sizes) -> list[tuple[str, int, int]]:
    """What a box can write to, in memory: path below its root, mode and size."""
    return [("dev/shm", 0o1777, sizes.shm), ("tmp", 0o1777, sizes.tmp), (HOME[1:], 0o700, sizes.home)]


def devices(folder: str) -> list[str]:
    """The devices that bubblewrap gives to every box, in a folder that nobody can change, without its terminals."""
    links = {"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    links |= {"fd": "/proc/self/fd", "core": "/proc/kcore", "ptmx": "pts/ptmx"}
    return [
        *("--perms", "0755", "--tmpfs", folder),
        *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"{folder}/{name}")),
        *(word for name, target in links.items() for word in ("--symlink", target, f"{folder}/{name}")),
        *("--perms", "0755", "--dir", f"{folder}/shm", "--perms", "0755", "--dir", f"{folder}/pts"),
        *("--remount-ro", folder),
    ]


def options(
    *,
    user: User,
    has_own_uid: bool,
    network: str,
    root: Iterable[str],
    home: Iterable[str],
    sizes: Sizes,
    mounts: Iterable[str],
    info_fd: int,
    seccomp_fd: int,
) -> list[str]:
    """Options of the whole boundary, in the order of the mounts: what comes later lies above."""
    share = ["--share-net"] if network is Network.HOST else []
    closed = [word for path in masked(has_own_uid=has_own_uid) for word in ("--ro-bind", "/dev/null", path)]
    return [
        *("--unshare-all", *share, "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"),
        *("--uid", str(user.uid), "--gid", str(user.gid), "--hostname", "sandbox", "--cap-drop", "ALL"),
        *root,
        *("--proc", "/proc", *closed),
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


def root_of_folder(folder: Iterable[RootEntry]) -> list[str]:
    """A folder as the root: each of its entries is bound by itself, so that mount points need not be made in it."""
    return [
        option
        for path, link, fd in folder
        for option in (bind(fd, path) if link is None else ("--symlink", link, path))
    ]


def bind(fd: int, target: str, *, read_only: bool = True) -> list[str]:
    """By descriptor: what was opened is what is bound, and the box's uid need not be able to reach its path."""
    return ["--ro-bind-fd" if read_only else "--bind-fd", str(fd), target]


def bind_from_host(*paths: str) -> list[str]:
    return [option for path in paths for option in ("--ro-bind", path, path)]


class RootEntry(NamedTuple):
    """One thing of a root folder: a link's target, or a descriptor of a folder or file."""

    path: str
    link: str | None
    fd: int


def entries_of(root_fd: int, prefix: str = "/", skip: frozenset[str] = frozenset(_OWN_PLACES)) -> Iterator[RootEntry]:
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
            yield RootEntry(path, os.readlink(name, dir_fd=root_fd), -1)
        elif path == "/home" and stat.S_ISDIR(mode):
            os.close(fd)
            home_fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=root_fd)
            try:
                yield from entries_of(home_fd, "/home/", frozenset({os.path.basename(HOME)}))
            finally:
                os.close(home_fd)
        elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            yield RootEntry(path, None, fd)
        else:
            os.close(fd)
