"""The ledger that is written: many programs at once append lines to one chain, which is never changed.

An append is a lock on the newest file and one write; what was read of its end is believed for as long as the file has
the size that it was left with. A program that dies in the middle of a write leaves a torn line, and the next one says
so in a line of its own. When a file is large enough it gets a number, and a new one goes on with the chain.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from skerry.config import Config, LedgerSettings
from skerry.errors import LedgerError, LedgerFull
from skerry.host import locks
from skerry.ledger.files import CURRENT, TO_APPEND, Newest, name_of, numbered
from skerry.ledger.line import ACTOR, TORN, Actor, Line, Tail, Who, digest, read_number, read_tail, seal
from skerry.ledger.redact import Redactor

BALLAST = "ballast"
"""Name of a file that only takes room, which is given back when the disk is full: then ends can still be told."""
_BALLAST_BYTES = 128 * 1024
_NEW = "ledger.new"
_MAX_BEHIND = 1000
"""The most lines that a program keeps which it could not write."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("skerry.ledger")


class _Entry(NamedTuple):
    time: float
    kind: str
    sandbox: str | None
    facts: dict[str, Any]
    actor: Actor | None = None

    @classmethod
    def now(cls, kind: str, sandbox: str | None, facts: dict[str, Any]) -> _Entry:
        return cls(time.time(), kind, sandbox, facts, ACTOR.get())


class _Known(NamedTuple):
    """The newest file as this program left it."""

    opened: int
    size: int
    number: int
    tail: Tail
    is_headless: bool = False
    """Whether it has no whole line yet."""


