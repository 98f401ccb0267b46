"""Virtual time, which jumps to the next thing that somebody waits for, and the agent's loop in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from skerry.agent.guest.loop import Loop, Timer

_LOOK_S = 0.001
_CALM_LOOKS = 10
"""Looks without traffic until the host counts as waiting: it may answer in a few turns of the loop."""
_PATIENCE_LOOKS = 250
"""The same, while a process waits for the world outside (input from the host, something of the test's own)."""
_MAX_SETTLE_TURNS = 1000


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
        self.boxes: dict[BoxLoop, None] = {}
        """Loops of the running boxes, in the order of their start."""
        self.restless = 0
        """Processes that wait for nothing in the box: they run, or wait for the world outside."""
        self._sleepers: dict[asyncio.Future[None], float] = {}
        self._traffic = 0
        self._calm = 0
        self._look: asyncio.Handle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass, as a caller from outside: with `autojump`, it passes at once."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers[woken] = self.now + seconds
        self.poke()
        try:
            await woken
        finally:
            self._sleepers.pop(woken, None)

    async def advance(self, seconds: float) -> None:
        """Move on by hand; every wake-up on the way happens at its own time, in order."""
        goal = self.now + seconds
        await self.settle()
        while (when := self._next(only_pulling=False)) is not None and when <= goal:
            self._fire(when)
            await self.settle()
        self.now = goal

    async def settle(self) -> None:
        """Let every process run until it waits."""
        calm_turns, seen = 0, self._traffic
        for _ in range(_MAX_SETTLE_TURNS):
            await asyncio.sleep(0)
            calm_turns = calm_turns + 1 if seen == self._traffic else 0
            seen = self._traffic
            if calm_turns > _CALM_LOOKS:
                return

    def traffic(self) -> None:
        """Note that something happened: whoever sees it may answer, so time waits for that."""
        self._traffic += 1
        self._calm = 0
        self.poke()

    def poke(self) -> None:
        """See soon whether time may jump."""
        if not self.autojump:
            return
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._look = loop, None
        if self._look is None:
            self._look = loop.call_soon(self._consider, loop)

    def _consider(self, loop: asyncio.AbstractEventLoop) -> None:
        self._look = None
        if self._calm < (_PATIENCE_LOOKS if self.restless else _CALM_LOOKS):
            self._calm += 1
            self._look = loop.call_later(_LOOK_S, self._consider, loop)
            return
        is_awaited = self._sleepers or any(box.is_awaited() for box in self.boxes)
        when = self._next(only_pulling=True)
        if not self.autojump or not is_awaited or when is None:
            return
        self._calm = 0 if self.restless else self._calm
        self._fire(when)
        self.poke()

    def _fire(self, when: float) -> None:
        """Run everything that is due by `when`, at its own time."""
        while (due := self._next(only_pulling=False)) is not None and due <= when:
            self.now = max(self.now, due)
            for sleeper in [each for each, end in self._sleepers.items() if end <= self.now]:
                del self._sleepers[sleeper]
                if not sleeper.done():
                    sleeper.set_result(None)
            for box in list(self.boxes):
                box.run_due()

    def _next(self, *, only_pulling: bool) -> float | None:
        times = [box.due(only_pulling=only_pulling) for box in self.boxes]
        return min([*(when for when in times if when is not None), *self._sleepers.values()], default=None)


class BoxLoop(Loop):
    """The agent's loop, driven by asyncio's, in the time of a box: it stands still while the box is paused."""

    def __init__(self, clock: Clock, on_stop: Callable[[], object], is_awaited: Callable[[], bool]) -> None:
        super().__init__()
        self.clock, self._on_stop = clock, on_stop
        self.is_awaited = is_awaited
        """Whether a caller outside waits for one of its processes."""
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._pulling: set[Timer] = set()
        self._driver: asyncio.AbstractEventLoop | None = None
        self._is_turning = False
        clock.boxes[self] = None

    def stop(self) -> None:
        asyncio.get_running_loop().call_soon(self._on_stop)

    def now(self) -> float:
        return (self.clock.now if self._paused_at is None else self._paused_at) - self._paused_s

    wall_clock = now

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        super().watch(fd, events, handler)
        self.attach()

    def forget(self, fd: int) -> None:
        super().forget(fd)
        if not self._handlers:
            self._detach()

    def attach(self) -> None:
        """Have the descriptors looked after by the loop of asyncio that runs now, if none that lives does."""
        if self._handlers and self._paused_at is None and (self._driver is None or self._driver.is_closed()):
            self._driver = asyncio.get_running_loop()
            self._driver.add_reader(self._epoll.fileno(), self._take_turn)

    def _detach(self) -> None:
        if self._driver is not None and not self._driver.is_closed():
            self._driver.remove_reader(self._epoll.fileno())
        self._driver = None

    def soon(self, action: Callable[[], None]) -> None:
        super().soon(action)
        self._turn_soon()

    def at_end_of_turn(self, action: Callable[[], None]) -> None:
        super().at_end_of_turn(action)
        self._turn_soon()

    def _turn_soon(self) -> None:
        if not self._is_turning:
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if self._paused_at is not None:
            return
        self.clock.traffic()
        self._is_turning = True
        try:
            self.turn(0)
        finally:
            self._is_turning = False
            if self._soon:
                self._turn_soon()

    def pull(self, seconds: float, action: Callable[[], None]) -> Timer:
        """A timer that the clock jumps to by itself while somebody waits; others fire only when it passes them."""
        timer = self.later(seconds, action)
        self._pulling.add(timer)
        self.clock.poke()
        return timer

    def due(self, *, only_pulling: bool) -> float | None:
        """Time of the next timer."""
        if self._paused_at is not None:
            return None
        timers = (when for when, _, each in self._timers if each.action and (each in self._pulling or not only_pulling))
        first = min(timers, default=None)
        return None if first is None else max(first + self._paused_s, self.clock.now)

    def run_due(self) -> None:
        if self._paused_at is None:
            self._run_timers()
            self._pulling &= {timer for _, _, timer in self._timers}

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self.clock.now
            self._detach()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += self.clock.now - self._paused_at
            self._paused_at = None
            self.attach()
            self._turn_soon()

    def ended(self, pid: int, status: int) -> None:
        """Tell whoever waits for a child."""
        action = self._children.pop(pid, None)
        if action is not None and self._paused_at is None:
            action(status)
        elif action is not None:
            self.soon(lambda: action(status))
