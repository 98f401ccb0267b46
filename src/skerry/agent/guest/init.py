"""`init.py ID CONFIG`: PID 1 of a box that an engine starts as root of a user namespace of its own. CONFIG is the
agent's, as JSON in hexadecimal digits, which no engine takes apart, with `init` beside it. What only root can do is
done here, before anything of the box runs: loopback, folders and their owners, resolvers. Then this process becomes the
box's user for good, and the agent."""

from __future__ import annotations

import posix
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LAST_WORD = "skerry: this box has ended by itself\n"


def write(path: str, text: str) -> None:
    """Replace a file, which may be a link to somewhere else."""
    try:
        posix.unlink(path)
    except OSError:
        pass
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}\n")


def reserve(path: str, size: int) -> None:
    """Reserve room for the engine, which writes into the box's disk as it stops and starts it, even if the box has
    filled it: it gives this up then, and a start that finds room makes it whole again. Random bytes, as no disk
    compresses them."""
    flags = posix.O_WRONLY | posix.O_CREAT | posix.O_APPEND | posix.O_NOFOLLOW | posix.O_NONBLOCK | posix.O_CLOEXEC
    try:
        fd = posix.open(path, flags, 0o600)
        try:
            posix.write(fd, posix.urandom(max(0, size - posix.fstat(fd).st_size)))
        finally:
            posix.close(fd)
    except OSError as error:
        sys.stderr.write(f"{path}: {error.strerror}\n")


def prepare(config: dict[str, Any]) -> None:
    from skerry_agent import setup, users  # type: ignore[import-not-found]

    setup.raise_loopback()
    try:
        uid, gid = users.find_user(config["user"])
    except LookupError as error:
        raise SystemExit(str(error)) from None
    with open("/proc/self/uid_map") as file:
        last = max(int(line.split()[0]) + int(line.split()[2]) - 1 for line in file)
    if max(uid, gid) > last:
        raise SystemExit(f"the box has no user {uid}:{gid}; it has those from 0 to {last}")
    setup.make_folder(config["cwd"])
    for path, mode in config["folders"]:
        try:
            setup.own_folder(path, mode, uid, gid)
        except NotADirectoryError as error:
            raise SystemExit(f"{path} {error.strerror}") from None
    for path, text in config["files"]:
        write(path, text)
    if config["reserve"]:
        reserve(*config["reserve"])
    if uid or gid:
        posix.setgroups([])
        posix.setgid(gid)
        posix.setuid(uid)
    posix.umask(0o022)


def main() -> None:
    package = type(sys)("skerry_agent")
    package.__path__ = [__file__.rpartition("/")[0]]
    sys.modules["skerry_agent"] = package
    from skerry_agent import wire

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
