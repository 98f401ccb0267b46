"""The ledger that is read: its lines by a filter, as they come, and whether they are whole."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import msgspec

from skerry.aio import backoff
from skerry.config import Config
from skerry.errors import CallTimeout, LedgerError
from skerry.ledger.files import CURRENT, Part, parts, raw_lines
from skerry.ledger.ledger import folder_of
from skerry.ledger.line import HEADERS, MAX_LINE, NO_HASH, TORN, Line, read_tail, unseal
from skerry.ledger.verify import Verified, verify
from skerry.model.spec import Spec

_POLL_S = (0.01, 0.25)
_MOST = 10_000
"""Lines that are read at once."""
_CHECK_EVERY = 1024
_NAMED = frozenset({"create", "adopt", "acquire", "rename"})
"""Kinds that tell the name of a sandbox."""
_BEGINS = frozenset({"create", "adopt"})
"""Kinds that tell the whole spec of a sandbox."""
_OF_THE_HOST = frozenset({*HEADERS, TORN, "gap"})
"""Kinds that tell of the ledger itself, whoever happened to write them."""
_PROJECT = Spec().project
_HOSTS = frozenset({"connect", "close", "refuse", "resolve", "secret"})
"""Kinds that tell the name of a host."""


class LineFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of lines; every field that is given must fit."""

    sandbox: str | None = None
    """Id of a sandbox, the beginning of it, or a name that it had."""
    kinds: frozenset[str] = frozenset()
    since: float | None = None
    until: float | None = None
    """Both in seconds since 1970."""
    tool: str | None = None
    name: str | None = None
    """Name of a host that was asked for; `*` stands for anything."""
    actor: str | None = None
    """Whoever asked a server for it, as `token:ID`."""
    project: str | None = None
    """A project: what its tenant did, and what was done to its sandboxes."""
    sandboxes: frozenset[str] = frozenset()
    """Ids of sandboxes of the project whose creates are perhaps no longer in the ledger."""


ALL_LINES = LineFilter()


class _Chooser:
    """Tells which lines fit, and learns the names of sandboxes from their creates as they go by."""

    def __init__(self, filter: LineFilter) -> None:
        self._filter = filter
        self._ids: set[str] = set()
        self._mine = set(filter.sandboxes)

    def fits(self, line: Line) -> bool:
        wanted = self._filter
        if wanted.project is not None and not self._is_of_project(line, wanted.project):
            return False
        if wanted.sandbox is not None and not self._is_of(line, wanted.sandbox):
            return False
        return (
            (not wanted.kinds or line.kind in wanted.kinds)
            and (wanted.since is None or line.time >= wanted.since)
            and (wanted.until is None or line.time <= wanted.until)
            and wanted.tool in (None, line.who.tool)
            and wanted.actor in (None, line.who.actor)
            and (wanted.name is None or _names(line, wanted.name))
        )

    def _is_of_project(self, line: Line, project: str) -> bool:
        if line.sandbox is not None and line.kind in _BEGINS and line.facts.get("project", _PROJECT) == project:
            self._mine.add(line.sandbox)
        return line.sandbox in self._mine or (line.who.tenant == project and line.kind not in _OF_THE_HOST)

    def _is_of(self, line: Line, reference: str) -> bool:
        if line.sandbox is None:
            return False
        if line.kind in _NAMED and "name" in line.facts:
            if line.facts["name"] == reference:
                self._ids.add(line.sandbox)
            else:
                self._ids.discard(line.sandbox)
        return line.sandbox.startswith(reference) or line.sandbox in self._ids


def _names(line: Line, pattern: str) -> bool:
    return line.kind in _HOSTS and fnmatch.fnmatchcase(str(line.facts.get("name", "")), pattern)


def read(folder: Path, filter: LineFilter = ALL_LINES) -> Iterator[Line]:
    """Yield the lines that fit, the oldest first; what is no line, `verify` tells of. Raises LedgerError."""
    chooser = _Chooser(filter)
    with ExitStack() as stack:
        for part in parts(folder, stack):
            for _, raw in raw_lines(part):
                if (line := _line(raw)) is not None and chooser.fits(line):
                    yield line


def read_page(
    folder: Path, filter: LineFilter, *, after: int | None, limit: int, newest: bool, is_late: Callable[[], bool]
) -> list[Line]:
    """At most so many of the lines that fit, the oldest or the `newest` first, after the line of that number in that
    order. Files that cannot hold any are not read. Raises LedgerError, and CallTimeout once `is_late`."""
    found: list[Line] = []
    with ExitStack() as stack:
        files = parts(folder, stack)
        firsts = [_first(part) for part in files]
        ends = [*firsts[1:], None]
        chosen = [
            part
            for part, first, end in zip(files, firsts, ends, strict=True)
            if after is None or (_precedes(first, after) if newest else end is None or end > after + 1)
        ]
        chooser = _Chooser(filter)
        for part in reversed(chosen) if newest else chosen:
            lines = _timely(part, is_late)
            meant = (
                line
                for line in lines
                if chooser.fits(line) and (after is None or (line.seq < after if newest else line.seq > after))
            )
            left = limit - len(found)
            found += reversed(deque(meant, left)) if newest else islice(meant, left)
            if len(found) >= limit:
                break
    return found


