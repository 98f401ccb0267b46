"""Processes of the box, from their start to their end: output, input, signals, and death with all they started."""

from __future__ import annotations

import posix
from _collections import deque
from binascii import hexlify

from . import spawn
from .channel import Call, Failure
from .input import InputPipe
from .loop import READ, Loop, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

KEPT_OUTPUT = 1 << 20
_KEPT_ENDED = 64
_KEPT_S = 30.0
_MOST_ENDED = 1024
_HELD_S = 10.0
_CHUNK = 1 << 18
_SIGKILL = 9
_SIGTERM = 15
_MAX_PATH = 4096
_NOT_STARTED = {spawn.NOT_FOUND: "not_found", spawn.CANNOT_RUN: "cannot_run"}


class OutputPipe:
    """Output pipe of a process: read when its readers have room, counted, capped, kept if nobody reads."""

    def __init__(self, process: Process, fd: int, number: int) -> None:
        self.process = process
        self.fd = fd
        self.number = number
        self.count = 0
        self.tail = bytearray()  # what came last, beyond what is sent as it comes
        self.at_end = False
        posix.set_blocking(fd, False)
        process.loop.watch(fd, READ, self._on_ready)

    def _on_ready(self, _events: int) -> None:
        if not self.read_some():
            self.process.check_done()

    def read_some(self) -> bool:
        """Pass on one chunk; False when there is nothing more for now."""
        room = self.process.room(self)
        if room <= 0:
            self.process.loop.forget(self.fd)
            return False
        try:
            data = posix.read(self.fd, min(room, _CHUNK))
        except BlockingIOError:
            return False
        except OSError:  # EIO: the terminal's other side is closed
            data = b""
        if not data:
            self.close()
            return False
        self.count += len(data)
        self.process.deliver(self, data)
        return True

    def resume(self) -> None:
        if not self.at_end and not self.process.loop.is_watched(self.fd):
            self.process.loop.watch(self.fd, READ, self._on_ready)

    def close(self) -> None:
        if not self.at_end:
            self.at_end = True
            self.process.loop.forget(self.fd)
            posix.close(self.fd)

    def drain_for_ever(self) -> None:
        """Read on and drop it all, after the process's end: whatever still holds the pipe must not die of SIGPIPE."""
        loop, fd = self.process.loop, self.fd
        self.at_end = True

        def drop(_events: int) -> None:
            try:
                if posix.read(fd, _CHUNK):
                    return
            except BlockingIOError:
                return
            except OSError:
                pass
            loop.forget(fd)
            posix.close(fd)

        loop.watch(fd, READ, drop)


