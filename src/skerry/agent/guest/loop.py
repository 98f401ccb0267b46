"""Event loop: descriptors, timers, children, and work in steps. The warden on the host imports it too."""

from __future__ import annotations

import _signal
import posix
import select
import sys
import time
from _collections import deque
from _heapq import heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ = select.EPOLLIN
WRITE = select.EPOLLOUT

_STEP_S = 0.005


def ignore_errors(action: Callable[..., object], *args: object) -> None:
    """Do what may fail, where the failure changes nothing."""
    try:
        action(*args)
    except OSError:
        pass


class Timer:
    """Action at a later time, unless it is cancelled."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Loop:
    """One epoll in one thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_count = 0
        self._soon: deque[Callable[[], None]] = deque()
        self._last: dict[Callable[[], None], None] = {}
        self._children: dict[int, Callable[[int], None]] = {}
        self._running = True

    def handle_signals(self, on_end: Callable[[], None]) -> None:
        """Reap all children, and call `on_end` when somebody ends us by a signal: for a process that has no other loop.
        LXC sends SIGPWR to the first process of a container that is to stop."""
        wake_read, wake_write = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        for number in (_signal.SIGTERM, _signal.SIGPWR):
            _signal.signal(number, lambda *_: on_end())
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.watch(wake_read, READ, lambda _events: self._on_signal(wake_read))

    def now(self) -> float:
        """Seconds that only go forward; what waits in virtual time overrides it."""
        return time.monotonic()

    def wall_clock(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` alone from now on, while the descriptor is ready; with no events, when it hangs up."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed; quiet if it is not watched."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def is_watched(self, fd: int) -> bool:
        return fd in self._handlers

    def later(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        self._timer_count += 1
        heappush(self._timers, (self.now() + seconds, self._timer_count, timer))
        return timer

    def soon(self, action: Callable[[], None]) -> None:
        """Run after the events at hand, before waiting again."""
        self._soon.append(action)

    def at_end_of_turn(self, action: Callable[[], None]) -> None:
        """Run once at the end of this turn, however often it is asked for: this is how writes are joined."""
        self._last[action] = None

    def on_exit(self, pid: int, action: Callable[[int], None]) -> None:
        """Call `action(status)` when that child has ended."""
        self._children[pid] = action

    def run_steps(self, steps: Iterator[object]) -> None:
        """Run a generator to its end, a few milliseconds at a time, so that nothing else waits for long."""

        def step() -> None:
            until = time.monotonic() + _STEP_S
            for _ in steps:
                if time.monotonic() > until:
                    self.soon(step)
                    return

        step()

    def close(self) -> None:
        """Watch nothing from now on, and keep no descriptor."""
        self._handlers.clear()
        self._epoll.close()

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        """Run until `stop`. A handler that fails is reported and the others go on: a box hangs on this process."""
        while self._running:
            try:
                self.turn()
            except Exception:
                try:
                    sys.excepthook(*sys.exc_info())
                except Exception:
                    pass  # not even a descriptor is left to tell it

    def turn(self, wait_s: float | None = None) -> bool:
        """Do all that can be done now, or wait at most `wait_s` for it; False if no descriptor was ready."""
        ready = self._epoll.poll(self._wait_s() if wait_s is None else wait_s)
        for fd, events, handler in [(fd, events, self._handlers.get(fd)) for fd, events in ready]:
            # An earlier handler of this turn may have closed it, and its number may be another's by now.
            if handler is not None and self._handlers.get(fd) == handler:
                handler(events)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        self._run_timers()
        while self._last:
            action = next(iter(self._last))
            del self._last[action]
            action()
        return bool(ready)

    def _wait_s(self) -> float:
        if self._soon or self._last or not self._running:
            return 0
        while self._timers and self._timers[0][2].action is None:
            heappop(self._timers)
        return max(0.0, self._timers[0][0] - self.now()) if self._timers else -1

    def _run_timers(self) -> None:
        now = self.now()
        while self._timers and self._timers[0][0] <= now:
            action = heappop(self._timers)[2].action
            if action is not None:
                action()

    def _on_signal(self, wake_read: int) -> None:
        ignore_errors(posix.read, wake_read, 512)
        while True:  # everything that ended is reaped, orphans too: we may be PID 1
            try:
                pid, status = posix.waitpid(-1, posix.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            action = self._children.pop(pid, None)
            if action is not None:
                action(status)
