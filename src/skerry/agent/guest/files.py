"""Calls about files and folders: stat, list, make, move, remove."""

from __future__ import annotations

import binascii
import os
import stat

from . import trees, wire
from .channel import Call, Failure, failure_of
from .contents import named, path_of, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from .agent import Agent
    from .details import Details

TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
_BATCH = 1 << 16


class RecordSender:
    """Sender of records down a call's stream, as there is room, which never holds up the loop for long."""

    def __init__(self, call: Call, records: Iterator[dict[str, Any]]) -> None:
        self._call = call
        self._records = records
        self._count = 0
        self._batch = b""
        self._at_end = False
        call.pump = self._pump
        self._pump()

    def _pump(self) -> None:
        """Send one batch and make the next; the loop has its turn in between."""
        call = self._call
        if not call.open:
            return
        if self._batch:
            room = call.room()
            if room <= 0:
                return
            call.send(self._batch[:room])
            self._batch = self._batch[room:]
            if self._batch:
                return
        if self._at_end:
            call.answer({"count": self._count})
            return
        try:
            self._batch = self._next_batch()
        except OSError as error:
            call.fail(failure_of(error))
            return
        call.channel.loop.soon(self._pump)

    def _next_batch(self) -> bytes:
        lines: list[bytes] = []
        size = 0
        for record in self._records:
            lines.append(wire.encode(record))
            self._count += 1
            size += len(lines[-1])
            if size >= _BATCH:
                break
        else:
            self._at_end = True
        return b"".join(lines)


def entry(
    agent: Agent, path: bytes, info: os.stat_result, target: bytes | None, details: Details | None = None
) -> dict[str, Any]:
    found: dict[str, Any] = {
        **named("name", os.path.basename(path)),
        **named("path", agent.box_path(path)),
        "type": TYPES.get(stat.S_IFMT(info.st_mode), "file"),
        "size": info.st_size,
        "mode": stat.S_IMODE(info.st_mode),
        "uid": info.st_uid,
        "gid": info.st_gid,
        "mtime": info.st_mtime,
    }
    if target is not None:
        found.update(named("target", target))
    if details is not None:
        found.update(details.of(path, info))
    return found


def _details(agent: Agent, call: Call) -> Details | None:
    if not call.params.get("details"):
        return None
    from .details import Details

    return Details(agent, call.params.get("xattrs"))


def follow_new_folders(agent: Agent) -> None:
    """Have watches know a folder that was just made, before whoever made it hears of that and puts more into it."""
    for each in list(agent.watches):
        each.drain()


def stat_path(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    info = os.stat(path) if call.params.get("follow") else os.lstat(path)
    target = os.readlink(path) if stat.S_ISLNK(info.st_mode) else None
    call.answer(entry(agent, path, info, target, _details(agent, call)))


def list_dir(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    depth = call.params.get("depth", 1)
    if type(depth) is not int or depth < 1:
        raise Failure("invalid", "depth is 1 or more")
    os.close(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))  # fails now, not in the middle
    details = _details(agent, call)

    def records() -> Iterator[dict[str, Any]]:
        for inner, info in trees.walk(path, depth):
            full = os.path.join(path, inner)
            target = None
            if stat.S_ISLNK(info.st_mode):
                try:
                    target = os.readlink(full)
                except OSError:
                    pass
            yield entry(agent, full, info, target, details)

    RecordSender(call, records())


def make_dir(agent: Agent, call: Call) -> None:
    path, mode = path_of(agent, call.params), call.params.get("mode", 0o777)
    if call.params.get("parents"):
        os.makedirs(path, mode, exist_ok=not call.params.get("new"))
    else:
        os.mkdir(path, mode)
    follow_new_folders(agent)
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
    follow_new_folders(agent)
    call.answer({})


def remove(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)

    def steps() -> Iterator[None]:
        try:
            yield from trees.remove_tree(path)
            call.answer({})
        except OSError as error:
            call.fail(failure_of(error))

    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        if not call.params.get("missing_ok"):
            raise
        call.answer({})
        return
    if is_folder and call.params.get("recursive"):
        agent.loop.run_steps(steps())
        return
    (os.rmdir if is_folder else os.unlink)(path)
    call.answer({})


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
    path, new, replaced = path_of(agent, call.params), call.params.get("set") or {}, call.params.get("replace")
    removed = list(call.params.get("remove") or [])
    if replaced:
        removed += [name for name in os.listxattr(path) if name.startswith(replaced) and name not in new]
    for name, value in new.items():
        os.setxattr(path, name, binascii.a2b_base64(value))
    for name in removed:
        os.removexattr(path, name)
    values = {name: binascii.b2a_base64(os.getxattr(path, name), newline=False) for name in os.listxattr(path)}
    call.answer({"xattrs": {name: value.decode("ascii") for name, value in values.items()}})
