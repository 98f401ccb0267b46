"""What the mock agent starts: processes with their input from the host, output to it, limits and end."""

from __future__ import annotations

import signal
from collections import deque
from typing import Any

from skerry.agent.guest.channel import Failure
from skerry.providers.mock.channel import Call
from skerry.providers.mock.handles import Null, OpenFile
from skerry.providers.mock.kernel import Alarm, Bell, Machine, Process

KEPT_OUTPUT = 1 << 20
_KEY_SIGNALS = {b"\x03": (b"^C", signal.SIGINT), b"\x1c": (b"^\\", signal.SIGQUIT), b"\x1a": (b"^Z", signal.SIGTSTP)}


class HostInput(OpenFile):
    """Standard input that calls feed."""

    def __init__(self, *, outside: bool) -> None:
        super().__init__()
        self._chunks: deque[tuple[Call | None, bytes]] = deque()
        self._taken = 0
        self._ended = False
        self._is_closed = False
        self._outside = outside
        self._bell = Bell()

    def feed(self, call: Call | None, data: bytes) -> None:
        if self._is_closed:
            if call is not None:
                call.acknowledge(len(data))
            return
        self._chunks.append((call, data))
        self._bell.ring()

    def end(self) -> None:
        self._ended = True
        self._bell.ring()

    async def read(self, process: Process | None, count: int) -> bytes:
        while not self._chunks and not self._ended:
            await self._bell.wait(process, outside=self._outside)
        if not self._chunks:
            return b""
        call, data = self._chunks[0]
        part = data[self._taken : self._taken + count]
        self._taken += len(part)
        if self._taken == len(data):
            self._taken = 0
            self._chunks.popleft()
            if call is not None:
                call.acknowledge(len(data))
        return part

    def closed(self) -> None:
        self._is_closed = True
        for call, data in self._chunks:
            if call is not None:
                call.acknowledge(len(data))
        self._chunks.clear()


class HostOutput(OpenFile):
    def __init__(self, job: Job, fd: int) -> None:
        super().__init__()
        self._job = job
        self._fd = fd

    async def write(self, process: Process | None, data: bytes) -> None:
        await self._job.deliver(process, self._fd, data)


class Terminal(HostInput):
    """A terminal with the usual line discipline: echo, lines, ^C, ^D, backspace."""

    is_terminal = True

    def __init__(self, job: Job, size: tuple[int, int]) -> None:
        super().__init__(outside=True)
        self.size = size
        self._job = job
        self._line = b""

    def typed(self, call: Call, data: bytes) -> None:
        call.acknowledge(len(data))
        for number in range(len(data)):
            self._key(data[number : number + 1])

    def end(self) -> None:
        """A terminal has no end: its user types ^D."""
        self._key(b"\x04")

    def _key(self, key: bytes) -> None:
        if key in _KEY_SIGNALS:
            shown, number = _KEY_SIGNALS[key]
            self._line = b""
            self._job.post(1, shown + b"\r\n")
            self._job.send_signal(number)
        elif key == b"\x04":
            self._hand_over() if self._line else self.feed(None, b"")
        elif key in (b"\x7f", b"\b"):
            if self._line:
                self._line = self._line[:-1]
                self._job.post(1, b"\b \b")
        else:
            key = b"\n" if key == b"\r" else key
            self._line += key
            self._job.post(1, b"\r\n" if key == b"\n" else key)
            if key == b"\n":
                self._hand_over()

    def resize(self, size: tuple[int, int]) -> None:
        self.size = size
        self._job.send_signal(signal.SIGWINCH)

    def _hand_over(self) -> None:
        line, self._line = self._line, b""
        self.feed(None, line)

    async def write(self, process: Process | None, data: bytes) -> None:
        await self._job.deliver(process, 1, data.replace(b"\n", b"\r\n"))


def size_of(params: object) -> tuple[int, int]:
    """The rows and columns that a request gives a terminal."""
    rows, cols = (params.get("rows"), params.get("cols")) if isinstance(params, dict) else (None, None)
    if type(rows) is not int or type(cols) is not int or not (0 < rows < 1 << 16 and 0 < cols < 1 << 16):
        raise Failure("invalid", "rows and cols are numbers from 1 to 65535")
    return rows, cols


