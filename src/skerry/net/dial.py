"""Dialers of agents: each gives a `Stream`, or raises AgentUnreachable within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import threading
import tty
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from skerry.aio import backoff
from skerry.errors import AgentUnreachable

from .stream import Buffer, FdStream, Receiver, Stream

_log = logging.getLogger("skerry.net")

AGENT_PORT = 52  # the agent's vsock port

_TIMEOUT_S = 5.0
_MAX_UNIX_PATH = 107
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.002, 0.02
_MAX_HANDSHAKE = 32
_HANDSHAKE = re.compile(rb"OK [0-9]+\n")
_STDERR_KEPT = 4096
_LAST_READS = 256
_EXIT_GRACE_S = 1.0
_SILENT_S = 3.0
"""How long an address of a host may be silent before the next one is tried."""


async def unix(path: str | os.PathLike[str], *, timeout_s: float = _TIMEOUT_S) -> Stream:
    """Dial a unix socket, at a path of any length."""
    with _socket(socket.AF_UNIX) as sock:
        async with _dialling(os.fspath(path), timeout_s):
            await connect_unix(sock, os.fspath(path))
        return _stream(sock)


async def tcp(host: str, port: int, *, timeout_s: float = _TIMEOUT_S) -> Stream:
    """Dial a TCP port; each address of the host is tried in turn."""
    async with _dialling(f"{host}:{port}", timeout_s):
        sock = await connect_tcp(host, port)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _stream(sock)


async def vsock(cid: int, port: int = AGENT_PORT, *, timeout_s: float = _TIMEOUT_S) -> Stream:
    """Dial a virtual machine's vsock port."""
    async with _dialling(f"vsock {cid}:{port}", timeout_s):
        with _socket(socket.AF_VSOCK) as sock:
            await asyncio.get_running_loop().sock_connect(sock, (cid, port))
            return _stream(sock)


async def firecracker(
    uds_path: str | os.PathLike[str], port: int = AGENT_PORT, *, timeout_s: float = _TIMEOUT_S
) -> Stream:
    """Dial a guest's vsock port behind Firecracker's unix socket, which no link may stand for."""
    with _socket(socket.AF_UNIX) as sock:
        async with _dialling(f"{os.fspath(uds_path)} (guest port {port})", timeout_s):
            await connect_unix(sock, os.fspath(uds_path), follow=False)
            await asyncio.get_running_loop().sock_sendall(sock, b"CONNECT %d\n" % port)
            answer = await _read_handshake(sock)
        if not _HANDSHAKE.fullmatch(answer):
            what = f"answered {answer!r}" if answer else "closed the stream: nothing listens there in the guest"
            raise AgentUnreachable(f"Firecracker's {os.fspath(uds_path)} refused port {port}: it {what}")
        return _stream(sock)


