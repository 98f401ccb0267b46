"""Outputs that were too long for an answer: kept for a while, for whoever made them, in bounded memory."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable

import msgspec

from skerry.errors import NotFound

MAX_OUTPUT = 2 << 20
"""The most bytes of one output that are kept: its beginning and its end."""
PART = 512 << 10
"""Bytes of it that are read at once."""
_LIFETIME_S = 3600.0
_MOST_OF_ONE = 16 << 20
_MOST_OF_ALL = 128 << 20
_FORM = re.compile(r"[A-Za-z0-9_-]{22}")


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """A long output."""

    id: str
    owner: str
    title: str
    data: bytes
    ends_at: float

    def parts(self) -> list[int]:
        """Where each part of it begins."""
        found = [0]
        while (end := found[-1] + len(self.part(found[-1]))) < len(self.data):
            found.append(end)
        return found

    def part(self, offset: int) -> bytes:
        """As much of it from there on as is read at once; no character is cut in two."""
        end = offset + PART
        for at in range(end, max(end - 4, offset), -1):
            if at >= len(self.data) or self.data[at] & 0xC0 != 0x80:
                end = at
                break
        return self.data[offset:end]


class Outputs:
    """The long outputs of all callers. Each has those of its own, and knows of no others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, Output] = {}
        self._sizes: dict[str, int] = {}

    def keep(self, owner: str, title: str, data: bytes) -> Output:
        """Keep one, in the place of the oldest ones where there is no room."""
        self._drop_old()
        ends_at = self._clock() + _LIFETIME_S
        output = Output(id=secrets.token_urlsafe(16), owner=owner, title=title, data=data, ends_at=ends_at)
        self._kept[output.id] = output
        self._sizes[owner] = self._sizes.get(owner, 0) + len(data)
        while self._sizes.get(owner, 0) > _MOST_OF_ONE:
            self._drop_oldest_of(owner)
        while sum(self._sizes.values()) > _MOST_OF_ALL:
            self._drop_oldest_of(max(self._sizes, key=self._sizes.__getitem__))  # who has most gives
        return output

    def get(self, owner: str, id: str) -> Output:
        """An output of theirs. Raises NotFound, also for those of others."""
        self._drop_old()
        found = self._kept.get(id)
        if found is None or found.owner != owner:
            raise NotFound(f"there is no output {id!r}, or no longer: run the command again, with less to say")
        return found

    def of(self, owner: str) -> list[Output]:
        """All that one has, the oldest first."""
        self._drop_old()
        return [each for each in self._kept.values() if each.owner == owner]

    def _drop_old(self) -> None:
        now = self._clock()
        while self._kept and (oldest := next(iter(self._kept.values()))).ends_at <= now:
            self._drop(oldest)

    def _drop_oldest_of(self, owner: str) -> None:
        self._drop(next(each for each in self._kept.values() if each.owner == owner))

    def _drop(self, output: Output) -> None:
        del self._kept[output.id]
        self._sizes[output.owner] -= len(output.data)
        if not self._sizes[output.owner]:
            del self._sizes[output.owner]


def is_output_id(text: str) -> bool:
    return _FORM.fullmatch(text) is not None


def shortened(data: bytes, cut: int, limit: int) -> tuple[bytes, int]:
    """The beginning and the end of an output, and how many bytes are missing between them. `cut` are those that `data`
    lacks already: it tells of them in its middle."""
    if len(data) <= limit:
        return data, cut
    total = len(data) + cut - (len(_mark(cut)) if cut else 0)
    tail = limit // 2
    missing = total - limit
    return b"".join((data[: limit - tail], _mark(missing), data[len(data) - tail :])), missing


def _mark(cut: int) -> bytes:
    """As `sandbox.processes` writes it."""
    return b"\n[... %d bytes left out ...]\n" % cut