def _precedes(first: int | None, after: int) -> bool:
    return first is None or first < after


def _first(part: Part) -> int | None:
    """Number of the first line of a file; None if that cannot be read."""
    line = _line(os.pread(part.file.fileno(), MAX_LINE, 0).partition(b"\n")[0])
    return None if line is None else line.seq


def _timely(part: Part, is_late: Callable[[], bool]) -> Iterator[Line]:
    for place, raw in raw_lines(part):
        if place % _CHECK_EVERY == 0 and is_late():
            raise CallTimeout("the ledger is large, and no page of it was found in time: ask for fewer lines of it")
        if (line := _line(raw)) is not None:
            yield line


def _line(raw: bytes) -> Line | None:
    try:
        return unseal(raw.removesuffix(b"\n"))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


class Follower:
    """Place in the ledger, from which on lines are read as they come."""

    def __init__(self, folder: Path, *, at_end: bool) -> None:
        self._folder = folder
        self._number = 0
        self._offset = 0
        self._seen: tuple[int, int] | None = None
        if at_end:
            with ExitStack() as stack:
                if found := parts(folder, stack):
                    self._number, self._offset = found[-1].number, found[-1].size

    def news(self) -> list[Line]:
        """Lines that came since the last time, at most some. Raises LedgerError."""
        try:
            status = os.stat(self._folder / CURRENT)
        except FileNotFoundError:
            return []
        if self._seen == (status.st_ino, status.st_size):
            return []
        lines: list[Line] = []
        with ExitStack() as stack:
            for part in parts(self._folder, stack):
                if part.number < self._number:
                    continue
                if part.number > self._number:
                    self._number, self._offset = part.number, 0
                part.file.seek(self._offset)
                for _, raw in raw_lines(part._replace(size=part.size - self._offset)):
                    if not raw.endswith(b"\n"):
                        break  # it is closed off by the next
                    if len(lines) == _MOST:
                        return lines
                    self._offset += len(raw)
                    if (line := _line(raw)) is not None:
                        lines.append(line)
        self._seen = (status.st_ino, self._offset)
        return lines


class AsyncLedger:
    """The ledger of an installation, to be read."""

    def __init__(self, config: Config) -> None:
        self.folder = folder_of(config)

    async def show(self, filter: LineFilter = ALL_LINES, *, tail: int | None = None) -> AsyncIterator[Line]:
        """The lines that fit, the oldest first; with `tail` the last so many of them. Raises LedgerError."""
        lines = read(self.folder, filter)
        if tail is not None:
            lines = iter(await asyncio.to_thread(deque, lines, tail))
        while piece := await asyncio.to_thread(lambda: list(islice(lines, _MOST))):
            for line in piece:
                yield line

    async def page(
        self,
        filter: LineFilter = ALL_LINES,
        *,
        after: int | None = None,
        limit: int = 100,
        newest: bool = False,
        timeout_s: float = 30.0,
    ) -> list[Line]:
        """At most so many of the lines that fit, the oldest or the `newest` first, after the one of that number in that
        order. Raises LedgerError, and CallTimeout."""
        end = time.monotonic() + timeout_s
        stopped = threading.Event()

        def is_late() -> bool:
            return stopped.is_set() or time.monotonic() >= end

        def work() -> list[Line]:
            return read_page(self.folder, filter, after=after, limit=limit, newest=newest, is_late=is_late)

        try:
            return await asyncio.to_thread(work)
        finally:
            stopped.set()  # nobody waits for it any more

    async def follow(self, filter: LineFilter = ALL_LINES, *, after: int | None = None) -> AsyncIterator[Line]:
        """The lines that fit as they are written, over rotations, until it is left: those after a number, or from now
        on. Raises LedgerError."""
        chooser, waits = _Chooser(filter), backoff(*_POLL_S)
        follower = await asyncio.to_thread(Follower, self.folder, at_end=after is None)
        if after is None and filter.sandbox is not None:  # it may have had its name for long
            await asyncio.to_thread(lambda: deque(map(chooser.fits, read(self.folder)), 0))
        while True:
            if found := await asyncio.to_thread(follower.news):
                waits = backoff(*_POLL_S)
            else:
                await asyncio.sleep(next(waits))
            for line in found:
                if chooser.fits(line) and line.seq > (after or 0):
                    yield line

    async def verify(self, head: str | None = None) -> Verified:
        """Check every line of every file; with `head`, the hash of a line that was once the last and is kept elsewhere,
        also that the end was not cut off before it. Raises LedgerError."""
        return await asyncio.to_thread(verify, self.folder, head)

    async def head(self) -> str:
        """The hash of the last line, which stands for all before it. Raises LedgerError."""
        return await asyncio.to_thread(read_head, self.folder)


def read_head(folder: Path) -> str:
    """The hash of the last line; zeros if there is none. Raises LedgerError if it cannot be read."""
    with ExitStack() as stack:
        for part in reversed(parts(folder, stack)):
            tail = read_tail(part.file.fileno(), part.size)
            if tail is None:
                raise LedgerError(f"the end of {part.name} is damaged: look at it with `skerry ledger verify`")
            if tail.seq:
                return tail.hash
    return NO_HASH
