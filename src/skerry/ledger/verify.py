"""Verification: whether the chain is whole, and where it is not, line by line."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import msgspec

from skerry.ledger.files import CURRENT, Part, name_of, parts, raw_lines
from skerry.ledger.line import HEADERS, NO_HASH, TORN, Line, claimed, digest, unseal

_MAX_PROBLEMS = 100


class Problem(msgspec.Struct, frozen=True):
    """A place where the chain is broken."""

    file: str
    line: int
    """Its place in the file, from 1; 0 is the file as a whole."""
    what: str


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a verification."""

    files: int
    lines: int
    first: int
    """Number of the first line that is kept; those before it were in files that rotation has removed."""
    last: int
    head: str
    """Hash of the last line, which stands for all before it."""
    torn: int
    """Lines that programs left unfinished as they died, each told by the line after it."""
    problems: tuple[Problem, ...]

    @property
    def is_whole(self) -> bool:
        return not self.problems


def verify(folder: Path, head: str | None = None) -> Verified:
    """Check every line of every file. `head` is the hash of a line that was the last once, and kept elsewhere: it has
    to be there still. Raises LedgerError."""
    check = _Check(head)
    with ExitStack() as stack:
        found = parts(folder, stack)
        check.files_of(found)
        for part in found:
            check.file(part)
    return check.result(len(found))


class _Check:
    """The chain, as far as it was followed."""

    def __init__(self, head: str | None) -> None:
        self._wanted = head
        self._has_head = head is None or head == NO_HASH
        self._problems: list[Problem] = []
        self._first: int | None = None
        self._seq = 0
        self._hash = NO_HASH
        self._lines = 0
        self._torn = 0
        self._name = CURRENT
        self._place = 0
        self._number = 0
        self._fragment: bytes | None = None
        self._first_file = 1
        self._oldest = 1

    def files_of(self, found: list[Part]) -> None:
        """See which files there are: the oldest may have been removed, none in the middle."""
        if found and found[-1].name != CURRENT:
            self._report(CURRENT, 0, "the newest file is missing")
        for before, part in pairwise(found):
            for number in range(before.number + 1, min(part.number, before.number + _MAX_PROBLEMS)):
                self._report(name_of(number), 0, "this file is missing")
        if found and found[0].number > 1:
            self._first_file = found[0].number
            self._hash = ""  # what was before is not there to be compared

    def file(self, part: Part) -> None:
        self._name, self._number = part.name, part.number
        self._place = 0
        for place, raw in raw_lines(part):
            self._place = place
            if not raw.endswith(b"\n") and (part.name != CURRENT or claimed(raw) is None):
                self._flush_fragment()
                self._tell(
                    "it is cut off: it was truncated, or a program died while it wrote, which the next line will tell"
                )
            else:
                self._line(raw.removesuffix(b"\n"))
        self._flush_fragment()
        if self._place == 0:
            self._report(part.name, 0, "it is empty")

    def _line(self, raw: bytes) -> None:
        try:
            line = unseal(raw)
        except (msgspec.DecodeError, ValueError, RecursionError):
            self._flush_fragment()
            self._fragment = raw
            return
        self._lines += 1
        fragment, self._fragment = self._fragment, None
        if fragment is not None and not self._closes(line, fragment):
            self._broken(fragment, self._place - 1)
        if fragment is None and line.kind == TORN:
            self._tell("the unfinished line that it tells of was removed")
        if self._place == 1 or line.kind in HEADERS:
            self._header(line)
        self._follow(line)

    def _closes(self, line: Line, fragment: bytes) -> bool:
        """Whether a line says of what is before it that somebody died while writing it."""
        told = {"bytes": len(fragment), "digest": digest(fragment)}
        if line.kind != TORN or line.facts != told or line.prev != self._hash:
            return False
        self._torn += 1
        return True

    def _header(self, line: Line) -> None:
        is_first = self._place == 1 or (line.kind == "begin" and self._torn > 0)
        if line.kind not in HEADERS or not is_first or line.facts.get("file") != self._number:
            self._tell(
                "a file begins with the line that tells its number: lines were removed before it, or it is another's"
            )
        if line.kind == "begin" and line.seq > 2:
            self._tell("the file before this one was not there when this was begun: its lines are missing")
        if isinstance(oldest := line.facts.get("oldest"), int):
            self._oldest = oldest

    def _follow(self, line: Line) -> None:
        expected = self._seq + 1
        if self._first is None:
            self._first = line.seq
            if self._hash == "":
                self._hash, expected = line.prev, line.seq
        if line.seq > expected:
            which = f"line {expected} is" if line.seq == expected + 1 else f"lines {expected} to {line.seq - 1} are"
            self._tell(f"{which} missing before it")
        elif line.seq < expected:
            self._tell(f"it is line {line.seq} where {expected} should be: it was moved, or is a copy")
        elif line.prev != self._hash:
            self._tell("it does not follow from the line before it: one of them was replaced")
        self._seq, self._hash = line.seq, line.hash
        self._has_head = self._has_head or line.hash == self._wanted

    def _flush_fragment(self) -> None:
        if self._fragment is not None:
            self._broken(self._fragment, self._place)
            self._fragment = None

    def _broken(self, raw: bytes, place: int) -> None:
        """Tell of a line that was changed, and go on with what it says of itself, so that it is told once."""
        self._lines += 1
        self._report(self._name, place, "it was changed: its hash does not fit its content")
        told = claimed(raw)
        if told is not None and told[0] == self._seq + 1:
            self._seq, self._hash = told

    def _tell(self, what: str) -> None:
        self._report(self._name, self._place, what)

    def _report(self, file: str, line: int, what: str) -> None:
        if len(self._problems) < _MAX_PROBLEMS:
            self._problems.append(Problem(file, line, what))

    def result(self, files: int) -> Verified:
        for number in range(self._oldest, min(self._first_file, self._oldest + _MAX_PROBLEMS)):
            self._report(name_of(number), 0, "this file is missing, and no rotation has removed it")
        if not self._has_head:
            self._report(
                CURRENT, 0, f"no line has the hash {self._wanted}: the end was cut off, or all was written anew"
            )
        return Verified(
            files=files,
            lines=self._lines,
            first=self._first or 0,
            last=self._seq,
            head=self._hash or NO_HASH,
            torn=self._torn,
            problems=tuple(self._problems),
        )
