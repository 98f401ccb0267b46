"""Input of a process: bytes of calls, in their order, as fast as the process takes them."""

from __future__ import annotations

import posix
from _collections import deque

from .channel import Call, Failure
from .loop import WRITE, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_END_OF_INPUT = b"\x04"


def nothing() -> None:
    pass


class InputPipe:
    """Standard input of a process, or its terminal as somebody who types."""

    def __init__(self, loop: Loop, fd: int, is_terminal: bool) -> None:
        self.fd = fd
        self.is_terminal = is_terminal
        self._loop = loop
        self._pending: deque[tuple[Call | None, memoryview, Callable[[], None]]] = deque()
        self._ends = False

    def write(self, call: Call, data: memoryview) -> None:
        if self.fd < 0 or self._ends:
            call.acknowledge(len(data))
            return
        self._pending.append((call, data, nothing))
        self._write_pending()
        if self._pending:  # the view is only lent: keep a copy of what had to wait
            _, rest, done = self._pending[-1]
            self._pending[-1] = (call, memoryview(bytes(rest)), done)

    def feed(self, data: bytes) -> None:
        """Have bytes of our own be input."""
        self._pending.append((None, memoryview(data), nothing))
        self._write_pending()

    def end(self) -> None:
        """Let there be no more input."""
        if self.is_terminal:  # a terminal has no end: its user types Ctrl-D
            self._pending.append((None, memoryview(_END_OF_INPUT), nothing))
        else:
            self._ends = True
        self._write_pending()

    def take(self, call: Call) -> None:
        """Have the bytes of a call be input; it is answered once all of them are taken. Raises Failure."""
        wanted = call.params.get("terminal")
        if wanted is not None and bool(wanted) is not self.is_terminal:
            raise Failure("invalid", f"this process has {'a' if self.is_terminal else 'no'} terminal")
        if self.fd < 0 and not call.params.get("close"):
            raise Failure("invalid", "this process has no standard input, or it is closed")

        def end() -> None:
            if call.params.get("close"):
                self.end()
            self._pending.append((None, memoryview(b""), lambda: call.answer({})))
            self._write_pending()

        call.on_data = lambda data: self.write(call, data)
        call.on_end = end
        call.on_close = lambda: self._drop(call)

    def _drop(self, call: Call) -> None:
        left = [each for each in self._pending if each[0] is not call]
        self._pending.clear()
        self._pending.extend(left)

    def _write_pending(self, _events: int = 0) -> None:
        while self._pending and self.fd >= 0:
            call, data, done = self._pending[0]
            try:
                written = posix.write(self.fd, data) if data else 0
            except BlockingIOError:
                self._loop.watch(self.fd, WRITE, self._write_pending)
                return
            except OSError:  # nobody reads it any more
                written = len(data)
            if call is not None:
                call.acknowledge(written)
            if written < len(data):
                self._pending[0] = (call, data[written:], done)
            else:
                self._pending.popleft()
                done()
        self._loop.forget(self.fd)
        if self._ends or self.fd < 0:
            self.close()

    def close(self) -> None:
        if self.fd >= 0:
            self._loop.forget(self.fd)
            posix.close(self.fd)
            self.fd = -1
        while self._pending:  # what nobody takes any more is as good as taken
            call, data, done = self._pending.popleft()
            if call is not None:
                call.acknowledge(len(data))
            done()
