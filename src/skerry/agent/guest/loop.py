"""One thread, one epoll: file descriptors, timers, children, and work that is cut into steps."""

from __future__ import annotations

import _signal
import posix
import select
import time
from _collections import deque
from _heapq import heappop, heappush

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READ = select.EPOLLIN
WRITE = select.EPOLLOUT

_STEP_S = 0.005


class Timer:
    """Something to do later, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_count = 0
        self._soon: deque[Callable[[], None]] = deque()
        self._last: dict[Callable[[], None], None] = {}
        self._children: dict[int, Callable[[int], None]] = {}
        self._running = True
        self._wake_read, wake_write = posix.pipe2(posix.O_CLOEXEC | posix.O_NONBLOCK)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.signal(_signal.SIGTERM, lambda *_: self.stop())
        _signal.signal(_signal.SIGPIPE, _signal.SIG_IGN)
        _signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.watch(self._wake_read, READ, self._on_signal)

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` when the descriptor is ready; replaces what was asked before."""
        if fd in self._handlers:
            self._epoll.modify(fd, events)
        else:
            self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def is_watched(self, fd: int) -> bool:
        return fd in self._handlers

    def later(self, seconds: float, action: Callable[[], None]) -> Timer:
        timer = Timer(action)
        self._timer_count += 1
        heappush(self._timers, (time.monotonic() + seconds, self._timer_count, timer))
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

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            try:
                self.turn()
            except Exception:  # a bug of ours must not end the box: the agent may be PID 1
                _complain()

    def turn(self) -> None:
        for fd, events in self._epoll.poll(self._wait_s()):
            handler = self._handlers.get(fd)
            if handler is not None:  # an earlier handler of this turn may have dropped it
                handler(events)
        for _ in range(len(self._soon)):
            self._soon.popleft()()
        self._run_timers()
        while self._last:
            action = next(iter(self._last))
            del self._last[action]
            action()

    def _wait_s(self) -> float:
        if self._soon or not self._running:
            return 0
        while self._timers and self._timers[0][2].action is None:
            heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else -1

    def _run_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = heappop(self._timers)[2].action
            if action is not None:
                action()

    def _on_signal(self, _events: int) -> None:
        try:
            posix.read(self._wake_read, 512)
        except BlockingIOError:
            pass
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


def _complain() -> None:
    try:
        import traceback

        traceback.print_exc()
    except Exception:
        pass  # not even a descriptor is left to tell it
