"""Processes of a mock box: coroutines on real pipes, and the context that each is given."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import socket
import stat
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from skerry.agent.guest import spawn as guest_spawn
from skerry.agent.guest.channel import Failure
from skerry.agent.guest.loop import READ, WRITE
from skerry.agent.guest.process import ProcessTable
from skerry.providers.mock.clock import BoxLoop
from skerry.providers.mock.files import box_text, error

if TYPE_CHECKING:
    from skerry.providers.mock.host import Box

Program = Callable[["Context"], "Awaitable[int | None] | int | None"]
"""The function behind a command's name: it gets its process's context and returns the exit code (None is 0)."""
Stdio = tuple[int, int, int]

CHUNK = 1 << 16
_HARMLESS = {signal.SIGCHLD, signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, 0}


class Pipe:
    """A program's standard input or output, or a connection to a peer; iterate it for lines."""

    def __init__(self, process: Context, fd: int) -> None:
        os.set_blocking(fd, False)
        self._process, self._fd, self._kept = process, fd, b""
        self._write = process.kernel.files.write if stat.S_ISREG(os.fstat(fd).st_mode) else os.write

    async def read(self, count: int = CHUNK) -> bytes:
        """At most `count` bytes; none at the end."""
        data, self._kept = self._kept[:count], self._kept[count:]
        while not data:
            try:
                return os.read(self._fd, count)
            except BlockingIOError:
                await self._process.ready(self._fd, READ)
        return data

    async def read_all(self) -> bytes:
        """Everything to the end; it counts as the program's memory."""
        chunks = []
        while chunk := await self.read():
            chunks.append(chunk)
            self._process.use_memory(self._process.memory + len(chunk))
        return b"".join(chunks)

    async def readline(self) -> bytes:
        """One line with its newline; empty at the end."""
        line = b""
        while b"\n" not in line and (chunk := await self.read()):
            line += chunk
        line, newline, self._kept = line.partition(b"\n")
        return line + newline

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while line := await self.readline():
            yield line

    async def write(self, data: bytes | str) -> None:
        """Send it all; waits while nobody takes it."""
        view = memoryview(os.fsencode(data) if isinstance(data, str) else data)
        while view:
            try:
                view = view[self._write(self._fd, view[:CHUNK]) :]
            except BlockingIOError:
                await self._process.ready(self._fd, WRITE)


class Connection:
    """One peer of a server in the box."""

    def __init__(self, process: Context, peer: socket.socket) -> None:
        self._peer = process.at_end.enter_context(peer)
        self.reader = self.writer = Pipe(process, peer.fileno())

    def close(self) -> None:
        """No more will be sent."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_WR)


class Listener:
    """A server's port in the box."""

    def __init__(self, process: Context) -> None:
        self._process = process
        self._waiting: asyncio.Queue[socket.socket] = asyncio.Queue()
        self.connect = self._waiting.put_nowait

    async def accept(self) -> Connection:
        """Wait for the next peer."""
        return Connection(self._process, await self._waiting.get())


