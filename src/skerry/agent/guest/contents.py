"""Paths on the wire, and contents of files: read and written in bounded memory, whatever their size."""

from __future__ import annotations

import binascii
import errno
import os
import stat

from .channel import Call, Failure, FilePart, OpenFile, failure_of
from .loop import ignore_errors
from .spawn import expand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent

_CHUNK = 1 << 20


def path_of(agent: Agent, params: dict[str, Any], name: str = "path") -> bytes:
    """Take the path of a request, as absolute bytes. Raises Failure."""
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
    whole = os.path.join(os.fsencode(agent.cwd), path)
    return agent.real_path(b"/" + b"/".join(part for part in whole.split(b"/") if part not in (b"", b".")))


def named(key: str, value: bytes) -> dict[str, str]:
    """Encode a name for the wire: text where it is UTF-8, base64 of the bytes where it is not."""
    try:
        return {key: value.decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{key}64": binascii.b2a_base64(value, newline=False).decode("ascii")}


def shown(path: bytes) -> str:
    """Decode a path for a message."""
    return path.decode("utf-8", "replace")


def read_file(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    offset, length = call.params.get("offset", 0), call.params.get("length")
    if type(offset) is not int or offset < 0 or not (length is None or (type(length) is int and length >= 0)):
        raise Failure("invalid", "offset and length are integers that are not negative")
    file = OpenFile(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    info = os.fstat(file.fd)
    if stat.S_ISDIR(info.st_mode):
        raise Failure("is_a_directory", f"{shown(path)}: is a folder")
    if not stat.S_ISREG(info.st_mode):
        raise Failure("not_regular", f"{shown(path)}: is a pipe, a socket or a device")
    if info.st_size == 0:
        _read_unsized(call, file, offset, length)
        return
    end = info.st_size if length is None else min(info.st_size, offset + length)
    state = {"at": offset}

    def pump() -> None:
        while state["at"] < end and call.room() > 0:
            count = min(end - state["at"], call.room(), _CHUNK)
            call.send(FilePart(file, state["at"], count))
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


def _read_unsized(call: Call, file: OpenFile, offset: int, length: int | None) -> None:
    """Read a file without a size, such as those of /proc, until it ends."""
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


class FileWriter:
    """File that is being written: in place, or beside it until all of it is there."""

    def __init__(self, agent: Agent, call: Call, path: bytes) -> None:
        params = call.params
        self._call = call
        self._write = agent.write
        self._path = path
        self._mode = params.get("mode")
        in_place = params.get("offset") is not None or params.get("append") or not params.get("atomic")
        self._temporary = None if in_place else _name_beside(path)
        if self._temporary is not None:
            _check_writable(path)
        try:
            self._file = OpenFile(os.open(self._temporary or path, self._flags(), 0o666))
        except OSError as error:
            raise failure_of(error, shown(path)) from None
        mode = os.fstat(self._file.fd).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            raise Failure("not_regular", f"{shown(path)}: is a pipe or a socket")
        if params.get("own"):  # others in the box cannot tell who of its programs wrote it
            ignore_errors(os.fchown, self._file.fd, os.geteuid(), os.getegid())
        if params.get("offset"):
            os.lseek(self._file.fd, params["offset"], os.SEEK_SET)
        call.on_data = self._on_data
        call.on_end = self._on_end
        call.on_close = self._give_up

    def _flags(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
        if self._call.params.get("append"):
            return flags | os.O_APPEND
        if self._temporary is not None:
            return flags | os.O_EXCL
        return flags if self._call.params.get("offset") is not None else flags | os.O_TRUNC

    def _on_data(self, data: memoryview) -> None:
        view = data
        try:
            while view:
                view = view[self._write(self._file.fd, view) :]
        except OSError as error:
            self._fail(error)
        else:
            self._call.acknowledge(len(data))

    def _on_end(self) -> None:
        try:
            if self._mode is not None:
                os.fchmod(self._file.fd, self._mode & 0o7777)
            elif self._temporary is not None:
                self._keep_mode()
            size = os.fstat(self._file.fd).st_size
            if self._temporary is not None:
                os.rename(self._temporary, self._path)
        except OSError as error:
            self._fail(error)
        else:
            self._call.answer({"size": size})

    def _keep_mode(self) -> None:
        try:
            os.fchmod(self._file.fd, stat.S_IMODE(os.stat(self._path).st_mode))
        except FileNotFoundError:
            pass

    def _fail(self, error: OSError) -> None:
        self._give_up()
        self._call.fail(failure_of(error, shown(self._path)))

    def _give_up(self) -> None:
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            ignore_errors(os.unlink, temporary)  # somebody in the box may have been quicker


def write_file(agent: Agent, call: Call) -> None:
    for name in ("mode", "offset"):
        value = call.params.get(name)
        if value is not None and (type(value) is not int or value < 0):
            raise Failure("invalid", f"{name} is an integer that is not negative")
    path = path_of(agent, call.params)
    if call.params.get("parents"):
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        except FileExistsError as error:
            raise Failure("not_a_directory", f"{shown(os.fsencode(error.filename))}: is no folder") from None
        for each in list(agent.watches):  # they know the new folders before there is a file
            each.drain()
    FileWriter(agent, call, path)


def _name_beside(path: bytes) -> bytes | None:
    """Choose a temporary name beside the file; None for links and devices, which only a write in place keeps."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
    except FileNotFoundError:
        pass
    return os.path.join(os.path.dirname(path), b".skerry-%s" % binascii.hexlify(os.urandom(8)))


def _check_writable(path: bytes) -> None:
    """Refuse to put another file in the place of one that may not be written: its folder's owner could. Raises
    Failure."""
    if os.access(path, os.W_OK) or not os.path.lexists(path):
        return
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.ETXTBSY:  # a program that runs may be replaced
            raise failure_of(error, shown(path)) from None
