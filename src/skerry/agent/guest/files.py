"""Files and folders in the box: told, made, moved, removed."""

from __future__ import annotations

import binascii
import os
import stat

from . import trees
from .channel import Call, Failure, failure_of
from .paths import named, path_of, shown
from .records import RecordSender

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .agent import Agent

_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def entry(path: bytes, info: os.stat_result, target: bytes | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        **named("name", os.path.basename(path)),
        **named("path", path),
        "type": _TYPES.get(stat.S_IFMT(info.st_mode), "file"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime": info.st_mtime,
    }
    if target is not None:
        found.update(named("target", target))
    return found


def stat_path(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    info = os.stat(path) if call.params.get("follow") else os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    call.answer(entry(path, info, target))


def list_dir(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    depth = call.params.get("depth", 1)
    if type(depth) is not int or depth < 1:
        raise Failure("invalid", "depth is 1 or more")
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # fails now, not in the middle
    state = {"count": 0}

    def records() -> Iterator[dict[str, Any]]:
        for inner, info in trees.walk(path, depth):
            full = os.path.join(path, inner)
            target = None
            if stat.S_ISLNK(info.st_mode):
                try:
                    target = os.readlink(full)
                except OSError:
                    target = None
            state["count"] += 1
            yield entry(full, info, target)

    RecordSender(call, records(), lambda: call.answer({"count": state["count"]}))


def make_dir(agent: Agent, call: Call) -> None:
    path, mode = path_of(agent, call.params), call.params.get("mode", 0o777)
    if call.params.get("parents"):
        os.makedirs(path, mode, exist_ok=True)
    else:
        os.mkdir(path, mode)
    call.answer({})


def move(agent: Agent, call: Call) -> None:
    source, target = path_of(agent, call.params), path_of(agent, call.params, "to")
    if not call.params.get("overwrite") and os.path.lexists(target):
        raise Failure("exists", f"{shown(target)}: exists already")
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != 18:  # EXDEV: another filesystem, so copy
            raise
        import shutil

        shutil.move(os.fsdecode(source), os.fsdecode(target))
    call.answer({})


def remove(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    try:
        folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        if call.params.get("missing_ok"):
            call.answer({})
            return
        raise
    if not folder:
        os.unlink(path)
        call.answer({})
    elif not call.params.get("recursive"):
        os.rmdir(path)
        call.answer({})
    else:

        def steps() -> Iterator[None]:
            try:
                yield from trees.remove_tree(path)
                call.answer({})
            except OSError as error:
                call.fail(failure_of(error))

        agent.loop.run_steps(steps())


def chmod(agent: Agent, call: Call) -> None:
    mode = call.params.get("mode")
    if type(mode) is not int or not 0 <= mode <= 0o7777:
        raise Failure("invalid", "mode is a number from 0 to 0o7777")
    os.chmod(path_of(agent, call.params), mode)
    call.answer({})


def chown(agent: Agent, call: Call) -> None:
    uid, gid = call.params.get("uid", -1), call.params.get("gid", -1)
    if type(uid) is not int or type(gid) is not int:
        raise Failure("invalid", "uid and gid are numbers")
    os.chown(path_of(agent, call.params), uid, gid, follow_symlinks=False)
    call.answer({})


def symlink(agent: Agent, call: Call) -> None:
    target = call.params.get("target")
    if type(target) is not str or not target or "\0" in target:
        raise Failure("invalid", "target is a string")
    os.symlink(os.fsencode(target), path_of(agent, call.params))
    call.answer({})


def xattr(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    for name, value in (call.params.get("set") or {}).items():
        os.setxattr(path, name, binascii.a2b_base64(value))
    for name in call.params.get("remove") or []:
        os.removexattr(path, name)
    values = {}
    for name in os.listxattr(path):
        values[name] = binascii.b2a_base64(os.getxattr(path, name), newline=False).decode("ascii")
    call.answer({"xattrs": values})