class Context:
    """A running program of a box: its arguments, streams, files, time and ports. Paths are relative to `cwd`."""

    def __init__(
        self, kernel: Kernel, program: Program, argv: list[str], env: Mapping[str, str], cwd: str, uid: int, fds: Stdio,
        parent: Context | None,
    ) -> None:  # fmt: skip
        self.kernel, self.files = kernel, kernel.files
        self.pid = next(kernel.pids)
        self.session: int = parent.session if parent else self.pid
        self.argv: list[str] = argv
        self.env: dict[str, str] = dict(env)
        self.cwd: str = cwd
        self.uid: int = uid
        self.memory = 1 << 20
        self.fds: Stdio = (os.dup(fds[0]), os.dup(fds[1]), os.dup(fds[2]))
        self.stdin: Pipe = Pipe(self, self.fds[0])
        self.stdout: Pipe = Pipe(self, self.fds[1])
        self.stderr: Pipe = Pipe(self, self.fds[2])
        self.has_host_input: bool = parent is None or (parent.has_host_input and fds[0] == parent.fds[0])
        self.handlers: dict[int, Callable[[], None] | None] = {}
        """Actions of signals instead of ending the process; None ignores it."""
        self.wait_status = 0
        """The end as `waitpid` tells it."""
        self.at_end: ExitStack = ExitStack()
        self.is_dying = False
        self.ended = asyncio.Event()
        self._killed_by = int(signal.SIGKILL)
        kernel.running[self.pid] = self
        kernel.clock.restless += 1
        self.task = asyncio.get_running_loop().create_task(self._become(program), name=f"mock process {self.pid}")
        self.task.add_done_callback(self._finish)

    async def _become(self, program: Program) -> int:
        try:
            outcome = program(self)
            code = await outcome if isinstance(outcome, Awaitable) else outcome
            return int(code or 0) & 255
        except SystemExit as end:
            return int(end.code or 0) & 255
        except BrokenPipeError:
            self._killed_by = int(signal.SIGPIPE)
            raise asyncio.CancelledError from None
        except OSError as problem:
            where = box_text(f"{os.fsdecode(problem.filename)}: ") if problem.filename else ""
            await self.stderr.write(f"{self.argv[0]}: {where}{problem.strerror}\n")
        except Exception:
            await self.stderr.write(traceback.format_exc())
        return 1

    def _finish(self, task: asyncio.Task[int]) -> None:
        is_killed = task.cancelled() or task.exception() is not None
        self.wait_status = self._killed_by if is_killed else task.result() << 8
        for fd in self.fds:
            os.close(fd)
        self.kernel.running.pop(self.pid, None)
        self.kernel.clock.restless -= 1
        self.ended.set()
        self.at_end.close()

    def kill(self, number: int) -> None:
        """Send a signal."""
        if number in self.handlers and number != signal.SIGKILL:
            action = self.handlers[number]
            if action is not None:
                action()
        elif number not in _HARMLESS:
            self._killed_by = number
            self.is_dying = True
            self.task.cancel()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count as one that waits for the box itself, so that time may pass."""
        self.kernel.clock.restless -= 1
        try:
            yield
        finally:
            self.kernel.clock.restless += 1

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        woken = asyncio.Event()
        timer = self.kernel.box_loop.pull(max(0.0, seconds), woken.set)
        try:
            with self.waiting():
                await woken.wait()
        finally:
            timer.cancel()

    async def wait_for(self, child: Context) -> int:
        """The exit code of a child, as a shell tells it."""
        with self.waiting():
            await child.ended.wait()
        code = os.waitstatus_to_exitcode(child.wait_status)
        return code if code >= 0 else 128 - code

    async def ready(self, fd: int, events: int) -> None:
        """Wait until a descriptor can be read or written."""
        woken = asyncio.Event()
        self.kernel.box_loop.watch(fd, events, lambda _: woken.set())
        is_outside = fd == self.fds[0] and self.has_host_input
        try:
            with nullcontext() if is_outside else self.waiting():
                await woken.wait()
        finally:
            self.kernel.box_loop.forget(fd)

    def use_memory(self, count: int) -> None:
        """Say how many bytes this program holds. Above the box's `memory` it is killed, as by the kernel."""
        self.memory = count
        limit = self.kernel.box.spec.memory
        if limit is not None and sum(each.memory for each in self.kernel.alive) > limit:
            self.kill(signal.SIGKILL)

    def path(self, path: str) -> str:
        """A path as this process means it, absolute."""
        return os.path.join(self.cwd, path)

    def locate(self, path: str, *, follow: bool = True, change: bool = False) -> bytes:
        """The real path of a file of the box."""
        return self.files.locate(self.path(path), follow=follow, change=change)

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        """A descriptor that is closed when the program ends."""
        fd = self.files.open(self.path(path), flags)
        self.at_end.callback(os.close, fd)
        return fd

    def read_file(self, path: str) -> bytes:
        return self.files.read(self.path(path))

    def write_file(self, path: str, data: bytes | str) -> None:
        self.files.replace(self.path(path), os.fsencode(data) if isinstance(data, str) else data)

    async def print(self, *words: object, err: bool = False) -> None:
        """A line on standard output, or on standard error."""
        await (self.stderr if err else self.stdout).write(" ".join(map(str, words)) + "\n")

    def spawn(self, argv: Sequence[str], env: Mapping[str, str], fds: Stdio) -> Context:
        """Start a child. Raises OSError."""
        return self.kernel.start_process(argv, env, self.cwd, self.uid, fds, self)

    async def run(self, argv: Sequence[str]) -> int:
        """Run another program with the same input and output; gives its exit code."""
        return await self.wait_for(self.spawn(argv, self.env, self.fds))

    def on_signal(self, number: int, action: Callable[[], None] | None) -> None:
        """Do `action` when the signal comes, instead of dying; None ignores it."""
        self.handlers[number] = action

    def listen(self, port: int) -> Listener:
        """Serve a port of the box, which the host reaches by `connect` and `tunnel`."""
        listeners = self.kernel.listeners
        if port in listeners:
            raise error(errno.EADDRINUSE, "")
        listeners[port] = Listener(self)
        self.at_end.callback(listeners.pop, port)
        return listeners[port]


