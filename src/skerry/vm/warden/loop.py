"""One thread, one epoll: descriptors and timers. Every machine waits for what this imports, so it is little."""

from __future__ import annotations

import select
import sys
import time
from _heapq import heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

READ = select.EPOLLIN
WRITE = select.EPOLLOUT


class Timer:
    """Something to do later, unless it is cancelled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_count = 0
        self._running = True

    def watch(self, fd: int, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(events)` while the descriptor is ready; with no events, when it hangs up. Replaces what was
        asked before."""
        if fd in self._callbacks:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._callbacks[fd] = callback

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed; quiet if it is not watched."""
        if self._callbacks.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        self._timer_count += 1
        heappush(self._timers, (time.monotonic() + seconds, self._timer_count, timer))
        return timer

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Until `stop`. A callback that fails is told of and the others go on: a machine hangs on this process."""
        while self._running:
            self.turn(self._wait_s())

    def turn(self, wait_s: float) -> bool:
        """Do all that can be done now, or wait that long for something to do; False if there was nothing."""
        ready = self._epoll.poll(wait_s)
        for fd, events in ready:
            callback = self._callbacks.get(fd)
            if callback is not None:  # an earlier one of this turn may have dropped it
                self._call(callback, events)
        self._run_timers()
        return bool(ready)

    def _wait_s(self) -> float:
        while self._timers and self._timers[0][2].action is None:
            heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = heappop(self._timers)[2].action
            if action is not None:
                self._call(action)

    @staticmethod
    def _call(callback: Callable[..., None], *args: int) -> None:
        try:
            callback(*args)
        except Exception:
            sys.excepthook(*sys.exc_info())