class Ledger:
    """Appends lines to the ledger in a folder; without a folder it is off, and all is quiet."""

    def __init__(
        self, folder: str | os.PathLike[str] | None, settings: LedgerSettings | None = None, *, tool: str = "api"
    ) -> None:
        settings = settings or LedgerSettings()
        self.folder = Path(folder) if folder is not None and settings.enabled else None
        self.redactor = Redactor(settings.commands, settings.redact)
        self._settings = settings
        self._path, self._ballast = (os.path.join(self.folder or "", name) for name in (CURRENT, BALLAST))
        self._newest = Newest(self._path)
        self._has_ballast = False
        self._known: _Known | None = None
        self._behind: deque[_Entry] = deque()
        self._lost = 0
        self._who = Who(os.getuid(), tool, os.getpid())

    @classmethod
    def of(cls, config: Config) -> Ledger:
        """The ledger of an installation."""
        return cls(folder_of(config), config.ledger, tool=config.tool)

    def append(self, kind: str, sandbox: str | None = None, **facts: Any) -> int:
        """Write a line before what it tells is done; its number. Raises LedgerFull or LedgerError, so that it is not
        done; if the settings say to go on all the same, the line counts as lost, and its number is 0."""
        if self.folder is None:
            return 0
        try:
            return self._put(_Entry.now(kind, sandbox, facts))
        except OSError as error:
            if self._settings.when_full == "stop":
                raise self._explain(error) from error
            self._lost += 1
            return 0

    def note(self, kind: str, sandbox: str | None = None, **facts: Any) -> int:
        """Write a line of what is done already, or has to be done whatever happens: an end. What cannot be written is
        kept and written before the next line, or counted there. Its number; 0 if it is kept."""
        if self.folder is None:
            return 0
        self._keep(_Entry.now(kind, sandbox, facts))
        return self.flush()

    def note_soon(self, kind: str, sandbox: str | None = None, **facts: Any) -> None:
        """Write a line of what is done already with the next one, and at the latest when the event loop has a moment:
        the end of a command is not made slower by it."""
        if self.folder is None:
            return
        if not self._behind:
            asyncio.get_running_loop().call_soon(self.flush)
        self._keep(_Entry.now(kind, sandbox, facts))

    def flush(self) -> int:
        """Write the lines that are behind, if there are any; the number of the last, 0 if they are kept."""
        if not self._behind:
            return 0
        try:
            return self._put(None)
        except OSError as error:
            _log.warning("lines of the ledger %s are kept until they can be written: %s", self.folder, error)
            return 0

    def close(self) -> None:
        """Write what is behind, and close the file until it is written to again."""
        self.flush()
        self._newest.close()

    def _keep(self, entry: _Entry) -> None:
        self._part_from_parent()
        if len(self._behind) < _MAX_BEHIND or self.flush():
            self._behind.append(entry)
        else:
            self._lost += 1

    def _part_from_parent(self) -> None:
        """Leave the lines that are behind to the parent, in a child of a fork."""
        if self._who.pid != os.getpid():
            self._behind.clear()
            self._lost = 0
            self._who = Who(os.getuid(), self._who.tool, os.getpid())

    def _put(self, entry: _Entry | None) -> int:
        """Append the entries that are behind, and one that is about to be done; without that the ballast may be used.
        Raises OSError."""
        self._part_from_parent()
        size = self._newest.lock()
        try:
            if entry is not None and not self._has_ballast:
                self._keep_ballast()
            behind = [*self._behind]
            entries = [*behind] if entry is None else [*behind, entry]
            if self._lost:
                entries.insert(-1, _Entry(time.time(), "gap", None, {"lines": self._lost}))
            try:
                seq = self._write(size, entries)
            except OSError as error:
                self._has_ballast = False  # it is looked for once more
                if entry is not None or error.errno not in _NO_ROOM or not os.path.exists(self._ballast):
                    raise
                os.unlink(self._ballast)
                seq = self._write(os.fstat(self._newest.fd).st_size, entries)
            for _ in behind:
                self._behind.popleft()
            self._lost = 0
            return seq
        finally:
            self._newest.unlock()

    def _write(self, size: int, entries: list[_Entry]) -> int:
        """Write lines at the end of the chain, in one piece; the number of the last."""
        known, newest = self._look(size), self._newest
        if known.size >= self._settings.max_bytes and not (known.tail.rest or known.tail.newline):
            known = self._rotate(known)
        seq, hash, rest, data = known.tail
        if known.is_headless:
            entries = [_Entry(time.time(), "begin", None, {"file": known.number}), *entries]
        if rest:
            entries = [_Entry(time.time(), TORN, None, {"bytes": len(rest), "digest": digest(rest)}), *entries]
        for entry in entries:
            seq += 1
            line, hash = seal(
                Line(
                    seq=seq,
                    time=entry.time,
                    kind=entry.kind,
                    sandbox=entry.sandbox,
                    who=self._who_for(entry.actor),
                    facts=entry.facts,
                    prev=hash,
                )
            )
            data += line
        written = os.write(newest.fd, data)
        if written < len(data):
            with suppress(OSError):  # then the next line tells of the rest
                os.ftruncate(newest.fd, known.size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)
        self._known = _Known(newest.opened, known.size + written, known.number, Tail(seq, hash))
        return seq

    def _who_for(self, actor: Actor | None) -> Who:
        if actor is None:
            return self._who
        return Who(self._who.uid, self._who.tool, self._who.pid, actor.name, actor.tenant)

    def _look(self, size: int) -> _Known:
        """The newest file as it is. Raises OSError if its end cannot be read."""
        known, opened, fd = self._known, self._newest.opened, self._newest.fd
        if known is not None and known.size == size and known.opened == opened:
            return known
        assert self.folder is not None
        is_begun = known is not None and known.opened == opened and not known.is_headless
        tail, number = read_tail(fd, size), known.number if known and is_begun else read_number(fd)
        older = numbered(self.folder) if number is None else {}
        number = number or 1 + max(older, default=0)
        is_headless = tail is not None and tail.seq == 0
        if older and is_headless:
            assert tail is not None
            before = _tail_of(older[number - 1])
            tail = None if before is None else tail._replace(seq=before.seq, hash=before.hash)
        if tail is None:
            advice = "look at it with `skerry ledger verify`, then move its folder away"
            raise OSError(errno.EIO, f"its end is damaged: {advice}", self._path)
        return _Known(opened, size, number, tail, is_headless)

    def _rotate(self, known: _Known) -> _Known:
        """Give the newest file its number and go on in a new one, which is whole before it is in place. If that cannot
        be, the old one goes on growing."""
        assert self.folder is not None
        number, keep = known.number + 1, self._settings.keep
        oldest = max(1, number - keep) if keep else 1
        header = Line(
            seq=known.tail.seq + 1,
            time=time.time(),
            kind="rotate",
            who=self._who,
            facts={"file": number, "oldest": oldest},
            prev=known.tail.hash,
        )
        data, hash = seal(header)
        new = str(self.folder / _NEW)
        try:
            fd = os.open(new, TO_APPEND | os.O_TRUNC, 0o600)
            try:
                locks.take(fd)  # nobody else knows it yet
                if os.write(fd, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), new)
                self._link(self.folder / name_of(known.number))
                os.rename(new, self._path)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            _log.warning("the ledger %s could not be rotated, and grows on: %s", self.folder, error)
            return known
        _sync_later(self._newest.fd)
        self._newest.become(fd)
        self._known = _Known(self._newest.opened, len(data), number, Tail(header.seq, hash))
        try:
            for path in (path for older, path in numbered(self.folder).items() if older < oldest):
                path.unlink()
        except OSError as error:
            _log.warning("an old file of the ledger is not removed: %s", error)
        return self._known

    def _link(self, to: Path) -> None:
        """Give the newest file a second name, unless somebody did who died right after. Raises OSError."""
        try:
            os.link(self._path, to)
        except FileExistsError:
            if not os.path.samefile(self._path, to):
                raise

    def _keep_ballast(self) -> None:
        """Make the ballast if it is missing: without it nothing new may begin. Raises OSError."""
        self._has_ballast = True
        if os.access(self._ballast, os.F_OK):
            return
        fd = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if sys.platform == "darwin":  # which has no call for it
                os.pwrite(fd, os.urandom(_BALLAST_BYTES), 0)
            else:
                os.posix_fallocate(fd, 0, _BALLAST_BYTES)
        except OSError:
            self._has_ballast = False
            os.unlink(self._ballast)
            raise
        finally:
            os.close(fd)

    def _explain(self, error: OSError) -> LedgerError:
        if error.errno in _NO_ROOM:
            return LedgerFull(
                f"no room to write the ledger {self.folder}: free some on its disk; until then nothing new begins, and "
                "ending sandboxes still works (with ledger.when_full = go-on work goes on, and lines are lost)"
            )
        reason = error.strerror or str(error)
        return LedgerError(
            f"the ledger {self.folder} cannot be written: {reason}; nothing new is begun until it can be"
        )


def folder_of(config: Config) -> Path:
    """Folder of the ledger of an installation."""
    return Path(config.state_dir) / "ledger"


def _sync_later(fd: int) -> None:
    """Have a file that is finished written to its disk, which may take a second: nobody waits for it."""

    def sync(copy: int) -> None:
        try:
            os.fsync(copy)
        except OSError as error:
            _log.debug("a file of the ledger is not synced: %s", error)
        finally:
            os.close(copy)

    threading.Thread(target=sync, args=(os.dup(fd),), name="skerry-ledger", daemon=True).start()


def _tail_of(path: Path) -> Tail | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return read_tail(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


OFF = Ledger(None)
"""The ledger of what belongs to no installation."""