class Job:
    """One process that the agent knows."""

    def __init__(self, number: int, params: dict[str, Any], *, stdin: bool) -> None:
        self.number = number
        self.background = bool(params.get("background"))
        self.tag = params.get("tag")
        self.pty = params.get("pty") is not None
        self.argv: list[str] = []
        self.limit: int | None = params.get("limit")
        self.process: Process | None = None
        self.readers: list[Call] = []
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.timed_out = self.truncated = self.ended = False
        self.started = self.duration_s = 0.0
        self._counts = {1: 0, 2: 0}
        self._kept: deque[tuple[int, bytes]] = deque()
        self._bell = Bell()
        self._timer: Alarm | None = None
        self.input: HostInput | None = None
        if self.pty:
            self.input = Terminal(self, size_of(params["pty"]))
        elif stdin:
            self.input = HostInput(outside=not self.background)

    @property
    def ended_at(self) -> float:
        return self.started + self.duration_s if self.ended else 0.0

    def files(self) -> dict[int, OpenFile]:
        if isinstance(self.input, Terminal):
            return {0: self.input, 1: self.input, 2: self.input}
        return {0: self.input or Null(), 1: HostOutput(self, 1), 2: HostOutput(self, 2)}

    def watch(self, machine: Machine, process: Process, timeout_s: float | None) -> None:
        self.process = process
        self.started = process.started
        process.on_end.append(lambda: self._ended(machine))
        if timeout_s is not None:
            self._timer = Alarm(machine, timeout_s, self._late, pulls=True)

    def failed_to_start(self, code: int, message: str) -> None:
        self.exit_code, self.ended = code, True
        self.post(2, f"skerry: {message}\n".encode(errors="surrogateescape"))

    def _ended(self, machine: Machine) -> None:
        assert self.process is not None
        self.exit_code, self.signal = self.process.exit_code, self.process.signal
        self.duration_s = machine.clock.now - self.started
        self.ended = True
        if self._timer is not None:
            self._timer.cancel()
        self._bell.ring()

    def _late(self) -> None:
        self.timed_out = True
        self.kill()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def abandon(self) -> None:
        """Nobody waits for it any more: it dies, and what it still says is dropped."""
        self.limit = 0
        for call in self.readers:
            call.drop_pending()
        self.kill()

    def send_signal(self, number: int) -> None:
        """To the process and all that descends from it: in a mock box they are one group."""
        if self.process is None or self.ended:
            return
        self.process.machine.signal_session(self.process.session, number)

    async def deliver(self, process: Process | None, fd: int, data: bytes) -> None:
        self.post(fd, data)
        for call in list(self.readers):
            await call.flushed(process)

    def post(self, fd: int, data: bytes) -> None:
        """Count it, cut it to the limit, keep it if it may be asked for later, pass it on."""
        before = self._counts[fd]
        self._counts[fd] += len(data)
        if self.limit is not None and self._counts[fd] > self.limit:
            self.truncated = True
            data = data[: max(0, self.limit - before)]
        if not data:
            return
        if self.background or not self.readers:
            self._kept.append((fd, data))
            while sum(len(kept) for _, kept in self._kept) > KEPT_OUTPUT and len(self._kept) > 1:
                self._kept.popleft()
        for call in self.readers:
            call.post(data, fd)

    async def follow(self, call: Call) -> dict[str, Any]:
        """Give a call what is kept, all that comes, and the end."""
        call.process = self
        for fd, data in self._kept:
            call.post(data, fd)
        self.readers.append(call)
        self._take_input_from(call)
        try:
            while not self.ended:
                await self._bell.wait(None)
        finally:
            self.readers.remove(call)
        return self.exit()

    def _take_input_from(self, call: Call) -> None:
        source = self.input
        if isinstance(source, Terminal):
            terminal = source
            call.route(lambda data: terminal.typed(call, data), terminal.end)
        elif source is not None:
            given = source
            call.route(lambda data: given.feed(call, data), given.end)
        else:
            call.route(lambda data: call.acknowledge(len(data)), lambda: None)

    def exit(self) -> dict[str, Any]:
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "timed_out": self.timed_out,
            "truncated": self.truncated,
            "duration_s": round(self.duration_s, 6),
            "stdout_bytes": self._counts[1],
            "stderr_bytes": self._counts[2],
        }

    def info(self) -> dict[str, Any]:
        return {
            "process": self.number,
            "pid": self.process.pid if self.process is not None else 0,
            "argv": self.argv,
            "tag": self.tag,
            "pty": self.pty,
            "background": self.background,
            "started": self.started,
            "running": not self.ended,
            "exit_code": self.exit_code,
            "signal": self.signal,
        }
