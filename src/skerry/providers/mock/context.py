"""What a program of a mock box is given: its arguments, streams, files, time and ports."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from skerry.providers.mock.handles import CHUNK, OpenFile, Pipe

if TYPE_CHECKING:
    from skerry.providers.mock.kernel import Process


class Reader:
    """A program's standard input, or what a peer sends; iterate it for lines."""

    def __init__(self, process: Process, file: OpenFile | None) -> None:
        self._process = process
        self._file = file
        self._kept = b""

    async def read(self, count: int = CHUNK) -> bytes:
        """At most `count` bytes; none at the end."""
        if self._file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        await self._process.step()
        if self._kept:
            data, self._kept = self._kept[:count], self._kept[count:]
            return data
        return await self._file.read(self._process, count)

    async def read_all(self) -> bytes:
        """Everything to the end; what is held counts as the program's memory."""
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

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._lines()

    async def _lines(self) -> AsyncIterator[bytes]:
        while line := await self.readline():
            yield line


class Writer:
    """A program's standard output or error, or the way to a peer."""

    def __init__(self, process: Process, file: OpenFile | None) -> None:
        self._process = process
        self._file = file

    async def write(self, data: bytes | str) -> None:
        """Send it all; waits while nobody takes it."""
        if self._file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        data = os.fsencode(data) if isinstance(data, str) else bytes(data)
        for start in range(0, len(data), CHUNK):
            await self._process.step()
            await self._file.write(self._process, data[start : start + CHUNK])

    def close(self) -> None:
        if self._file is not None:
            self._file.release()
            self._file = None


class Connection:
    """One peer of a server in the box."""

    def __init__(self, process: Process, incoming: Pipe, outgoing: Pipe) -> None:
        self.reader = Reader(process, incoming.reader.retain())
        self.writer = Writer(process, outgoing.writer.retain())
        process.on_end += [incoming.reader.closed, outgoing.writer.closed]

    def close(self) -> None:
        """No more will be sent."""
        self.writer.close()


class Listener:
    """A server's port in the box."""

    def __init__(self, process: Process) -> None:
        from skerry.providers.mock.kernel import Bell

        self._process = process
        self._waiting: list[tuple[Pipe, Pipe]] = []
        self._bell = Bell()

    async def accept(self) -> Connection:
        """Wait for the next peer."""
        while not self._waiting:
            await self._bell.wait(self._process)
        incoming, outgoing = self._waiting.pop(0)
        return Connection(self._process, incoming, outgoing)

    def connect(self) -> tuple[Pipe, Pipe]:
        """The peer's side: what it sends, and what it receives."""
        pipes = Pipe(), Pipe()
        self._waiting.append(pipes)
        self._bell.ring()
        return pipes


class Context:
    """A running program's view of its box, as in this stand-in for a test runner:

        @mock.program("pytest")
        async def pytest(ctx):
            source = ctx.read_file("app.py").decode()
            await ctx.sleep(2.5)                       # virtual: takes no time
            await ctx.print("1 failed" if "bug" in source else "1 passed")
            return int("bug" in source)

    Paths are relative to `cwd`. A program that is not async may return its exit code at once.
    """

    def __init__(
        self,
        process: Process,
        *,
        argv: list[str] | None = None,
        env: Mapping[str, str] | None = None,
        fds: Mapping[int, OpenFile] | None = None,
    ) -> None:
        self.process = process
        self.argv = process.argv if argv is None else argv
        self.env = process.env if env is None else dict(env)
        self.fds = process.fds if fds is None else fds
        self.stdin = Reader(process, self.fds.get(0))
        self.stdout = Writer(process, self.fds.get(1))
        self.stderr = Writer(process, self.fds.get(2))

    @property
    def cwd(self) -> str:
        return os.fsdecode(self.process.cwd)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def print(self, *words: object, err: bool = False) -> None:
        """A line on standard output, or on standard error."""
        await (self.stderr if err else self.stdout).write(" ".join(map(str, words)) + "\n")

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        await self.process.sleep(seconds)

    def read_file(self, path: str) -> bytes:
        process = self.process
        return bytes(process.machine.files.open(process.path(path), "r", process.uid).data)

    def write_file(self, path: str, data: bytes | str) -> None:
        data = os.fsencode(data) if isinstance(data, str) else data
        self.process.machine.files.replace(self.process.path(path), data, self.process.uid)

    async def run(self, argv: Sequence[str]) -> int:
        """Run another program with the same input and output; gives its exit code."""
        process = self.process
        child = process.machine.spawn(
            list(argv), env=self.env, cwd=process.cwd, uid=process.uid, fds=self.fds, parent=process
        )
        return await process.wait_for(child)

    def on_signal(self, number: int, action: Callable[[], None] | None) -> None:
        """Do `action` when the signal comes, instead of dying; None ignores it."""
        self.process.handlers[number] = action

    def use_memory(self, count: int) -> None:
        """Say how many bytes this program holds. Above the box's `memory` it is killed, as by the kernel."""
        self.process.use_memory(count)

    def listen(self, port: int) -> Listener:
        """Serve a port of the box, which the host reaches by `connect` and `tunnel`."""
        listeners = self.process.machine.listeners
        if port in listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listener = listeners[port] = Listener(self.process)

        def close() -> None:
            listeners.pop(port, None)

        self.process.on_end.append(close)
        return listener
