"""The processes of a mock box: coroutines that wait for each other, for the host, and for virtual time."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from skerry.providers.mock.clock import Clock, Timer
from skerry.providers.mock.filesystem import FileSystem, absolute, error
from skerry.providers.mock.handles import BrokenPipe, OpenFile

if TYPE_CHECKING:
    from skerry.providers.mock.context import Context, Listener

Program = Callable[["Context"], "Awaitable[int | None] | int | None"]
"""What stands behind a command's name: it gets its process's context and returns the exit code (None is 0)."""

PROGRAM_MARK = b"\x7fMOCK "
_FREE_STEPS = 1000
_STEPS_PER_SLICE = 50
_SLICE_S = 1 / 64  # exact in binary, so that sums stay exact
_NOT_CATCHABLE = {signal.SIGKILL, signal.SIGSTOP}
_NO_DEATH = {signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG}


class Exit(Exception):
    """Ends a program from anywhere inside it."""

    def __init__(self, code: int) -> None:
        self.code = code


class Alarm:
    """A timer of one machine, which stands still while the machine is paused."""

    def __init__(self, machine: Machine, seconds: float, action: Callable[[], None], *, pulls: bool) -> None:
        self._machine = machine
        self._action = action
        self._pulls = pulls
        self._left = seconds
        self._timer: Timer | None = None
        machine.alarms.add(self)
        if not machine.paused:
            self.run()

    def run(self) -> None:
        clock = self._machine.clock
        self._timer = clock.call_at(clock.now + self._left, self._fire, pulls=self._pulls)

    def hold(self) -> None:
        self._left = self.left
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    @property
    def left(self) -> float:
        return self._left if self._timer is None else self._timer.when - self._machine.clock.now

    def _fire(self) -> None:
        self._machine.alarms.discard(self)
        self._action()

    def cancel(self) -> None:
        self._machine.alarms.discard(self)
        if self._timer is not None:
            self._timer.cancel()


class Process:
    """One process: a coroutine with an environment, open files, and a way to be killed."""

    def __init__(
        self, machine: Machine, argv: list[str], env: Mapping[str, str], cwd: bytes, uid: int, parent: Process | None
    ) -> None:
        self.machine = machine
        self.pid = next(machine.pids)
        self.parent = parent
        self.session: int = parent.session if parent else self.pid
        self.argv = argv
        self.env = dict(env)
        self.cwd = cwd
        self.uid = uid
        self.fds: dict[int, OpenFile] = {}
        self.handlers: dict[int, Callable[[], None] | None] = {}
        """What a signal does instead of ending the process; None ignores it."""
        if parent is not None:
            self.handlers = {number: None for number, action in parent.handlers.items() if action is None}
        self.memory = 1 << 20
        self.started = machine.clock.now
        self.exit_code: int | None = None
        self.signal: int | None = None
        self.on_end: list[Callable[[], None]] = []
        self.stopped = False
        self.dying = False
        self._killed_by = signal.SIGKILL
        self._steps = 0
        self.task: asyncio.Task[int] | None = None

    @property
    def running(self) -> bool:
        return self.exit_code is None and self.signal is None

    @property
    def status(self) -> int:
        """The exit code as a shell tells it."""
        return 128 + self.signal if self.signal is not None else self.exit_code or 0

    def start(self, program: Program) -> None:
        from skerry.providers.mock.context import Context

        self.machine.processes[self.pid] = self
        self.machine.clock.running += 1
        self.task = asyncio.get_running_loop().create_task(self.become(program, Context(self)))
        self.task.add_done_callback(self._finished)

    async def become(self, program: Program, context: Context) -> int:
        """Run a program as this process, to its exit code."""
        try:
            outcome = program(context)
            code = await outcome if isinstance(outcome, Awaitable) else outcome
            return int(code or 0) & 255
        except Exit as end:
            return end.code & 255
        except BrokenPipe:
            self._killed_by = signal.SIGPIPE
            raise asyncio.CancelledError from None
        except OSError as problem:
            where = f"{problem.filename}: " if problem.filename else ""
            await context.stderr.write(f"{self.argv[0]}: {where}{problem.strerror}\n")
            return 1
        except Exception:
            await context.stderr.write(traceback.format_exc())
            return 1

    def _finished(self, task: asyncio.Task[int]) -> None:
        if task.cancelled() or task.exception() is not None:
            self.signal = int(self._killed_by)
        else:
            self.exit_code = task.result()
        for file in self.fds.values():
            file.release()
        self.fds.clear()
        self.machine.processes.pop(self.pid, None)
        self.machine.clock.running -= 1
        self.machine.clock.poke()
        for action in self.on_end:
            action()

    def kill(self, number: int) -> None:
        """Send a signal."""
        if not self.running or self.task is None or number == 0:
            return
        if number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGTSTP):
            self.stopped = number != signal.SIGCONT
            if not self.stopped:
                self.machine.release_held()
        elif number in self.handlers and number not in _NOT_CATCHABLE:
            action = self.handlers[number]
            if action is not None:
                action()
        elif number not in _NO_DEATH:
            self._killed_by = signal.Signals(number)
            self.dying = True
            self.task.cancel()

    async def step(self) -> None:
        """Some work was done: after a while it costs virtual time, so that a busy loop meets its timeout."""
        self._steps += 1
        if self._steps > _FREE_STEPS and self._steps % _STEPS_PER_SLICE == 0:
            self.machine.cpu_s += _SLICE_S
            await self.sleep(_SLICE_S)

    async def sleep(self, seconds: float) -> None:
        bell = Bell()
        alarm = Alarm(self.machine, max(0.0, seconds), bell.ring, pulls=True)
        try:
            await bell.wait(self)
        finally:
            alarm.cancel()

    async def wait_for(self, child: Process) -> int:
        bell = Bell()
        while child.running:
            child.on_end.append(bell.ring)
            await bell.wait(self)
        return child.status

    def use_memory(self, count: int) -> None:
        """Account `count` bytes to this process; beyond the box's memory, the kernel kills it."""
        self.memory = count
        if self.machine.memory is not None and self.machine.memory_used > self.machine.memory:
            self.kill(signal.SIGKILL)

    def path(self, path: str | bytes) -> bytes:
        """A path as this process means it, absolute."""
        if not path:
            raise error(errno.ENOENT, b"")
        return absolute(path, self.cwd)


