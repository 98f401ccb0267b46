"""Watches of folders: changes below them, by inotify, as they happen."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from _collections import deque

from . import trees, wire
from .channel import Call, Failure, failure_of
from .contents import named, path_of
from .loop import READ

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .agent import Agent

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _OVERFLOW, _IGNORED, _ISDIR, _ONLYDIR = 0x400, 0x4000, 0x8000, 0x40000000, 0x01000000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF
_NAMES = {_MODIFY: "modify", _ATTRIB: "attrib", _MOVED_FROM: "delete", _MOVED_TO: "move", _CREATE: "create",
          _DELETE: "delete"}  # fmt: skip
_OVERFLOWED = {"event": "overflow", "path": "", "dir": False}
_HEADER = struct.Struct("iIII")
_KEPT = 4096


class InotifyWatch:
    """Inotify descriptor that feeds one call."""

    def __init__(self, agent: Agent, call: Call, path: bytes, recursive: bool) -> None:
        self.agent = agent
        self.call = call
        self.recursive = recursive
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._folders: dict[int, bytes] = {}
        self._waiting: deque[bytes] = deque()
        try:
            self._add(path)
        except OSError:
            os.close(self._fd)
            raise
        if recursive:
            self._add_below(path)
        agent.loop.watch(self._fd, READ, self._on_ready)
        call.pump = self._pump
        call.on_cancel = self._on_cancel
        call.on_close = self._close
        self._emit({"event": "ready"})
        self._pump()

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def _add(self, path: bytes) -> None:
        self._folders[self._checked(self._libc.inotify_add_watch(self._fd, path, _MASK))] = path

    def _add_below(self, path: bytes) -> None:
        try:
            for inner, info in trees.walk(path, 1 << 30):
                if stat.S_ISDIR(info.st_mode):
                    self._add(os.path.join(path, inner))
        except OSError:
            self._emit({"event": "overflow", "path": "", "dir": True})  # no more watches to be had

    def _on_ready(self, _events: int) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            watch, mask, _cookie, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            self._on_event(watch, mask, name)
        self._pump()

    def _on_event(self, watch: int, mask: int, name: bytes) -> None:
        if mask & _OVERFLOW:
            self._emit(_OVERFLOWED)
        if mask & _IGNORED:
            self._folders.pop(watch, None)
        folder = self._folders.get(watch)
        if folder is None or mask & _DELETE_SELF:
            return
        path = os.path.join(folder, name) if name else folder
        is_dir = bool(mask & _ISDIR)
        for bit, event in _NAMES.items():
            if mask & bit:
                self._emit({"event": event, **named("path", self.agent.box_path(path)), "dir": is_dir})
        if self.recursive and is_dir and mask & (_CREATE | _MOVED_TO):
            self._follow(path)

    def _follow(self, path: bytes) -> None:
        """Watch a new folder, and report the files that were put into it before."""
        try:
            self._add(path)
            inside = list(trees.walk(path, 1 << 30))
        except OSError:
            return
        for inner, info in inside:
            full = os.path.join(path, inner)
            is_dir = stat.S_ISDIR(info.st_mode)
            if is_dir:
                try:
                    self._add(full)
                except OSError:
                    continue
            self._emit({"event": "create", **named("path", self.agent.box_path(full)), "dir": is_dir})

    def _emit(self, record: dict[str, Any]) -> None:
        if len(self._waiting) == _KEPT:
            self._waiting.append(wire.encode(_OVERFLOWED))
        elif len(self._waiting) < _KEPT:
            self._waiting.append(wire.encode(record))

    def _pump(self) -> None:
        while self._waiting and self.call.room() > 0:
            room, record = self.call.room(), self._waiting.popleft()
            self.call.send(record[:room])
            if len(record) > room:
                self._waiting.appendleft(record[room:])

    def _on_cancel(self) -> None:
        self._close()
        self.call.answer({})

    def _close(self) -> None:
        self.agent.loop.forget(self._fd)
        os.close(self._fd)


def watch(agent: Agent, call: Call) -> None:
    path = path_of(agent, call.params)
    try:
        InotifyWatch(agent, call, path, bool(call.params.get("recursive")))
    except OSError as error:
        if error.errno == 24:
            raise Failure("limit", "no more watches can be had in this box") from None
        raise failure_of(error, path.decode("utf-8", "replace")) from None