class Kernel(ProcessTable):
    """The agent's table of processes, and all that run in the box."""

    def __init__(self, box: Box, loop: BoxLoop) -> None:
        super().__init__(loop)
        self.box, self.files, self.box_loop, self.clock = box, box.files, loop, loop.clock
        self.pids = itertools.count(2)
        self.running: dict[int, Context] = {}
        self.listeners: dict[int, Listener] = {}

    @property
    def alive(self) -> list[Context]:
        return [process for process in self.running.values() if not process.is_dying]

    def spawn(self, request: guest_spawn.Request, mark: str) -> guest_spawn.Spawned:
        if request.pty is not None:
            raise Failure("unsupported", "a mock box has no terminals")
        if not self.files.exists(request.cwd):
            raise Failure("not_found", f"cwd {request.cwd}: No such file or directory")
        return guest_spawn.start(request, mark, self._fork_exec)

    def _fork_exec(
        self, request: guest_spawn.Request, _env: dict[str, str], stdio: list[int]
    ) -> tuple[int, tuple[int, str] | None]:
        uid = self.files.uid if request.user is None else request.user.uid
        try:
            process = self.start_process(request.argv, request.env, request.cwd, uid, (stdio[0], stdio[1], stdio[2]))
        except (FileNotFoundError, PermissionError) as problem:
            return 0, guest_spawn.why_not_started(problem.errno or 0, request.argv[0])
        process.at_end.callback(lambda: self.box_loop.ended(process.pid, process.wait_status))
        if request.timeout_s is not None:
            process.at_end.callback(self.box_loop.pull(request.timeout_s, lambda: None).cancel)
        return process.pid, None

    def signal_trees(self, roots: dict[int, str], number: int) -> None:
        for process in [each for each in self.running.values() if each.session in roots]:
            process.kill(number)

    def signal_group(self, pid: int, number: int) -> None:
        self.signal_trees({pid: ""}, number)

    def signal_process(self, pid: int, number: int) -> None:
        if pid in self.running:
            self.running[pid].kill(number)

    def terminate(self) -> None:
        for process in self.alive:
            process.kill(signal.SIGTERM)

    def all_ended(self) -> bool:
        return not self.running

    def start_process(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, uid: int, fds: Stdio, parent: Context | None = None
    ) -> Context:
        """Start a program. Raises OSError as `execve` and `fork` would."""
        name, programs, pids = argv[0], self.box.host.programs, self.box.spec.pids
        if name not in programs and not self.has_program(name):
            is_file = "/" in name and self.files.exists(os.path.join(cwd, name))
            raise error(errno.EACCES if is_file else errno.ENOENT, name)
        if pids is not None and len(self.alive) + 1 >= pids:
            raise error(errno.EAGAIN, "")
        return Context(self, programs[os.path.basename(name)], list(argv), env, cwd, uid, fds, parent)

    def has_program(self, path: str) -> bool:
        return os.path.dirname(path) in ("/bin", "/usr/bin") and os.path.basename(path) in self.box.host.programs

    def find_program(self, name: str, path: str) -> str | None:
        return next((each for folder in path.split(":") if self.has_program(each := f"{folder}/{name}")), None)

    def halt(self) -> list[asyncio.Task[int]]:
        """Kill everything; gives the tasks, to be awaited."""
        processes = list(self.running.values())
        for process in processes:
            process.kill(signal.SIGKILL)
        return [process.task for process in processes]