class _Waiter:
    def __init__(self, process: Process | None, outside: bool) -> None:
        self.process = process
        self.outside = outside
        self.future = asyncio.get_running_loop().create_future()
        self._parked = process is not None
        if process is not None:
            clock = process.machine.clock
            clock.running -= 1
            clock.outside += outside
            clock.poke()

    def unpark(self) -> None:
        if self._parked and self.process is not None:
            self._parked = False
            self.process.machine.clock.running += 1
            self.process.machine.clock.outside -= self.outside

    def wake(self) -> None:
        if self.future.done():
            return
        process = self.process
        if process is not None and (process.stopped or process.machine.paused):
            process.machine.held.append(self)
            return
        self.unpark()
        self.future.set_result(None)


class Bell:
    """Where processes, and the agent (as `None`), wait until something happens."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []

    async def wait(self, process: Process | None, *, outside: bool = False) -> None:
        waiter = _Waiter(process, outside)
        self._waiters.append(waiter)
        try:
            await waiter.future
        finally:
            waiter.unpark()
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def ring(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()


class Machine:
    """A running box: its files, processes, ports and alarms."""

    def __init__(
        self,
        clock: Clock,
        files: FileSystem,
        programs: Mapping[str, Program],
        *,
        max_pids: int | None = None,
        memory: int | None = None,
    ) -> None:
        self.clock = clock
        self.files = files
        self.programs = programs
        self.max_pids = max_pids
        self.memory = memory
        self.pids = itertools.count(2)
        self.processes: dict[int, Process] = {}
        self.listeners: dict[int, Listener] = {}
        self.alarms: set[Alarm] = set()
        self.held: list[_Waiter] = []
        self.paused = False
        self.cpu_s = 0.0

    @property
    def memory_used(self) -> int:
        return sum(process.memory for process in self.processes.values() if not process.dying)

    @property
    def process_count(self) -> int:
        """The processes that live, the agent among them."""
        return 1 + sum(not process.dying for process in self.processes.values())

    def pause(self) -> None:
        if not self.paused:
            for alarm in self.alarms:
                alarm.hold()
            self.paused = True

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            for alarm in self.alarms:
                alarm.run()
            self.release_held()

    def release_held(self) -> None:
        held, self.held = self.held, []
        for waiter in held:
            waiter.wake()

    def spawn(
        self,
        argv: list[str],
        *,
        env: Mapping[str, str],
        cwd: bytes,
        uid: int,
        fds: Mapping[int, OpenFile],
        parent: Process | None = None,
    ) -> Process:
        """Start a program. Raises OSError as `execve` and `fork` would; `fds` are shared with the new process."""
        program, argv = self.resolve(argv, env, cwd, uid)
        return self.fork(program, argv, env=env, cwd=cwd, uid=uid, fds=fds, parent=parent)

    def fork(
        self,
        program: Program,
        argv: list[str],
        *,
        env: Mapping[str, str],
        cwd: bytes,
        uid: int,
        fds: Mapping[int, OpenFile],
        parent: Process | None = None,
    ) -> Process:
        if self.max_pids is not None and self.process_count >= self.max_pids:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        process = Process(self, argv, env, cwd, uid, parent)
        process.fds = {number: file.retain() for number, file in fds.items()}
        process.start(program)
        return process

    def resolve(self, argv: list[str], env: Mapping[str, str], cwd: bytes, uid: int) -> tuple[Program, list[str]]:
        name = argv[0]
        if "/" in name:
            return self._load(absolute(name, cwd), argv, uid)
        denied = None
        for folder in env.get("PATH", "/usr/bin").split(":"):
            path = absolute(name, absolute(folder, cwd))
            try:
                return self._load(path, argv, uid)
            except PermissionError as problem:
                denied = problem
            except (FileNotFoundError, NotADirectoryError):
                continue
        if denied is not None:
            raise denied
        if name in self.programs:
            return self.programs[name], argv
        raise error(errno.ENOENT, os.fsencode(name))

    def _load(self, path: bytes, argv: list[str], uid: int, depth: int = 0) -> tuple[Program, list[str]]:
        node = self.files.find(path, uid)
        executable = node.is_file and node.mode & 0o111
        if not executable or depth > 4:
            raise error(errno.EACCES, path)
        if node.data.startswith(PROGRAM_MARK):
            program = self.programs.get(node.data[len(PROGRAM_MARK) :].decode())
            if program is None:
                raise error(errno.ENOENT, path)
            return program, argv
        if not node.data.startswith(b"#!"):
            raise error(errno.ENOEXEC, path)
        words = os.fsdecode(bytes(node.data[2:].split(b"\n")[0])).split()
        if words and words[0] == "/usr/bin/env":
            words = [f"/usr/bin/{words[1]}", *words[2:]] if len(words) > 1 else words
        if not words:
            raise error(errno.ENOEXEC, path)
        return self._load(os.fsencode(words[0]), [*words, os.fsdecode(path), *argv[1:]], uid, depth + 1)

    def signal_session(self, session: int, number: int) -> None:
        """Send a signal to a process and all that descend from it."""
        for process in [p for p in self.processes.values() if p.session == session]:
            process.kill(number)

    def halt(self) -> None:
        """Kill everything."""
        for alarm in list(self.alarms):
            alarm.cancel()
        self.paused = False
        for process in list(self.processes.values()):
            process.kill(signal.SIGKILL)
        self.listeners.clear()

    def tasks(self) -> list[asyncio.Task[int]]:
        """What still runs, to be awaited."""
        return [process.task for process in self.processes.values() if process.task is not None]