async def device(path: str | os.PathLike[str]) -> Stream:
    """Open a character device: a virtio-serial port, a terminal (put in raw mode)."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISCHR(os.fstat(fd).st_mode):
                raise AgentUnreachable(f"cannot reach the agent at {os.fspath(path)}: not a character device")
            if os.isatty(fd):
                tty.setraw(fd)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise AgentUnreachable(f"cannot reach the agent at {os.fspath(path)}: {error.strerror}") from error
    return FdStream(fd, fd)


async def process(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Stream:
    """Start a process that ends with the stream, which is its stdin and stdout."""
    try:
        return ProcessStream(argv, env)
    except OSError as error:
        raise AgentUnreachable(f"cannot start {argv[0]!r} to reach the agent: {error.strerror}") from error


class ProcessStream(Stream):
    """Stdio of a process. If it ends by itself, `closed` is told its code and its last words."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str] | None) -> None:
        self._name = argv[0]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(
            argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        with self._child.stdin as stdin, self._child.stdout as stdout:
            self._pipes = FdStream(os.dup(stdout.fileno()), os.dup(stdin.fileno()))
        self._stderr = self._child.stderr
        os.set_blocking(self._stderr.fileno(), False)
        self._last_words = b""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pidfd: int | None = None
        self._grace: asyncio.TimerHandle | None = None

    def start(self, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        self._loop.add_reader(self._stderr.fileno(), self._on_stderr)
        self._pipes.start(self)

    @property
    def buffered(self) -> int:  # type: ignore[override]
        return self._pipes.buffered

    def write(self, *parts: Buffer) -> None:
        self._pipes.write(*parts)

    async def drained(self) -> None:
        await self._pipes.drained()

    def received(self, data: memoryview) -> None:
        if self._receiver is not None:
            self._receiver.received(data)

    def closed(self, error: Exception | None) -> None:
        """Wait a moment for the process's end, since the reason for the end of its pipes is there."""
        if self.is_open and self._loop is not None:
            self._pidfd = os.pidfd_open(self._child.pid)
            self._loop.add_reader(self._pidfd, self._on_exit)
            self._grace = self._loop.call_later(_EXIT_GRACE_S, self._on_exit)

    def _on_stderr(self) -> bool:
        """Keep the tail of what there is; false when there is nothing more now."""
        chunk = self._stderr.read(_STDERR_KEPT)
        if chunk:
            self._last_words = (self._last_words + chunk)[-_STDERR_KEPT:]
        elif chunk is not None and self._loop is not None:
            self._loop.remove_reader(self._stderr.fileno())
        return bool(chunk)

    def _on_exit(self) -> None:
        for _ in range(_LAST_READS):  # its children may still write, without end
            if not self._on_stderr():
                break
        code = self._child.poll()
        end = "closed its output" if code is None else f"ended with code {code}"
        words = self._last_words.decode(errors="replace").strip()
        self._end(AgentUnreachable(f"{self._name!r}, the way to the agent, {end}{': ' if words else ''}{words}"))

    def _release(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
        fds = [self._stderr.fileno()] + ([] if self._pidfd is None else [self._pidfd])
        if self._loop is not None and not self._loop.is_closed():
            for fd in fds:
                self._loop.remove_reader(fd)
        self._pipes.close()
        self._stderr.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        _reap(self._child)


def _socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


def _stream(sock: socket.socket) -> Stream:
    fd = sock.detach()
    return FdStream(fd, fd)


@contextlib.asynccontextmanager
async def _dialling(where: str, timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except OSError as error:
        if error.errno is None and isinstance(error, TimeoutError):
            raise AgentUnreachable(f"cannot reach the agent at {where}: no answer in {timeout_s:g} s") from None
        raise AgentUnreachable(f"cannot reach the agent at {where}: {error.strerror or error}") from error


async def connect_unix(sock: socket.socket, path: str, *, follow: bool = True) -> None:
    """Connect to a path. With `follow` false only a socket will do, not a link, which may lead to another's."""
    with short_enough(path) if follow else _itself(path) as address:
        for delay_s in backoff(_FIRST_RETRY_S, _LONGEST_RETRY_S):
            try:
                sock.connect(address)
                return
            except BlockingIOError:
                # The backlog is full: there is no event for it, and asyncio would take it for a success.
                _log.debug("the backlog of %s is full; retry in %s s", path, delay_s)
                await asyncio.sleep(delay_s)


async def connect_tcp(host: str, port: int) -> socket.socket:
    """Connect to the first address of a host, of either kind, that answers; a silent one is waited for if it is the
    last. Raises OSError."""
    loop = asyncio.get_running_loop()
    refusal = OSError("the host has no address")
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, _, _, _, address) in enumerate(found, start=1):
        sock = _socket(family)
        try:
            async with asyncio.timeout(_SILENT_S if number < len(found) else None):
                await loop.sock_connect(sock, address)
            return sock
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            refusal = error
    raise refusal


class ProcessSocket:
    """Socket that is the stdin and stdout of a process, which has no terminal to ask anything on."""

    def __init__(self, argv: Sequence[str]) -> None:
        """Raises OSError if there is no such program."""
        self.sock, theirs = socket.socketpair()
        try:
            with theirs:
                fd = theirs.fileno()
                self._child = subprocess.Popen(
                    argv, stdin=fd, stdout=fd, stderr=subprocess.PIPE, bufsize=0, start_new_session=True
                )
        except BaseException:
            self.sock.close()
            raise
        assert self._child.stderr is not None
        self._stderr = self._child.stderr
        self.sock.setblocking(False)
        os.set_blocking(self._stderr.fileno(), False)

    def last_words(self) -> str:
        """What it has said on stderr, as far as that was not read."""
        return (self._stderr.read(_STDERR_KEPT) or b"").decode(errors="replace").strip()

    def end(self) -> None:
        """Close the socket and end the process; quiet if that was done."""
        self.sock.close()
        self._stderr.close()
        if self._child.poll() is None:
            os.killpg(self._child.pid, signal.SIGKILL)
        _reap(self._child)


def _reap(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        # Not by the loop, which may be closed before the kernel is done with the process.
        threading.Thread(target=child.wait, daemon=True).start()


@contextlib.contextmanager
def short_enough(path: str) -> Iterator[str]:
    """A name for `path` that fits into a socket's address."""
    if len(os.fsencode(path)) <= _MAX_UNIX_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


@contextlib.contextmanager
def _itself(path: str) -> Iterator[str]:
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            raise OSError(errno.ENOTSOCK, f"{path} is not a socket")
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


async def _read_handshake(sock: socket.socket) -> bytes:
    """Read one bounded line, byte by byte: what follows it is already the agent's."""
    line = b""
    while len(line) < _MAX_HANDSHAKE and not line.endswith(b"\n"):
        byte = await asyncio.get_running_loop().sock_recv(sock, 1)
        if not byte:
            break
        line += byte
    return line
