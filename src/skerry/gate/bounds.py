"""Bounds of what one sandbox may take of the gate: connections, rates, bytes, time, and lines of the ledger."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from skerry.errors import SkerryError
from skerry.gate.base import Recorder
from skerry.model.spec import SandboxId

_MOST_TOLD_APART = 256
_SINGLE_PER_S, _SINGLE_BURST = 10.0, 200
"""Connections refused that each have a line of their own."""
_MOST_AT_ONCE, _PIECES_PER_S = 1 << 18, 8
"""Bytes of one connection that are sent before those of another, where there is a bound: no more than it lets through
in a part of a second, so that a few of one wait for no many of others."""
_log = logging.getLogger("skerry.gate")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one sandbox may take."""

    connections: int = 512
    """At once; an agent has no more either."""
    connections_per_s: float = 200
    connections_burst: int = 600
    names_per_s: float = 100
    """Questions beyond that wait, and all that the box wishes for after them."""
    names_burst: int = 500
    idle_s: float = 600.0
    """Without a byte either way."""
    first_bytes_s: float = 30.0
    """Until a client has said what it wants, on ports where clients speak first."""
    tick_s: float = 5.0


class Bucket:
    """Tokens that come at a rate, and are kept up to a burst."""

    def __init__(self, per_s: float, burst: int, now: float, *, is_full: bool = True) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = float(burst) if is_full else 0.0
        self._at = now

    def take(self, now: float, count: int = 1) -> bool:
        """Take so many tokens, if there are."""
        if self.wait_s(now, count) > 0:
            return False
        self._left -= count
        return True

    def wait_s(self, now: float, count: int = 1) -> float:
        """Seconds until there are so many tokens."""
        self._left = min(self._burst, self._left + (now - self._at) * self._per_s)
        self._at = now
        return max(0.0, (count - self._left) / self._per_s)


class Pace:
    """The rate at which all connections of one sandbox send together. What is more waits, piece by piece in the order
    in which it came. What was not sent is saved up for a second; at first there is nothing, so that a box which breaks
    its stream gains nothing by it."""

    def __init__(
        self,
        per_s: int,
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._bytes = Bucket(per_s, per_s, now(), is_full=False)
        self._most = max(1, min(_MOST_AT_ONCE, per_s // _PIECES_PER_S))
        self._now, self._sleep = now, sleep
        self._turn = asyncio.Lock()

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Data in pieces, for each of which to wait."""
        for at in range(0, len(data), self._most):
            yield data[at : at + self._most]

    async def wait(self, piece: bytes) -> None:
        """Wait until a piece may be sent."""
        async with self._turn:
            while not self._bytes.take(self._now(), len(piece)):
                await self._sleep(self._bytes.wait_s(self._now(), len(piece)))


class Tally:
    """Refusals of one sandbox on their way to the ledger, which a box cannot fill by asking: of names, and of more
    connections than now and then, the first is written at once; those like it are counted, and are one line when the
    period ends."""

    def __init__(self, recorder: Recorder, id: SandboxId, period_s: float, now: float) -> None:
        self._recorder = recorder
        self._id = id
        self._period_s = period_s
        self._until = now + period_s
        self._single = Bucket(_SINGLE_PER_S, _SINGLE_BURST, now)
        self._counts: dict[tuple[Any, ...], int] = {}

    def add(self, kind: str, now: float, **facts: Any) -> None:
        """Write a refusal down, or count it."""
        self.flush(now)
        if kind == "refuse" and self._single.take(now):
            self._append(kind, facts)
            return
        key = (kind, *facts.items())
        if key not in self._counts and len(self._counts) >= _MOST_TOLD_APART:
            facts = {"reason": "more than can be told apart"}
            key = (kind, *facts.items())
        if key in self._counts:
            self._counts[key] += 1
        else:
            self._counts[key] = 0
            self._append(kind, facts)

    def flush(self, now: float | None = None) -> None:
        """Write down what was counted in a period that has ended, or in any."""
        if now is not None and now < self._until:
            return
        counts, self._counts = self._counts, {}
        self._until = (now or self._until) + self._period_s
        for (kind, *facts), count in counts.items():
            if count:
                self._append(kind, {**dict(facts), "count": count})

    def _append(self, kind: str, facts: dict[str, Any]) -> None:
        try:
            self._recorder.append(kind, self._id, **facts)
        except (SkerryError, OSError) as error:  # it was refused all the same
            _log.warning("a refusal is not in the ledger: %s", error)
