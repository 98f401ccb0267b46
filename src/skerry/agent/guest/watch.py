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
    from collections.abc import Callable
    from typing import Any

    from .agent import Agent

_MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x4, 0x40, 0x80, 0x100, 0x200
_DELETE_SELF, _OVERFLOW, _IGNORED, _ISDIR, _ONLYDIR = 0x400, 0x4000, 0x8000, 0x40000000, 0x01000000
_MASK = _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE | _DELETE_SELF
_NAMES = {_MODIFY: "modify", _ATTRIB: "attrib", _MOVED_FROM: "delete", _MOVED_TO: "move", _CREATE: "create",
          _DELETE: "delete"}  # fmt: skip
_EXACT_NAMES = {**_NAMES, _MOVED_FROM: "moved_from", _MOVED_TO: "moved_to"}
_OVERFLOWED = {"event": "overflow", "path": "", "dir": False}
_HEADER = struct.Struct("iIII")
_KEPT = 4096
_MOST_KEPT_WATCHES = 64
_READS = 256


class Inotify:
    """Inotify descriptor on a folder, and with `recursive` on all below it. What happens goes to `tell`."""

    def __init__(self, agent: Agent, call: Call, tell: Callable[[dict[str, Any]], None]) -> None:
        path = path_of(agent, call.params)
        self.agent = agent
        self._recursive = bool(call.params.get("recursive"))
        self._root = path if call.params.get("exact") else None
        self._names = _NAMES if self._root is None else _EXACT_NAMES
        self.tell = tell
        self.on_some: Callable[[], None] = lambda: None
        self._libc = ctypes.CDLL(None, use_errno=True)
        try:
            self._fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
            self._folders: dict[int, bytes] = {}
            try:
                self._add(path, _ONLYDIR if call.params.get("exact") else 0)
            except OSError:
                os.close(self._fd)
                raise
        except OSError as error:
            if error.errno == 24:
                raise Failure("limit", "no more watches can be had in this box") from None
            raise failure_of(error, path.decode("utf-8", "replace")) from None
        if self._recursive:
            self._add_below(path)
            agent.watches.append(self)
        agent.loop.watch(self._fd, READ, lambda _events: self._on_ready())

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result

    def _add(self, path: bytes, flags: int = 0) -> None:
        self._folders[self._checked(self._libc.inotify_add_watch(self._fd, path, _MASK | flags))] = path

    def _add_below(self, path: bytes) -> None:
        try:
            for inner, info in trees.walk(path, 1 << 30):
                if stat.S_ISDIR(info.st_mode):
                    self._add(os.path.join(path, inner))
        except OSError:
            self.tell({"event": "overflow", "path": "", "dir": True})  # no more watches to be had

    def _on_ready(self) -> None:
        self._read()
        self.on_some()

    def _read(self) -> bool:
        """Take what the kernel has, as much as one read gives; False if that is nothing."""
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        at = 0
        while at < len(data):
            watch, mask, _cookie, length = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            name = data[at : at + length].rstrip(b"\0")
            at += length
            self._on_event(watch, mask, name)
        return True

    def drain(self) -> None:
        """Take all that has happened until now, however fast more of it comes."""
        for _ in range(_READS):
            if not self._read():
                break
        self.on_some()

    def _on_event(self, watch: int, mask: int, name: bytes) -> None:
        if mask & _OVERFLOW:
            self.tell(_OVERFLOWED)
        if mask & _IGNORED:
            self._folders.pop(watch, None)
        folder = self._folders.get(watch)
        if folder is None or mask & _DELETE_SELF:
            return
        if not name and self._root not in (None, folder):
            return  # the folder above it tells the same
        path = os.path.join(folder, name) if name else folder
        is_dir = bool(mask & _ISDIR)
        for bit, event in self._names.items():
            if mask & bit:
                self.tell({"event": event, **named("path", self.agent.box_path(path)), "dir": is_dir})
        if self._recursive and is_dir and mask & (_CREATE | _MOVED_TO):
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
            self.tell({"event": "create", **named("path", self.agent.box_path(full)), "dir": is_dir})

    def close(self) -> None:
        if self in self.agent.watches:
            self.agent.watches.remove(self)
        self.agent.loop.forget(self._fd)
        os.close(self._fd)


class Records:
    """What happened and was not told yet: the latest is lost where nobody listens, and that it was is known."""

    def __init__(self) -> None:
        self._waiting: deque[bytes] = deque()

    def add(self, record: dict[str, Any]) -> None:
        if len(self._waiting) == _KEPT:
            self._waiting.append(wire.encode(_OVERFLOWED))
        elif len(self._waiting) < _KEPT:
            self._waiting.append(wire.encode(record))

    def pump(self, call: Call) -> bool:
        """Send as much as there is room for; False if there is more."""
        while self._waiting and call.room() > 0:
            room, record = call.room(), self._waiting.popleft()
            call.send(record[:room])
            if len(record) > room:
                self._waiting.appendleft(record[room:])
        return not self._waiting


class KeptWatch:
    """A watch that no call holds open: it keeps what happens until somebody asks."""

    def __init__(self, agent: Agent, call: Call) -> None:
        self.records = Records()
        self.inotify = Inotify(agent, call, self.records.add)


def watch(agent: Agent, call: Call) -> None:
    if call.params.get("keep"):
        _keep(agent, call)
        return
    records = Records()
    inotify = Inotify(agent, call, records.add)
    records.add({"event": "ready"})

    def pump() -> None:
        if call.open:
            records.pump(call)

    def cancel() -> None:
        inotify.close()
        call.answer({})

    inotify.on_some = call.pump = pump
    call.on_cancel = cancel
    call.on_close = inotify.close
    pump()


def _keep(agent: Agent, call: Call) -> None:
    """Begin a watch that outlives the call; of too many the one that nobody has asked for longest ends."""
    kept = KeptWatch(agent, call)
    while len(agent.kept_watches) >= _MOST_KEPT_WATCHES:
        agent.kept_watches.pop(next(iter(agent.kept_watches))).inotify.close()
    agent.watch_count += 1
    agent.kept_watches[agent.watch_count] = kept
    call.answer({"watch": agent.watch_count})


def _kept_watch(agent: Agent, call: Call) -> KeptWatch:
    number = call.params.get("watch")
    kept = agent.kept_watches.pop(number, None) if type(number) is int else None
    if kept is None:
        raise Failure("no_watch", f"no watch has the number {number}")
    return kept


def watch_events(agent: Agent, call: Call) -> None:
    """Tell all that a kept watch has seen since it was asked last, up to this moment."""
    kept = _kept_watch(agent, call)
    agent.kept_watches[call.params["watch"]] = kept  # now the last that somebody asked for
    kept.inotify.drain()
    records, kept.records = kept.records, Records()
    kept.inotify.tell = kept.records.add

    def pump() -> None:
        if call.open and records.pump(call):
            call.answer({})

    call.pump = pump
    pump()


def unwatch(agent: Agent, call: Call) -> None:
    _kept_watch(agent, call).inotify.close()
    call.answer({})
