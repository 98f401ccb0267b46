"""`init.py ID CONFIG`: PID 1 of a box that an engine starts as root of a user namespace of its own.

CONFIG is the agent's, as JSON in hexadecimal digits, which no engine takes apart, with `init` beside it. What only root
can do is done here, before anything of the box runs: loopback, folders and their owners, resolvers. Then this process
becomes the box's user for good, and the agent.
"""

from __future__ import annotations

import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_SET_FLAGS = 0x8914
_UP = 0x41
_READ_ONLY = 30
_LAST_WORD = "skerry: this box has ended by itself\n"


def raise_loopback() -> None:
    from _socket import AF_INET, SOCK_DGRAM, socket
    from fcntl import ioctl

    asking = socket(AF_INET, SOCK_DGRAM)
    ioctl(asking.fileno(), _SET_FLAGS, b"lo".ljust(16, b"\0") + _UP.to_bytes(2, sys.byteorder) + bytes(22))
    asking.close()


def find_user(name: str) -> tuple[int, int]:
    """The numbers of a user that is given by UID, UID:GID, or a name that the image knows."""
    uid, _, gid = name.partition(":")
    if uid.isdigit():
        return int(uid), int(gid or uid)
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
            for line in file:
                entry = line.split(":")
                if len(entry) > 3 and entry[0] == uid:
                    return int(entry[2]), int(entry[3])
    except (OSError, ValueError):
        pass
    if uid == "root":
        return 0, 0
    raise SystemExit(f"no user is called {uid!r} in the image; give a UID or UID:GID")


def check(uid: int, gid: int) -> None:
    """A namespace has so many users, and no more."""
    with open("/proc/self/uid_map") as file:
        last = max(int(line.split()[0]) + int(line.split()[2]) - 1 for line in file)
    if max(uid, gid) > last:
        raise SystemExit(f"the box has no user {uid}:{gid}; it has those from 0 to {last}")


def make(path: str) -> None:
    """A folder, with all that leads to it, unless it is there."""
    at = ""
    for part in path.strip("/").split("/"):
        at += "/" + part
        try:
            posix.mkdir(at, 0o755)
        except OSError:
            pass


def own(path: str, mode: int, uid: int, gid: int) -> None:
    """A folder that is the user's; one that may only be read stays as it is, and so does what a link leads to."""
    make(path)
    try:
        fd = posix.open(path, posix.O_RDONLY | posix.O_DIRECTORY | posix.O_NOFOLLOW | posix.O_CLOEXEC)
    except OSError as error:
        raise SystemExit(f"{path} of the image is no folder: {error.strerror}") from None
    try:
        posix.chown(fd, uid, gid)
        posix.chmod(fd, mode)
    except OSError as error:
        if error.errno != _READ_ONLY:
            raise
    finally:
        posix.close(fd)


def write(path: str, text: str) -> None:
    """In the place of whatever is there, which may be a link to somewhere else."""
    try:
        posix.unlink(path)
    except OSError:
        pass
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}\n")


def prepare(config: dict[str, Any]) -> None:
    raise_loopback()
    uid, gid = find_user(config["user"])
    check(uid, gid)
    make(config["cwd"])
    for path, mode in config["folders"]:
        own(path, mode, uid, gid)
    for path, text in config["files"]:
        write(path, text)
    if uid or gid:
        posix.setgroups([])
        posix.setgid(gid)
        posix.setuid(uid)
    posix.umask(0o022)


def main() -> None:
    package = type(sys)("skerry_agent")
    package.__path__ = [__file__.rpartition("/")[0]]
    sys.modules["skerry_agent"] = package
    from skerry_agent import wire  # type: ignore[import-not-found]

    text = bytes.fromhex(sys.argv[2]).decode()
    prepare(wire.loads(text)["init"])
    sys.argv[2] = text
    try:
        from skerry_agent import start  # noqa: F401
    except SystemExit as end:
        if not end.code:  # nobody told it to stop: its time was over
            sys.stderr.write(_LAST_WORD)
            sys.stderr.flush()
        raise


main()