class Process:
    def __init__(self, table: ProcessTable, number: int, request: spawn.Request) -> None:
        self.table = table
        self.loop = table.loop
        self.number = number
        self.request = request
        self.started = self.loop.wall_clock()
        self.timed_out = False
        self.truncated = False
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.ended = False
        self.ended_at = 0.0
        self.on_exit: list[Callable[[], None]] = []
        self.is_held = request.is_held
        self.readers: list[Call] = []
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._begin = self.loop.now()
        self._duration = 0.0
        self._status: int | None = None
        self._not_started: str | None = None
        self._timer: Timer | None = None
        self.mark = f"{table.mark}-{number}"
        child = table.spawn(request, self.mark)
        self.pid = child.pid
        self.input = InputPipe(self.loop, child.input_fd, request.pty is not None)
        self.outputs = [OutputPipe(self, fd, number) for number, fd in child.outputs]
        if child.failure is not None:
            self.exit_code, message = child.failure
            self._not_started = _NOT_STARTED[self.exit_code]
            self._status = 0
            self._keep(2, f"skerry: {message}\n".encode("utf-8", "surrogateescape"))
            self.loop.soon(self._finish)
        else:
            self.loop.on_exit(child.pid, self._on_exit)
            if self.is_held:
                self.loop.later(_HELD_S, self._release)
            if request.timeout_s is not None:
                self._timer = self.loop.later(request.timeout_s, self._on_timeout)

    @property
    def has_exited(self) -> bool:
        return self._status is not None

    def room(self, output: OutputPipe) -> int:
        if self.request.limit is not None and output.count >= self.request.limit - self.request.tail:
            return _CHUNK  # it will be kept for the end, or dropped
        if self.is_held:
            return 0
        if not self.readers:
            return _CHUNK if self.request.background or self._status is not None else 0
        return min(call.room() for call in self.readers)

    def deliver(self, output: OutputPipe, data: bytes) -> None:
        limit, tail = self.request.limit, self.request.tail
        if limit is not None and output.count > limit - tail:
            self.truncated |= output.count > limit
            head = max(0, limit - tail - (output.count - len(data)))
            if tail:
                output.tail += data[head:]
                del output.tail[:-tail]
            data = data[:head]
            if not data:
                return
        for call in self.readers:
            call.send(data, output.number)
        if self.request.background:
            self._keep(output.number, data)

    def _keep(self, number: int, data: bytes) -> None:
        if self.request.on_output is not None:
            self.request.on_output(number, data)
            return
        self._kept.append((number, data))
        self._kept_bytes += len(data)
        while self._kept_bytes > KEPT_OUTPUT and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _release(self) -> None:
        """Wait no longer for the first reader."""
        self.is_held = False
        self._resume()

    def add_reader(self, call: Call, *, replay: bool = True) -> None:
        """Give the call the output that is kept, unless it is to have no `replay`, then all that comes, then the
        end."""
        backlog = deque(self._kept if replay else ())
        self.is_held = False

        def pump() -> None:
            while backlog and call.room() > 0:
                number, data = backlog.popleft()
                room = call.room()
                if len(data) > room:
                    backlog.appendleft((number, data[room:]))
                call.send(data[:room], number)
            if backlog:
                return
            if call not in self.readers:
                self.readers.append(call)
                if self.ended:
                    call.answer(self.exit())
                    return
            self._resume()

        call.ref = self
        call.pump = pump
        call.on_data = lambda data: self.input.write(call, data)
        call.on_end = self.input.end
        pump()

    def remove_reader(self, call: Call) -> None:
        if call in self.readers:
            self.readers.remove(call)
        self._resume()

    def _resume(self) -> None:
        for output in self.outputs:
            output.resume()
        self.check_done()

    def _on_timeout(self) -> None:
        self.timed_out = True
        self.kill_tree()

    def _on_exit(self, status: int) -> None:
        self._status = status
        self._duration = self.loop.now() - self._begin
        if posix.WIFSIGNALED(status):
            self.signal = posix.WTERMSIG(status)
        else:
            self.exit_code = posix.WEXITSTATUS(status)
        if self._timer is not None:
            self._timer.cancel()
        waiting, self.on_exit = self.on_exit, []
        for tell in waiting:
            tell()
        self.check_done()

    def check_done(self) -> None:
        """Finish once the process is gone and all that it wrote is passed on."""
        if self._status is None or self.ended:
            return
        for output in self.outputs:
            while not output.at_end and output.read_some():
                pass
            if not output.at_end and self.room(output) <= 0:
                return  # more waits in the pipe than the reader has room for; credit brings us back
        if all(self._send_tail(output) for output in self.outputs):
            self._finish()

    def _send_tail(self, output: OutputPipe) -> bool:
        """Send the end of an output that was too long, as far as there is room; False if there is not enough."""
        if not self.request.tail:
            output.tail.clear()
        while output.tail and self.readers:
            room = min(call.room() for call in self.readers)
            if room <= 0:
                return False
            piece = bytes(output.tail[:room])
            del output.tail[:room]
            for call in self.readers:
                call.send(piece, output.number)
        return True

    def _finish(self) -> None:
        self.ended = True
        self.table.last_end = self.ended_at = self.loop.now()
        for output in self.outputs:
            if self.request.pty:
                output.close()
            elif not output.at_end:
                output.drain_for_ever()
        self.input.close()
        self.request.clean_up()
        if not self.request.background:
            self.table.forget(self)
        for call in list(self.readers):
            call.answer(self.exit())
        self.readers.clear()

    def exit(self) -> dict[str, Any]:
        counts = {output.number: output.count for output in self.outputs}
        return {
            "exit_code": self.exit_code,
            "signal": self.signal,
            "timed_out": self.timed_out,
            "truncated": self.truncated,
            "duration_s": round(self._duration, 6),
            "stdout_bytes": counts.get(1, 0),
            "stderr_bytes": counts.get(2, 0),
            **({} if self._not_started is None else {"not_started": self._not_started}),
        }

    def info(self, room: int, *, env: bool = False) -> dict[str, Any]:
        """Tell of it; of its arguments at most so many letters, and with `env` of the variables that it was given."""
        own, cwd = self.request.own_env, self.request.cwd
        if env and sum(len(name) + len(value) for name, value in own.items()) > room:
            own = {}
        return {
            **({"env": own} if env else {}),
            "cwd": spawn.to_bytes(cwd[: min(room, _MAX_PATH)]).decode("utf-8", "replace"),
            "process": self.number,
            "pid": self.pid,
            "argv": list(_shortened(self.request.argv, room)),
            "tag": self.request.tag,
            "pty": self.request.pty is not None,
            "background": self.request.background,
            "started": self.started,
            "running": not self.ended,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "output_bytes": sum(output.count for output in self.outputs),
        }

    def send_signal(self, number: int, tree: bool, *, alone: bool = False) -> None:
        if self._status is not None:
            return
        if alone:
            self.table.signal_process(self.pid, number)
        elif tree:
            self.table.signal_trees({self.pid: self.mark}, number)
        else:
            self.table.signal_group(self.pid, number)

    def kill_tree(self) -> None:
        if self._status is None:
            self.table.kill(self.pid, self.mark)

    def abandon(self) -> None:
        """Kill it with all it started, and drop its output: nobody waits for it any more."""
        self.request.limit = self.request.tail = 0
        self.readers = [call for call in self.readers if call.open]
        self.kill_tree()
        self._resume()

    def resize(self, rows: int, cols: int) -> None:
        if self.request.pty is None:
            raise Failure("invalid", "this process has no terminal")
        if self.input.fd >= 0:
            spawn.set_size(self.input.fd, rows, cols)


