"""Files in the box: any name, any size, in bounded memory."""

from __future__ import annotations

import binascii
import os
import stat

from . import trees, wire
from .channel import Call, Failure, FilePart, OpenFile, failure_of
from .spawn import expand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from .agent import Agent

_CHUNK = 1 << 20
_RECORDS = 1 << 16
_TYPES = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}


def path_of(agent: Agent, params: dict[str, Any], name: str = "path") -> bytes:
    """The path of a request as bytes, absolute."""
    encoded, text = params.get(f"{name}64"), params.get(name)
    try:
        if type(encoded) is str:
            path = binascii.a2b_base64(encoded)
        elif type(text) is str and text:
            path = os.fsencode(expand(text, agent.home))
        else:
            raise Failure("invalid", f"{name} is missing")
    except ValueError:
        raise Failure("invalid", f"{name}64 is not base64") from None
    if b"\0" in path:
        raise Failure("invalid", f"{name} has a NUL byte")
    return os.path.join(os.fsencode(agent.home), path)


def named(key: str, value: bytes) -> dict[str, str]:
    """A name for the wire: text where it is UTF-8, base64 of the bytes where it is not."""
    try:
        return {key: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{key}64": binascii.b2a_base64(value, newline=False).decode("ascii")}


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


def send_records(agent: Agent, call: Call, records: Iterator[dict[str, Any]], done: Callable[[], None]) -> None:
    """Records down the call's stream as they come and as there is room, never holding up the loop for long."""
    waiting: list[bytes] = []

    def pump() -> None:
        if not call.open or (waiting and call.room() < len(waiting[0])):
            return
        if waiting:
            call.send(waiting.pop())
        batch, size = [], 0
        try:
            for record in records:
                line = wire.encode(record)
                batch.append(line)
                size += len(line)
                if size >= _RECORDS:
                    break
            else:
                call.pump = None
        except OSError as error:
            call.fail(failure_of(error))
            return
        if batch:
            waiting.append(b"".join(batch))
        if call.pump is not None:
            agent.loop.soon(pump)
        elif waiting and call.room() < len(waiting[0]):
            call.pump = last
        else:
            last()

    def last() -> None:
        if not call.open or (waiting and call.room() < len(waiting[0])):
            return
        call.pump = None
        if waiting:
            call.send(waiting.pop())
        done()

    call.pump = pump
    pump()


def read_file(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    offset, length = call.params.get("offset", 0), call.params.get("length")
    if type(offset) is not int or offset < 0 or not (length is None or (type(length) is int and length >= 0)):
        raise Failure("invalid", "offset and length are integers that are not negative")
    file = OpenFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    info = os.fstat(file.fd)
    _refuse_irregular(info, path)
    if info.st_size == 0 and stat.S_ISREG(info.st_mode):
        _read_unsized(agent, call, file, offset, length)
        return
    end = info.st_size if length is None else min(info.st_size, offset + length)
    state = {"at": offset}

    def pump() -> None:
        while state["at"] < end and call.room() > 0:
            count = min(end - state["at"], call.room(), _CHUNK)
            call.send_file(FilePart(file, state["at"], count))
            state["at"] += count
        if state["at"] >= end:
            call.pump = None
            call.channel.when_sent(finish)

    def finish() -> None:
        if file.shrank:
            call.fail(Failure("failed", "the file became shorter while it was read"))
        else:
            call.answer({"size": info.st_size, "bytes_sent": max(0, end - offset)})

    call.pump = pump
    pump()


def _read_unsized(agent: Agent, call: Call, file: OpenFile, offset: int, length: int | None) -> None:
    """Files such as those of /proc have a content but no size: read until they end."""
    sent = {"at": offset}
    last = None if length is None else offset + length

    def pump() -> None:
        try:
            while call.room() > 0:
                count = min(call.room(), _CHUNK if last is None else last - sent["at"], _CHUNK)
                data = os.pread(file.fd, count, sent["at"]) if count > 0 else b""
                if not data:
                    call.answer({"size": sent["at"], "bytes_sent": sent["at"] - offset})
                    return
                call.send(data)
                sent["at"] += len(data)
        except OSError as error:
            call.fail(failure_of(error))

    call.pump = pump
    pump()


def _refuse_irregular(info: os.stat_result, path: bytes) -> None:
    where = path.decode("utf-8", "replace")
    if stat.S_ISDIR(info.st_mode):
        raise Failure("is_a_directory", f"{where}: is a folder")
    if not stat.S_ISREG(info.st_mode) and not stat.S_ISCHR(info.st_mode):
        raise Failure("not_regular", f"{where}: is a {_TYPES.get(stat.S_IFMT(info.st_mode), 'special file')}")
    if stat.S_ISCHR(info.st_mode):
        raise Failure("not_regular", f"{where}: is a device, which has no end")


def write_file(agent: Agent, call: Call) -> None:
    params = call.params
    path = path_of(agent, params)
    mode, offset = params.get("mode"), params.get("offset")
    if params.get("parents"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    temporary = _temporary(path) if params.get("atomic") and offset is None and not params.get("append") else None
    flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    if params.get("append"):
        flags |= os.O_APPEND
    elif temporary is not None:
        flags |= os.O_EXCL
    elif offset is None:
        flags |= os.O_TRUNC
    try:
        file = OpenFile(os.open(temporary or path, flags, 0o666))
    except OSError as error:
        raise failure_of(error, path.decode("utf-8", "replace")) from None
    info = os.fstat(file.fd)
    if stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
        raise Failure("not_regular", f"{path.decode('utf-8', 'replace')}: is a pipe or a socket")
    if type(offset) is int and offset > 0:
        os.lseek(file.fd, offset, os.SEEK_SET)

    def give_up() -> None:
        if temporary is not None:
            os.unlink(temporary)

    def on_data(data: memoryview) -> None:
        view = data
        try:
            while view:
                view = view[os.write(file.fd, view) :]
        except OSError as error:
            give_up()
            call.fail(failure_of(error, path.decode("utf-8", "replace")))
            return
        call.acknowledge(len(data))

    def on_end() -> None:
        try:
            if type(mode) is int:
                os.fchmod(file.fd, mode & 0o7777)
            elif temporary is not None:
                _keep_mode(path, file.fd)
            size = os.fstat(file.fd).st_size
            if temporary is not None:
                os.rename(temporary, path)
        except OSError as error:
            give_up()
            call.fail(failure_of(error, path.decode("utf-8", "replace")))
            return
        call.answer({"size": size})

    def on_cancel() -> None:
        give_up()
        call.fail(Failure("cancelled", "cancelled"))

    call.on_data, call.on_end, call.on_cancel, call.on_close = on_data, on_end, on_cancel, give_up


def _temporary(path: bytes) -> bytes | None:
    """A name beside the file, to be renamed over it; None where only a write in place keeps what is there."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
    except FileNotFoundError:
        pass
    return os.path.join(os.path.dirname(path), b".skerry-%s" % binascii.hexlify(os.urandom(8)))


def _keep_mode(path: bytes, fd: int) -> None:
    try:
        os.fchmod(fd, stat.S_IMODE(os.stat(path).st_mode))
    except FileNotFoundError:
        pass


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

    send_records(agent, call, records(), lambda: call.answer({"count": state["count"]}))


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
        raise Failure("exists", f"{target.decode('utf-8', 'replace')}: exists already")
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
