"""Virtual time: it stands still, and jumps to the next thing that somebody waits for."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

_LOOK_S = 0.001
_CALM_LOOKS = 10
"""Looks without traffic until the host counts as waiting: it may answer in a few turns of the loop."""
_PATIENCE_LOOKS = 250
"""The same, while a process waits for the world outside (input from the host, something of the test's own)."""
_MAX_SETTLE_TURNS = 1000


@dataclass(order=True)
class Timer:
    when: float
    order: int
    action: Callable[[], None] = field(compare=False)
    pulls: bool = field(compare=False)
    """The clock jumps to it by itself; others (a lifetime) only fire when it passes."""
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """The time of a mock host. It moves in two ways only, so results never depend on the machine's speed.

    With `autojump` (the default) it jumps to the next wake-up as soon as a call from outside is open (a command in the
    foreground, an attached process, a create) and every process only waits. `sleep 3600` then returns at once and
    takes 3600 seconds. A process in the background does not pull the clock: it sleeps until something else does.

    With `Clock(autojump=False)` it moves when you say so: `await clock.advance(5)`.
    """

    def __init__(self, *, autojump: bool = True, start: float = 1_767_225_600.0) -> None:
        self.autojump = autojump
        self.now = start
        """Seconds since 1970; the default start is the first of January 2026."""
        self.running = 0
        """Processes that are not waiting for the virtual machine."""
        self.outside = 0
        """Processes that wait for the host."""
        self.open_calls = 0
        """Calls that somebody outside waits for."""
        self._timers: list[Timer] = []
        self._order = itertools.count()
        self._calm = 0
        self._look: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def call_at(self, when: float, action: Callable[[], None], *, pulls: bool) -> Timer:
        timer = Timer(when, next(self._order), action, pulls)
        heapq.heappush(self._timers, timer)
        self.poke()
        return timer

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as a caller from outside: with `autojump`, it passes at once."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not woken.done():
                woken.set_result(None)

        timer = self.call_at(self.now + seconds, wake, pulls=True)
        self.open_calls += 1
        self.poke()
        try:
            await woken
        finally:
            self.open_calls -= 1
            timer.cancel()

    async def advance(self, seconds: float) -> None:
        """Move on by hand; every wake-up on the way happens at its own time, in order."""
        goal = self.now + seconds
        await self.settle()
        while (timer := self._next(only_pulling=False)) is not None and timer.when <= goal:
            self._fire(timer.when)
            await self.settle()
        self.now = goal

    async def settle(self) -> None:
        """Let every process run until it waits."""
        calm_turns = 0
        for _ in range(_MAX_SETTLE_TURNS):
            await asyncio.sleep(0)
            calm_turns = 0 if self.running else calm_turns + 1
            if calm_turns > _CALM_LOOKS:
                return

    def traffic(self) -> None:
        """Something passed between host and boxes: whoever got it may answer, so time waits for that."""
        self._calm = 0
        self.poke()

    def poke(self) -> None:
        """Something changed: see whether time may jump."""
        if not (self.autojump and self.open_calls):
            return
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._look = loop, None
        if self._look is None:
            self._look = loop.call_soon(self._consider)

    def _consider(self) -> None:
        self._look = None
        if not (self.autojump and self.open_calls) or self._loop is None:
            return
        timer = self._next(only_pulling=True)
        if timer is None:
            return
        waits_outside = self.running or self.outside
        if self._calm < (_PATIENCE_LOOKS if waits_outside else _CALM_LOOKS):
            self._calm += 1
            self._look = self._loop.call_later(_LOOK_S, self._consider)
            return
        if waits_outside:
            self._calm = 0
        self._fire(timer.when)
        self.poke()

    def _fire(self, when: float) -> None:
        """Everything that is due by `when`, at its own time."""
        while (timer := self._next(only_pulling=False)) is not None and timer.when <= when:
            self._timers.remove(timer)
            heapq.heapify(self._timers)
            self.now = max(self.now, timer.when)
            timer.action()

    def _next(self, *, only_pulling: bool) -> Timer | None:
        while self._timers and self._timers[0].cancelled:
            heapq.heappop(self._timers)
        if not only_pulling:
            return self._timers[0] if self._timers else None
        return min((t for t in self._timers if t.pulls and not t.cancelled), default=None)