def _shortened(argv: list[str], room: int) -> Iterator[str]:
    for arg in argv:
        if len(arg) >= room:
            yield spawn.to_bytes(arg[:room]).decode("utf-8", "replace") + "..."
            return
        room -= len(arg) + 1
        yield spawn.to_bytes(arg).decode("utf-8", "replace")


class ProcessTable:
    """Processes that the agent started and still knows."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.mark = hexlify(posix.urandom(6)).decode()
        """Mark of this agent: where agents share a process table, none may end what another started."""
        self._processes: dict[int, Process] = {}
        self.marked: dict[int, str] = {}
        self._count = 0
        self.last_end = 0.0

    def start(self, request: spawn.Request) -> Process:
        self._count += 1
        process = Process(self, self._count, request)
        self._processes[process.number] = process
        self._forget_ended()
        return process

    def _forget_ended(self) -> None:
        """Keep those that ended last, and all that ended just now, whose ends somebody may yet ask for."""
        ended = [each for each in self._processes.values() if each.ended]
        since = self.loop.now() - _KEPT_S
        for index, each in enumerate(ended[:-_KEPT_ENDED]):
            if each.ended_at < since or index < len(ended) - _MOST_ENDED:
                del self._processes[each.number]

    # All that touches the kernel's own processes: what has none overrides it.

    def spawn(self, request: spawn.Request, mark: str) -> spawn.Spawned:
        return spawn.start(request, mark)

    def signal_group(self, pid: int, number: int) -> None:
        try:
            posix.killpg(pid, number)
        except ProcessLookupError:
            pass

    def signal_process(self, pid: int, number: int) -> None:
        try:
            posix.kill(pid, number)
        except ProcessLookupError:
            pass

    def signal_trees(self, roots: dict[int, str], number: int) -> None:
        from . import proc

        proc.signal_trees(roots, number)

    def terminate(self) -> None:
        """Ask everything in the box to end; where we are not its first process, all that we started."""
        from . import proc

        if posix.getpid() == 1:
            proc.terminate_others()
        elif roots := {process.pid: process.mark for process in self.all() if not process.has_exited}:
            proc.signal_trees(roots, _SIGTERM)

    def all_ended(self) -> bool:
        """Whether nothing of that is left, and all that it said is passed on, as far as there is room."""
        from . import proc

        return all(process.has_exited for process in self.all()) and (posix.getpid() != 1 or not proc.others())

    def kill(self, pid: int, mark: str) -> None:
        """Kill a tree; many that are to die at once are searched for together."""
        if not self.marked:
            self.loop.soon(self._kill_marked)
        self.marked[pid] = mark

    def _kill_marked(self) -> None:
        marked, self.marked = self.marked, {}
        self.signal_trees(marked, _SIGKILL)

    def get(self, number: object) -> Process:
        process = self._processes.get(number) if type(number) is int else None
        if process is None:
            raise Failure("no_process", f"no process has the number {number}")
        return process

    def forget(self, process: Process) -> None:
        self._processes.pop(process.number, None)

    def all(self) -> list[Process]:
        return list(self._processes.values())

    def any_running(self) -> bool:
        return any(not process.ended and process.request.keeps_awake for process in self._processes.values())
