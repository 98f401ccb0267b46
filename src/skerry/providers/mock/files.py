"""The file calls of the mock's agent."""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import os
import posixpath
import stat
import tarfile
from collections import deque
from typing import Any

from skerry.agent.guest import wire
from skerry.agent.guest.channel import Failure
from skerry.agent.guest.paths import named
from skerry.providers.mock.channel import Call, Handler
from skerry.providers.mock.filesystem import Node
from skerry.providers.mock.kernel import Bell, Machine

_CHUNK = 1 << 16
_TYPES = {stat.S_IFREG: "file", stat.S_IFDIR: "dir", stat.S_IFLNK: "symlink", stat.S_IFCHR: "char"}


def entry(path: bytes, node: Node) -> dict[str, Any]:
    found: dict[str, Any] = {
        **named("name", posixpath.basename(path)),
        **named("path", path),
        "type": _TYPES[stat.S_IFMT(node.mode)],
        "size": node.size,
        "mode": stat.S_IMODE(node.mode),
        "uid": node.uid,
        "gid": node.gid,
        "mtime": node.mtime,
    }
    return {**found, **named("target", node.target)} if node.is_link else found


class FileCalls:
    def __init__(self, machine: Machine, home: str, uid: int) -> None:
        self._files = machine.files
        self._home = os.fsencode(home)
        self._uid = uid
        self._numbers = itertools.count(1)
        self.handlers: dict[str, Handler] = {
            "read_file": self._read, "write_file": self._write, "stat": self._stat, "list_dir": self._list,
            "make_dir": self._make_dir, "move": self._move, "remove": self._remove, "chmod": self._chmod,
            "chown": self._chown, "symlink": self._symlink, "xattr": self._xattr, "watch": self._watch,
            "tree_download": self._download, "tree_upload": self._upload,
        }  # fmt: skip

    def _path(self, call: Call, name: str = "path") -> bytes:
        encoded, text = call.params.get(f"{name}64"), call.params.get(name)
        if isinstance(encoded, str):
            try:
                path = base64.b64decode(encoded, validate=True)
            except ValueError:
                raise Failure("invalid", f"{name}64 is not base64") from None
        elif isinstance(text, str) and text:
            path = os.fsencode(text[2:] if text == "~" or text.startswith("~/") else text)
        else:
            raise Failure("invalid", f"{name} is missing")
        if b"\0" in path:
            raise Failure("invalid", f"{name} has a NUL byte")
        return posixpath.join(self._home, path)

    async def _read(self, call: Call) -> dict[str, Any]:
        path = self._path(call)
        offset, length = call.params.get("offset", 0), call.params.get("length")
        if type(offset) is not int or offset < 0 or not (length is None or (type(length) is int and length >= 0)):
            raise Failure("invalid", "offset and length are integers that are not negative")
        node = self._files.open(path, "r", self._uid)
        _refuse_device(node, path)
        size = len(node.data)
        end = size if length is None else min(size, offset + length)
        for start in range(offset, end, _CHUNK):
            await call.send(bytes(node.data[start : min(end, start + _CHUNK)]))
        return {"size": size, "bytes_sent": max(0, end - offset)}

    async def _write(self, call: Call) -> dict[str, Any]:
        path, params = self._path(call), call.params
        offset, mode = params.get("offset"), params.get("mode")
        if params.get("parents"):
            self._files.make_dir(posixpath.dirname(path), self._uid, parents=True)
        if params.get("atomic") and offset is None and not params.get("append") and not self._is_special(path):
            node = await self._write_aside(call, path)
        else:
            node = self._files.open(path, "w", self._uid, create=True)
            if offset is None and not params.get("append"):
                self._files.truncate(node)
            await self._fill(call, node, offset or 0, path, append=bool(params.get("append")))
        if type(mode) is int:
            node.mode = stat.S_IFMT(node.mode) | (mode & 0o7777)
        return {"size": node.size}

    def _is_special(self, path: bytes) -> bool:
        return self._files.exists(path) and not self._files.find(path, self._uid, follow=False).is_file

    async def _write_aside(self, call: Call, path: bytes) -> Node:
        """Write a file beside the old one, and put it in its place when it is whole."""
        aside = posixpath.join(posixpath.dirname(path), b".skerry-%d" % next(self._numbers))
        node = self._files.open(aside, "w", self._uid, create=True)
        try:
            await self._fill(call, node, 0, aside, append=False)
            if self._files.exists(path):
                node.mode = self._files.find(path, self._uid).mode
            self._files.move(aside, path, self._uid)
        except BaseException:
            self._files.remove(aside, self._uid)
            raise
        return node

    async def _fill(self, call: Call, node: Node, at: int, path: bytes, *, append: bool) -> None:
        if node.is_device:
            await call.read_all()
            return
        while chunk := await call.read():
            at = len(node.data) if append else at
            self._files.write(node, at, chunk, path)
            at += len(chunk)

    async def _stat(self, call: Call) -> dict[str, Any]:
        path = self._path(call)
        return entry(path, self._files.find(path, self._uid, follow=bool(call.params.get("follow"))))

    async def _list(self, call: Call) -> dict[str, Any]:
        depth = call.params.get("depth", 1)
        if type(depth) is not int or depth < 1:
            raise Failure("invalid", "depth is 1 or more")
        count = 0
        for path, node in self._files.walk(self._path(call), depth, self._uid):
            await call.send(wire.encode(entry(path, node)))
            count += 1
        return {"count": count}

    async def _make_dir(self, call: Call) -> dict[str, Any]:
        mode, parents = call.params.get("mode", 0o755), bool(call.params.get("parents"))
        self._files.make_dir(self._path(call), self._uid, mode=mode, parents=parents)
        return {}

    async def _move(self, call: Call) -> dict[str, Any]:
        overwrite = bool(call.params.get("overwrite"))
        self._files.move(self._path(call), self._path(call, "to"), self._uid, overwrite=overwrite)
        return {}

    async def _remove(self, call: Call) -> dict[str, Any]:
        try:
            self._files.remove(self._path(call), self._uid, recursive=bool(call.params.get("recursive")))
        except FileNotFoundError:
            if not call.params.get("missing_ok"):
                raise
        return {}

    async def _chmod(self, call: Call) -> dict[str, Any]:
        if type(call.params.get("mode")) is not int:
            raise Failure("invalid", "mode is a number")
        self._files.chmod(self._path(call), call.params["mode"], self._uid)
        return {}

    async def _chown(self, call: Call) -> dict[str, Any]:
        owner, group = call.params.get("uid"), call.params.get("gid")
        if type(owner) is not int or type(group) is not int:
            raise Failure("invalid", "uid and gid are numbers")
        self._files.chown(self._path(call), owner, group, self._uid)
        return {}

    async def _symlink(self, call: Call) -> dict[str, Any]:
        target = call.params.get("target")
        if not isinstance(target, str) or not target:
            raise Failure("invalid", "target is missing")
        self._files.symlink(self._path(call), os.fsencode(target), self._uid)
        return {}

    async def _xattr(self, call: Call) -> dict[str, Any]:
        node = self._files.find(self._path(call), self._uid)
        for name, value in (call.params.get("set") or {}).items():
            if not str(name).startswith("user."):
                raise Failure("unsupported", f"{name}: only names that begin with 'user.' can be set")
            node.xattrs[str(name)] = base64.b64decode(value)
        for name in call.params.get("remove") or []:
            node.xattrs.pop(name, None)
        return {"xattrs": {name: base64.b64encode(value).decode() for name, value in node.xattrs.items()}}

    async def _watch(self, call: Call) -> dict[str, Any]:
        path, recursive = self._path(call), bool(call.params.get("recursive"))
        if not self._files.find(path, self._uid).is_dir:
            raise OSError(20, os.strerror(20), os.fsdecode(path))
        top = self._files.real(path, self._uid)
        records: deque[dict[str, Any]] = deque([{"event": "ready"}])
        bell, ended = Bell(), asyncio.Event()

        def changed(event: str, where: bytes, is_dir: bool) -> None:
            where = posixpath.normpath(where)
            inside = where.startswith(top.rstrip(b"/") + b"/")
            if inside and (recursive or posixpath.dirname(where) == top):
                records.append({"event": event, **named("path", where), "dir": is_dir})
                bell.ring()

        def cancel() -> None:
            ended.set()
            call.drop_pending()
            bell.ring()

        call.on_cancel = cancel
        self._files.watchers.add(changed)
        try:
            while not ended.is_set():
                while records:
                    await call.send(wire.encode(records.popleft()))
                await bell.wait(None)
        finally:
            self._files.watchers.discard(changed)
        return {}

    async def _download(self, call: Call) -> dict[str, Any]:
        path = self._path(call)
        node = self._files.find(path, self._uid)
        nodes = self._files.walk(path, uid=self._uid) if node.is_dir else iter([(path, node)])
        top = path.rstrip(b"/") if node.is_dir else posixpath.dirname(path)
        for where, found in nodes:
            member = tarfile.TarInfo(os.fsdecode(where[len(top) + 1 :]))
            member.mode, member.uid, member.gid = stat.S_IMODE(found.mode), found.uid, found.gid
            member.mtime = int(found.mtime)
            if found.is_device:
                continue
            member.type = tarfile.DIRTYPE if found.is_dir else tarfile.SYMTYPE if found.is_link else tarfile.REGTYPE
            member.linkname = os.fsdecode(found.target)
            member.size = len(found.data)
            await call.send(member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))
            await call.send(bytes(found.data) + bytes(-len(found.data) % tarfile.BLOCKSIZE))
        await call.send(bytes(2 * tarfile.BLOCKSIZE))
        return {}

    async def _upload(self, call: Call) -> dict[str, Any]:
        path = self._path(call)
        data = io.BytesIO(await call.read_all())
        self._files.make_dir(path, self._uid, parents=True)
        try:
            with tarfile.open(fileobj=data, mode="r:") as archive:
                for member in archive:
                    self._unpack(archive, member, path)
        except tarfile.TarError as error:
            raise Failure("invalid", f"not a tar stream: {error}") from None
        return {}

    def _unpack(self, archive: tarfile.TarFile, member: tarfile.TarInfo, top: bytes) -> None:
        parts = [part for part in os.fsencode(member.name).split(b"/") if part not in (b"", b".")]
        if member.name.startswith("/") or b".." in parts:
            raise Failure("invalid", f"{member.name!r} is outside the folder")
        if not parts:
            return
        folder = top
        for part in parts[:-1]:
            folder = posixpath.join(folder, part)
            if not self._files.exists(folder):
                self._files.make_dir(folder, self._uid)
            elif not self._files.find(folder, follow=False).is_dir:
                raise Failure("invalid", f"{member.name!r} goes through a link")
        path = posixpath.join(folder, parts[-1])
        if member.isdir():
            self._files.make_dir(path, self._uid, parents=True)
            self._files.chmod(path, (member.mode & 0o777) | 0o700, self._uid)
            return
        if self._files.exists(path) and not self._files.find(path, follow=False).is_dir:
            self._files.remove(path, self._uid)
        if member.issym():
            self._files.symlink(path, os.fsencode(member.linkname), self._uid)
        elif (content := archive.extractfile(member)) is not None:
            self._files.replace(path, content.read(), self._uid, mode=member.mode & 0o777)


def _refuse_device(node: Node, path: bytes) -> None:
    if node.is_device:
        raise Failure("not_regular", f"{path.decode('utf-8', 'replace')}: is a device, which has no end")
